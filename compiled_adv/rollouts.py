"""Takes a rollout file or a folder of them; gives one dict of tensors per prompt, and writes results back as files.

One file is one prompt's rows. A folder is one batch, since all its files carry the same tensors; sub-folders are
batches of their own. Nothing but plain tensors is unpickled, and no header can claim more memory than its file holds.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_adv.batch import RolloutGroup, check_tensor, concat_batch
from compiled_adv.errors import BatchError, OutputExists, OutputFailed, RolloutFile
from compiled_adv.files import UNFINISHED, write_whole

SUFFIXES = (".safetensors", ".pt")
EMBEDDED = Path(__file__).parent / "data"


def find_rollouts(root: Path) -> dict[Path, list[Path]]:
    """Folder (relative to the root) -> its rollout files, both in sorted order; other files are ignored."""
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise RolloutFile(f"{root} is no rollout file", hint=f"a file that ends in {' or '.join(SUFFIXES)}")
        return {Path(): [root]}
    if not root.is_dir():
        raise RolloutFile(f"there is no file or folder {root}")
    folders: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file():
            folders.setdefault(path.parent.relative_to(root), []).append(path)
    if not folders:
        raise RolloutFile(f"{root} holds no rollout files", hint=f"files that end in {' or '.join(SUFFIXES)}")
    return dict(sorted(folders.items()))


def read_groups(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Every file of one folder; they must carry the same tensors."""
    groups: list[dict[str, Any]] = []
    first: tuple[Path, dict[str, torch.dtype]] | None = None
    for path in files:
        group = read_group(path)
        form = {key: value.dtype for key, value in group.items() if isinstance(value, Tensor)}
        first = first or (path, form)
        for key in sorted(form.keys() | first[1].keys()):
            here, there = form.get(key), first[1].get(key)
            if here != there:
                what = f"{path} carries other tensors than {first[0].name} beside it"
                raise RolloutFile(what, found=f"{key!r}: {here} and {there}", hint="a folder for each kind")
        groups.append(group)
    return groups


def read_group(path: Path) -> dict[str, Any]:
    """The tensors of one prompt; `row_counts` and `references` become its `rollout_group`."""
    try:
        tensors = _read_pt(path) if path.suffix == ".pt" else _read_safetensors(path)
    except RolloutFile:
        raise
    except Exception as error:  # a corrupt file may raise anything; the cause stays chained
        reason = (str(error).splitlines() or [""])[0]
        raise RolloutFile(f"{path} cannot be read", found=f"{type(error).__name__}: {reason}") from error
    try:
        for key, tensor in tensors.items():
            check_tensor(key, tensor, key)
    except BatchError as error:
        raise _refused(path, error) from error
    for key in ("row_counts", "references"):
        if key in tensors and tensors[key].ndim != 1:
            raise RolloutFile(f"{path}: {key!r} needs one dimension", found=list(tensors[key].shape))
    counts_N, references_N = tensors.pop("row_counts", None), tensors.pop("references", None)
    group: dict[str, Any] = dict(tensors)
    if counts_N is not None or references_N is not None:
        # Without counts each row is a rollout of its own. Only NaN, which stands for no reference, differs from itself.
        n_rows = max((tensor.shape[0] for tensor in tensors.values() if tensor.ndim), default=0)
        counts = [1] * n_rows if counts_N is None else counts_N.tolist()
        references = [] if references_N is None else references_N.tolist()
        group["rollout_group"] = RolloutGroup(tuple(counts), tuple(None if x != x else x for x in references))
    try:
        concat_batch([group])  # one prompt is a batch too: its checks, with the file's name
    except BatchError as error:
        raise _refused(path, error) from error
    return group


def _refused(path: Path, error: BatchError) -> RolloutFile:
    return RolloutFile(f"{path}: {error.what}", found=error.found, hint=error.hint)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    # Opening maps the file and holds every offset of the header to its size, before anything is allocated.
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)


def _read_pt(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise RolloutFile(f"{path} is compressed", hint="write it with torch.save")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose own text advises to load it unsafely
        raise RolloutFile(f"{path} holds more than tensors", hint="a dict of tensors, by torch.save") from error
    if not isinstance(tensors, dict):
        raise RolloutFile(f"{path} holds no dict of tensors", found=type(tensors).__name__)
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise RolloutFile(f"{path} holds {key!r}, which is no tensor", found=type(tensor).__name__)
        # Concatenating would fill in an expanded view, which could then outgrow memory.
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise RolloutFile(f"{path}: {key!r} is no dense tensor", hint="save tensor.contiguous()")
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors.values())}
    if sum(storages.values()) > size:  # an older torch believes what the pickle states
        raise RolloutFile(f"{path} states more bytes than it holds")
    return {key: tensor.detach() for key, tensor in tensors.items()}


# ---- results ----


def plan_results(out: Path, root: Path, folders: Mapping[Path, list[Path]], *, overwrite: bool) -> list[Path]:
    """One result file per rollout file, in order, under the same name; refuses what a later write would spoil."""
    try:
        if out.exists() and not out.is_dir():
            raise OutputExists(f"{out} is not a folder")
        if out.is_dir() and any(map(_is_result, out.iterdir())) and not overwrite:
            raise OutputExists(f"{out} is not empty", hint="another folder, or --overwrite")
        inside = out.resolve()
        if root.is_dir() and inside.is_relative_to(root.resolve()):
            raise OutputFailed(f"{out} lies in the rollout folder {root}", hint="a folder outside it")
        results = []
        for folder, paths in folders.items():
            if not (out / folder).resolve().is_relative_to(inside):
                raise OutputFailed(f"{out / folder} leads out of {out}")
            for path in paths:
                result = out / folder / path.name
                if result.exists() and result.samefile(path):
                    raise OutputFailed(f"{result} is the rollout file itself", hint="another --out")
                results.append(result)
    except OSError as error:
        raise OutputFailed(f"{out} cannot be used", found=error) from error
    return results


def _is_result(path: Path) -> bool:
    """Whether something is more than what a killed run left behind (see write_group)."""
    return not (path.name.startswith(".") and path.name.endswith(UNFINISHED))


def write_group(path: Path, group: Mapping[str, Any]) -> None:
    """The group's tensors in the form that `read_group` takes; a reader sees the whole file or none of it."""
    write_whole(path, _encode(path.suffix, group))


def _encode(suffix: str, group: Mapping[str, Any]) -> bytes:
    # Cloned, since a view would drag its whole batch into the file.
    tensors = {
        key: value.detach().clone(memory_format=torch.contiguous_format)
        for key, value in group.items()
        if isinstance(value, Tensor)
    }
    rollouts = group.get("rollout_group")
    if rollouts is not None:
        tensors["row_counts"] = torch.tensor(rollouts.row_counts)
        if rollouts.rewards:
            numbers = [math.nan if reward is None else reward for reward in rollouts.rewards]
            tensors["references"] = torch.tensor(numbers, dtype=torch.float64)
    if suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        return buffer.getvalue()
    from safetensors.torch import save

    return save(tensors)
