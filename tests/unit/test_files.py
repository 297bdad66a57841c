"""A file is there whole, or what was there before is."""

import pytest

from compiled_adv.errors import OutputFailed
from compiled_adv.files import write_whole


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
