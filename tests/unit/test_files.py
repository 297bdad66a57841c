"""A file is there whole, or what was there before is."""

from pathlib import Path

import pytest

from compiled_adv.errors import LengthsFile, OutputFailed
from compiled_adv.files import check_outputs, read_json, write_together, write_whole


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path):
    for content in (b"first", b"second"):
        write_whole(tmp_path / "new" / "file", content)
        assert (tmp_path / "new" / "file").read_bytes() == content
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["file"]


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed):
        write_whole(tmp_path / "file" / "page.html", b"x")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("bad", ["folder", "", "file/below", "na\0me"])
def test_of_files_that_belong_together_none_is_written_where_one_cannot_be(tmp_path, bad):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed):
        write_together({tmp_path / "good": b"x", tmp_path / bad: b"y"})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("outputs", [["input"], ["one", "folder/../one"], ["link"]])
def test_a_file_that_would_spoil_an_input_or_another_is_refused(tmp_path, outputs):
    (tmp_path / "folder").mkdir()
    (tmp_path / "input").write_text("mine")
    (tmp_path / "link").symlink_to("input")
    with pytest.raises(OutputFailed):
        check_outputs([tmp_path / each for each in outputs], [tmp_path / "input"])


@pytest.mark.parametrize("content", [b"", b" \n", b"{", b"[" * 100_000, b'{"a": 1, "a": 2}', b"\xff\xfe\0", b"1" * 101])
def test_what_is_no_json_is_one_error(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(LengthsFile):
        read_json(tmp_path / "file", 100, LengthsFile, "a hint")


def test_a_device_without_an_end_is_read_to_the_limit():
    with pytest.raises(LengthsFile, match="larger than 100 bytes"):
        read_json(Path("/dev/zero"), 100, LengthsFile, "a hint")
