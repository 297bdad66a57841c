"""Rollout files: what is read, what is refused by name, and that a result is written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_adv.batch import RolloutGroup
from compiled_adv.errors import OutputExists, OutputFailed, RolloutFile
from compiled_adv.rollouts import EMBEDDED, SUFFIXES, find_rollouts, plan_results, read_group, read_groups, write_group


def refused(path: Path) -> str:
    """The message for one bad file, which must name it."""
    with pytest.raises(RolloutFile) as caught:
        read_group(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def tensors_of(rollouts: Path) -> dict[str, torch.Tensor]:
    return load_file(rollouts / "group_000.safetensors")


# ---- finding ----


def test_files_of_a_folder_come_in_sorted_order(rollouts: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "c.pt"):
        (rollouts / name).touch()
    names = [path.name for path in find_rollouts(rollouts)[Path()]]
    assert names == ["a.safetensors", "b.safetensors", "c.pt", "group_000.safetensors", "group_001.safetensors"]


def test_other_files_and_hidden_ones_are_ignored(rollouts: Path) -> None:
    for name in ("index.json", "notes.txt", ".group_009.safetensors"):
        (rollouts / name).write_text("{}")
    assert len(find_rollouts(rollouts)[Path()]) == 2


def test_each_sub_folder_is_a_batch_of_its_own(rollouts: Path) -> None:
    (rollouts / "more" / "deep").mkdir(parents=True)
    save_file(tensors_of(rollouts), rollouts / "more" / "deep" / "x.safetensors")
    assert [str(folder) for folder in find_rollouts(rollouts)] == [".", "more/deep"]


def test_a_single_file_is_a_batch_of_one_prompt(rollouts: Path) -> None:
    path = rollouts / "group_001.safetensors"
    assert find_rollouts(path) == {Path(): [path]}


@pytest.mark.parametrize("name", ["nowhere", "empty", "notes.txt"])
def test_a_root_without_rollouts_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RolloutFile, match=name):
        find_rollouts(tmp_path / name)


# ---- reading ----


def test_tensors_are_read_as_they_lie(rollouts: Path) -> None:
    written = tensors_of(rollouts)
    read = read_group(rollouts / "group_000.safetensors")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[key], written[key]) and read[key].dtype == written[key].dtype for key in written)


def test_a_pt_file_reads_like_safetensors(rollouts: Path) -> None:
    written = tensors_of(rollouts)
    torch.save(written, rollouts / "group.pt")
    read = read_group(rollouts / "group.pt")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[key], written[key]) for key in written)


def test_row_counts_and_references_become_the_rollout_group(rollouts: Path) -> None:
    more = {"row_counts": torch.tensor([1, 1]), "references": torch.tensor([0.5, math.nan])}
    save_file(tensors_of(rollouts) | more, rollouts / "g.safetensors")
    group = read_group(rollouts / "g.safetensors")
    assert group["rollout_group"] == RolloutGroup(row_counts=(1, 1), rewards=(0.5, None))
    assert not more.keys() & group.keys()


def test_row_counts_alone_give_no_reference(rollouts: Path) -> None:
    save_file(tensors_of(rollouts) | {"row_counts": torch.tensor([2])}, rollouts / "g.safetensors")
    assert read_group(rollouts / "g.safetensors")["rollout_group"] == RolloutGroup(row_counts=(2,), rewards=())


def test_references_alone_belong_to_one_row_each(rollouts: Path) -> None:
    save_file(tensors_of(rollouts) | {"references": torch.tensor([0.5, 1.0])}, rollouts / "g.safetensors")
    assert read_group(rollouts / "g.safetensors")["rollout_group"] == RolloutGroup((1, 1), (0.5, 1.0))


@pytest.mark.parametrize(
    "more",
    [
        {"row_counts": torch.tensor([1, 2])},
        {"row_counts": torch.tensor([2, 0])},
        {"row_counts": torch.tensor([1.0, 1.0])},
        {"row_counts": torch.tensor([True, True])},
        {"row_counts": torch.tensor([[1, 1]])},
        {"row_counts": torch.tensor([1, 1]), "references": torch.tensor([0.5])},
        {"references": torch.tensor([0.5, math.inf])},
        {"references": torch.tensor(0.5)},
        {"values": torch.zeros(3, 6)},
        {"values": torch.zeros(2, 5)},
        {"rewards": torch.zeros(())},
    ],
    ids=lambda more: " ".join(f"{key}={value.tolist()}" for key, value in more.items())[:40],
)
def test_tensors_that_do_not_fit_the_rows_are_refused(rollouts: Path, more: dict[str, torch.Tensor]) -> None:
    save_file(tensors_of(rollouts) | more, rollouts / "bad.safetensors")
    refused(rollouts / "bad.safetensors")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "bad.safetensors")
    refused(tmp_path / "bad.safetensors")


def test_every_truncation_of_a_file_is_refused(rollouts: Path) -> None:
    content = (rollouts / "group_000.safetensors").read_bytes()
    bad = rollouts / "bad.safetensors"
    for size in (0, 1, 7, 8, 9, 200, len(content) // 2, len(content) - 1):
        bad.write_bytes(content[:size])
        refused(bad)


def test_bytes_after_the_end_are_refused(rollouts: Path) -> None:
    bad = rollouts / "bad.safetensors"
    bad.write_bytes((rollouts / "group_000.safetensors").read_bytes() + b"\0")
    refused(bad)


@pytest.mark.parametrize(
    "header",
    [
        {"rewards": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"rewards": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}},
        {"rewards": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 4]}},
        {"rewards": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"rewards": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"rewards": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}},
        ["rewards"],
    ],
    ids=["past the end", "larger than its bytes", "overflow", "negative", "backwards", "unknown dtype", "no mapping"],
)
def test_a_header_that_claims_what_the_file_does_not_hold_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    refused(tmp_path / "bad.safetensors")


def test_a_header_longer_than_the_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    refused(tmp_path / "bad.safetensors")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pt_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"rewards": Bomb(tmp_path / "ran")}, tmp_path / "bad.pt")
    refused(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


def test_a_plain_pickle_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_bytes(pickle.dumps({"rewards": Bomb(tmp_path / "ran")}))
    refused(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(2)],
        {"rewards": [1.0, 0.0]},
        {1: torch.zeros(2)},
        {"rewards": torch.zeros(1).expand(1 << 40)},
        {"rewards": torch.zeros(2, device="meta")},
        {"rewards": torch.eye(2).to_sparse()},
    ],
    ids=["list", "no tensor", "no name", "expanded", "meta", "sparse"],
)
def test_a_pt_file_that_holds_no_dict_of_dense_tensors_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "bad.pt")
    refused(tmp_path / "bad.pt")


def test_a_compressed_pt_file_is_refused(tmp_path: Path) -> None:
    torch.save({"rewards": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bad.pt", "w") as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(tmp_path / "bad.pt")


def test_a_pt_file_whose_pickle_states_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    torch.save({"rewards": torch.zeros(64)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bad.pt", "w") as longer:
        for entry in plain.infolist():
            # 64 elements as a one-byte pickle integer become 65,000 as a two-byte one.
            longer.writestr(entry.filename, plain.read(entry).replace(b"K\x40", b"M\xe8\xfd"))
    refused(tmp_path / "bad.pt")


def test_files_of_one_folder_that_differ_in_tensors_are_both_named(rollouts: Path) -> None:
    tensors = load_file(rollouts / "group_001.safetensors")
    del tensors["values"]
    save_file(tensors, rollouts / "group_001.safetensors")
    with pytest.raises(RolloutFile, match=r"group_001(.|\n)*group_000(.|\n)*'values'"):
        read_groups(find_rollouts(rollouts)[Path()])


def test_files_of_one_folder_that_differ_in_dtype_are_refused(rollouts: Path) -> None:
    tensors = load_file(rollouts / "group_001.safetensors")
    save_file(tensors | {"rewards": tensors["rewards"].long()}, rollouts / "group_001.safetensors")
    with pytest.raises(RolloutFile, match="'rewards': torch.int64 and torch.float32"):
        read_groups(find_rollouts(rollouts)[Path()])


# ---- writing ----


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_written_group_reads_back_the_same(tmp_path: Path, rollouts: Path, suffix: str) -> None:
    group = tensors_of(rollouts) | {"rollout_group": RolloutGroup((1, 1), (0.1, None))}
    write_group(tmp_path / f"sub/group{suffix}", group)
    read = read_group(tmp_path / f"sub/group{suffix}")
    assert read.keys() == group.keys()
    assert read["rollout_group"] == group["rollout_group"]
    assert all(torch.equal(read[key], group[key]) for key in group if key != "rollout_group")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_view_does_not_drag_its_storage_into_the_file(tmp_path: Path, suffix: str) -> None:
    write_group(tmp_path / f"group{suffix}", {"rewards": torch.zeros(1 << 20)[:4]})
    assert (tmp_path / f"group{suffix}").stat().st_size < 1 << 14


def test_writing_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_group(tmp_path / "out" / "group.safetensors", {"rewards": torch.zeros(2)})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["group.safetensors"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "group.safetensors"
    write_group(path, {"rewards": torch.zeros(2)})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputFailed, match="No space left"):
        write_group(path, {"rewards": torch.ones(2)})
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputFailed):
        write_group(tmp_path / "file" / "group.safetensors", {"rewards": torch.zeros(2)})


def plan(out: Path, root: Path, *, overwrite: bool = False) -> list[Path]:
    return plan_results(out, root, find_rollouts(root), overwrite=overwrite)


def test_results_keep_names_and_sub_folders(tmp_path: Path, rollouts: Path) -> None:
    (rollouts / "more").mkdir()
    save_file(tensors_of(rollouts), rollouts / "more" / "x.safetensors")
    out = tmp_path / "out"
    names = [path.relative_to(out).as_posix() for path in plan(out, rollouts)]
    assert names == ["group_000.safetensors", "group_001.safetensors", "more/x.safetensors"]


def test_a_folder_that_is_not_empty_is_refused_without_overwrite(tmp_path: Path, rollouts: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(OutputExists, match="--overwrite"):
        plan(tmp_path / "out", rollouts)
    assert plan(tmp_path / "out", rollouts, overwrite=True)


def test_an_out_that_is_a_file_is_refused(tmp_path: Path, rollouts: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(OutputExists):
        plan(tmp_path / "out", rollouts, overwrite=True)


@pytest.mark.parametrize("inside", [".", "out"])
def test_results_never_go_into_the_rollout_folder(rollouts: Path, inside: str) -> None:
    with pytest.raises(OutputFailed):
        plan(rollouts / inside, rollouts, overwrite=True)


def test_a_result_never_replaces_its_own_rollout_file(rollouts: Path) -> None:
    with pytest.raises(OutputFailed, match="itself"):
        plan(rollouts, rollouts / "group_000.safetensors", overwrite=True)


def test_a_link_that_leads_out_of_the_output_folder_is_refused(tmp_path: Path, rollouts: Path) -> None:
    (rollouts / "more").mkdir()
    save_file(tensors_of(rollouts), rollouts / "more" / "x.safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputFailed, match="leads out"):
        plan(tmp_path / "out", rollouts, overwrite=True)


# ---- the embedded set ----


def test_the_embedded_set_has_both_kinds() -> None:
    assert [str(folder) for folder in find_rollouts(EMBEDDED)] == ["multi_turn", "single_turn"]


def test_the_embedded_set_stays_within_two_megabytes() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()) <= 2_000_000


@pytest.mark.parametrize(("kind", "rows", "tokens"), [("single_turn", 115, 3987), ("multi_turn", 48, 2680)])
def test_the_embedded_set_is_what_its_readme_says(kind: str, rows: int, tokens: int) -> None:
    groups = read_groups(find_rollouts(EMBEDDED)[Path(kind)])
    assert sum(len(group["rewards"]) for group in groups) == rows
    assert sum(int(group["loss_mask"].sum()) for group in groups) == tokens
