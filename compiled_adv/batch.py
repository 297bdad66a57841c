"""Takes one dict of tensors per prompt; gives one padded batch with its metadata, and the way back.

B rows, T tokens. A prompt has several rows; a logical rollout is one or more neighbouring rows of one prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from compiled_adv.errors import (
    BadMeta,
    EmptyBatch,
    MissingKey,
    WrongDevice,
    WrongDtype,
    WrongShape,
    WrongType,
    listed,
    shown,
    suggest,
)
from compiled_adv.scalars import is_finite, is_integer, plain

# Columns of these are tokens: in each prompt they are exactly as wide as its attention_mask.
TOKEN_KEYS = frozenset(
    "input_ids attention_mask loss_mask logprobs prox_logp ref_logp values turn_ids token_rewards".split()
)

# Dtypes that torch computes with; the rest (float8, bits, 4-bit numbers) are for storage alone.
COMPUTABLE = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.uint16, torch.uint32, torch.uint64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.complex32, torch.complex64, torch.complex128)
)

LONGEST_LIST = 1 << 24


@dataclass(frozen=True)
class RolloutGroup:
    """How one prompt's rows form logical rollouts, and the raw reference reward of each."""

    row_counts: tuple[int, ...]  # tensor rows of each logical rollout, in row order
    rewards: tuple[float | None, ...] = ()  # one per logical rollout, None = none for it; empty = all None

    def __post_init__(self) -> None:
        for name in ("row_counts", "rewards"):
            object.__setattr__(self, name, tuple(_list(getattr(self, name), f"rollout_group.{name}")))


@dataclass(frozen=True)
class TrajBatchMeta:
    """What a padded batch no longer shows: which rows belong to which prompt and to which logical rollout."""

    n_trajs: int  # prompts
    traj_group_sizes: list[int]  # tensor rows per prompt
    traj_seqlens: list[int]  # width of each prompt before padding
    rollout_groups: list[RolloutGroup | None] | None = None  # per prompt; None in it: each row is its own rollout

    @property
    def logical_group_sizes(self) -> list[int]:
        """Logical rollouts per prompt."""
        groups = self.rollout_groups or [None] * len(self.traj_group_sizes)
        return [len(g.row_counts) if g else n for g, n in zip(groups, self.traj_group_sizes, strict=True)]


def as_meta(meta: Any) -> TrajBatchMeta | None:
    """The metadata in our class: from ours, from a mapping with its keys, or from an object with its attributes."""
    if meta is None:
        return None
    n_trajs, sizes, seqlens, groups = _read(meta, TrajBatchMeta, optional=("rollout_groups",))
    if groups is not None:
        groups = [None if g is None else _as_group(g) for g in _list(groups, "meta.rollout_groups")]
    sizes, seqlens = _list(sizes, "meta.traj_group_sizes"), _list(seqlens, "meta.traj_seqlens")
    return TrajBatchMeta(plain(n_trajs), sizes, seqlens, groups)


def check_meta(meta: TrajBatchMeta | None, n_rows: int, *, sizes_matter: bool) -> None:
    """Refuse metadata that does not fit: row counts and references always, group sizes where rows must map to them."""
    if meta is None:
        return
    sizes, groups = meta.traj_group_sizes, meta.rollout_groups or []
    if sizes_matter or any(groups):
        for i, size in enumerate(sizes):
            if not is_integer(size, at_least=1):
                raise BadMeta("a group size is not a positive integer", at=f"meta.traj_group_sizes[{i}]", found=size)
        if sum(sizes) != n_rows:
            what = "group sizes do not sum to the rows of the batch"
            found = f"{shown(sizes)}, sum {shown(sum(sizes))}, for {n_rows} rows"
            raise BadMeta(what, at="meta.traj_group_sizes", found=found)
    if meta.rollout_groups is not None and len(groups) != len(sizes):
        what = "rollout_groups needs one entry per prompt"
        raise BadMeta(what, at="meta.rollout_groups", found=f"{len(groups)} for {len(sizes)} prompts")
    for i, group in enumerate(groups):
        if group is not None:
            _check_group(group, sizes[i], f"meta.rollout_groups[{i}]")


def covers(sizes: Iterable[Any], n_rows: int) -> bool:
    """Whether group sizes give every row its prompt; where they do not matter they need not."""
    sizes = [*sizes]
    return all(is_integer(size, at_least=1) for size in sizes) and sum(sizes) == n_rows


def concat_batch(trajs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], TrajBatchMeta]:
    """One padded batch of all prompts' rows. Tensors are new; anything else becomes a list, one entry per prompt."""
    _check_trajs(trajs)
    widths = [_width(traj) for traj in trajs]
    rows = [_rows(traj, i, width) for i, (traj, width) in enumerate(zip(trajs, widths, strict=True))]
    groups = [traj.get("rollout_group") for traj in trajs]
    meta = TrajBatchMeta(len(trajs), rows, widths, [None if g is None else _as_group(g) for g in groups])
    check_meta(meta, sum(rows), sizes_matter=True)
    keys = [key for key in trajs[0] if key != "rollout_group"]
    return {key: _concat(key, [traj[key] for traj in trajs]) for key in keys}, meta


def split_batch(batch: Mapping[str, Any], meta: Any) -> list[dict[str, Any]]:
    """The inverse: one dict per prompt, tensors copied and cropped to its own width, `rollout_group` put back.

    A tensor as wide as the batch is cropped; any other second dimension is not about tokens and stays.
    """
    meta = as_meta(meta)
    if meta is None:
        raise BadMeta("split_batch needs the metadata that concat_batch gave", at="meta", found=None)
    if not isinstance(batch, Mapping):
        raise WrongType("split_batch takes a mapping", at="batch", found=type(batch).__name__)
    for key, value in batch.items():
        if isinstance(value, Tensor):
            check_tensor(key, value, f"batch[{shown(key)}]")
    mask = batch.get("attention_mask")
    width = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim > 1 else max(meta.traj_seqlens, default=0)
    _check_split(meta, width)
    n_rows, out, start = sum(meta.traj_group_sizes), [], 0
    for i, (size, seqlen) in enumerate(zip(meta.traj_group_sizes, meta.traj_seqlens, strict=True)):
        traj: dict[str, Any] = {}
        for key, value in batch.items():
            if isinstance(value, Tensor):
                if value.ndim == 0 or value.shape[0] != n_rows:
                    found = f"{list(value.shape)} for {n_rows} rows"
                    raise WrongShape(
                        f"{shown(key)} does not have one entry per row", at=f"batch[{shown(key)}]", found=found
                    )
                part = value[start : start + size]
                if value.ndim > 1 and value.shape[1] == width:
                    part = part[:, :seqlen]
                # A copy, so that prompts share no storage with each other or with the batch.
                traj[key] = part.clone(memory_format=torch.contiguous_format)
            elif isinstance(value, list) and len(value) == meta.n_trajs:
                traj[key] = value[i]
            else:
                what = f"{shown(key)} is neither a tensor nor a list with one entry per prompt"
                raise WrongType(what, at=f"batch[{shown(key)}]", found=type(value).__name__)
        if meta.rollout_groups is not None and meta.rollout_groups[i] is not None:
            traj["rollout_group"] = meta.rollout_groups[i]
        out.append(traj)
        start += size
    return out


def widen(batch: Mapping[str, Any], width: int) -> dict[str, Any]:
    """A batch of concat_batch with so many token columns: padded as it pads."""
    own = batch["attention_mask"].shape[1]

    def wide(key: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] != own:
            return x
        out = x.new_full((len(x), width, *x.shape[2:]), -1 if key == "turn_ids" else 0)
        out[:, :own] = x
        return out

    return {key: wide(key, x) for key, x in batch.items()} if own < width else dict(batch)


def check_tensor(key: object, x: Tensor, at: str) -> None:
    """Refuse what holds no numbers of its own, or none that torch computes with."""
    if x.layout != torch.strided or x.is_quantized or x.is_nested or x.device.type == "meta":
        raise WrongType(f"{shown(key)} must be a plain tensor", at=at, found=f"{x.layout}, {x.dtype}, {x.device}")
    if is_wrapper(x):
        hint = f"{at}.full_tensor()" if hasattr(x, "full_tensor") else None
        raise WrongType(f"{shown(key)} must be a plain tensor", at=at, found=type(x).__name__, hint=hint)
    if x.dtype not in COMPUTABLE:
        hint = f"{at}.to(torch.float32)"
        raise WrongDtype(f"{shown(key)} has a dtype that torch does not compute with", at=at, found=x.dtype, hint=hint)


def is_wrapper(x: Tensor) -> bool:
    """Whether x hands every operator on (a DTensor, a fake tensor): there is no memory behind its address."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


# ---- metadata ----


def _read(source: Any, kind: type, optional: tuple[str, ...]) -> list[Any]:
    """The values of `kind`'s fields, from a mapping's keys or an object's attributes; optional ones may be missing."""
    names = [f.name for f in fields(kind)]
    if isinstance(source, Mapping):
        unknown = [key for key in source if key not in names]
        if unknown:
            raise BadMeta(f"unknown key {shown(unknown[0])} in metadata", at="meta", hint=suggest(unknown[0], names))
        given = dict(source)
    else:
        given = {name: getattr(source, name) for name in names if hasattr(source, name)}
    missing = [name for name in names if name not in given and name not in optional]
    if missing:
        what = f"metadata lacks '{missing[0]}'"
        raise BadMeta(what, at="meta", found=type(source).__name__, hint=f"a {kind.__name__}: {', '.join(names)}")
    return [given.get(name, next(f.default for f in fields(kind) if f.name == name)) for name in names]


def _as_group(group: Any) -> RolloutGroup:
    if isinstance(group, RolloutGroup):
        return group
    return RolloutGroup(*_read(group, RolloutGroup, optional=("rewards",)))


def _list(value: Any, at: str) -> list[Any]:
    # Without a length it may have no end.
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)) or getattr(value, "ndim", 1) < 1:
        raise BadMeta("a list is needed here", at=at, found=shown(value))
    if len(value) > LONGEST_LIST:
        raise BadMeta("no batch has so many rows", at=at, found=f"a list of {len(value)}")
    return [plain(each) for each in value]


def _check_group(group: RolloutGroup, n_rows: int, at: str) -> None:
    counts, references = group.row_counts, group.rewards
    for count in counts:
        if not is_integer(count, at_least=1):
            raise BadMeta("a row count is not a positive integer", at=f"{at}.row_counts", found=shown(count))
    if sum(counts) != n_rows:
        what = "row counts do not sum to the prompt's rows"
        found = f"{shown(counts)}, sum {shown(sum(counts))}, for {n_rows} rows"
        raise BadMeta(what, at=f"{at}.row_counts", found=found)
    if references and len(references) != len(counts):
        what = "references need one entry per logical rollout, or none at all"
        raise BadMeta(what, at=f"{at}.rewards", found=f"{len(references)} for {len(counts)} logical rollouts")
    for reference in references:
        if reference is not None and not is_finite(reference):
            raise BadMeta("a reference is not a finite number", at=f"{at}.rewards", found=shown(reference))


# ---- concatenating and splitting ----


def _check_trajs(trajs: Sequence[Mapping[str, Any]]) -> None:
    """A list of mappings with the same keys and no tensor but plain ones."""
    if not isinstance(trajs, (list, tuple)):
        what = "concat_batch takes a list with one mapping per prompt"
        raise WrongType(what, at="batch", found=type(trajs).__name__)
    if not trajs:
        raise EmptyBatch("there is no prompt to concatenate", at="batch", found=shown(trajs))
    for i, traj in enumerate(trajs):
        if not isinstance(traj, Mapping):
            raise WrongType("a prompt is not a mapping", at=f"batch[{i}]", found=type(traj).__name__)
        for key, x in traj.items():
            if isinstance(x, Tensor):
                check_tensor(key, x, f"batch[{i}][{shown(key)}]")
    union = {key: i for i, traj in enumerate(trajs) for key in traj if key != "rollout_group"}
    for key, holder in union.items():
        for i, traj in enumerate(trajs):
            if key not in traj:
                raise MissingKey(
                    f"{shown(key)} is in batch[{holder}] and missing in batch[{i}]", at=f"batch[{i}][{shown(key)}]"
                )


def _width(traj: Mapping[str, Any]) -> int:
    """Tokens per row: the attention mask's width, without one the widest tensor's."""
    mask = traj.get("attention_mask")
    wide = [x.shape[1] for x in traj.values() if isinstance(x, Tensor) and x.ndim > 1]
    return mask.shape[1] if isinstance(mask, Tensor) and mask.ndim > 1 else max(wide, default=0)


def _rows(traj: Mapping[str, Any], i: int, width: int) -> int:
    """Rows of one prompt, on which all its tensors agree."""
    tensors = {key: x for key, x in traj.items() if isinstance(x, Tensor)}
    if not tensors:
        raise EmptyBatch("a prompt holds no tensor", at=f"batch[{i}]", found=f"keys {listed(traj)}")
    anchor = tensors.get("attention_mask", next(iter(tensors.values())))
    n_rows = anchor.shape[0] if anchor.ndim else 0
    for key, x in tensors.items():
        if x.ndim == 0 or x.shape[0] != n_rows:
            what = f"{shown(key)} does not have one entry per row"
            raise WrongShape(what, at=f"batch[{i}][{shown(key)}]", found=f"{list(x.shape)} for {n_rows} rows")
        if key in TOKEN_KEYS and tuple(x.shape) != (n_rows, width):
            # Padding it would hide that its columns are not the prompt's tokens.
            what = f"{shown(key)} does not have one entry per token"
            raise WrongShape(what, at=f"batch[{i}][{shown(key)}]", found=f"{list(x.shape)}, not {[n_rows, width]}")
    if n_rows == 0:
        raise EmptyBatch("a prompt has no rows", at=f"batch[{i}]", found=f"keys {listed(tensors)}")
    return n_rows


def _concat(key: str, values: list[Any]) -> Any:
    """One key of all prompts: padded to its widest, or a list if it is no tensor."""
    are_tensors = [isinstance(x, Tensor) for x in values]
    if not any(are_tensors):
        return values
    first = values[are_tensors.index(True)]
    for i, x in enumerate(values):
        at = f"batch[{i}][{shown(key)}]"
        if not are_tensors[i]:
            raise WrongType(f"{shown(key)} is a tensor in some prompts only", at=at, found=type(x).__name__)
        if x.dtype != first.dtype:
            raise WrongDtype(f"{shown(key)} has different dtypes", at=at, found=f"{x.dtype}, elsewhere {first.dtype}")
        if x.device != first.device:
            raise WrongDevice(
                f"{shown(key)} is on different devices", at=at, found=f"{x.device}, elsewhere {first.device}"
            )
        if x.ndim != first.ndim or x.shape[2:] != first.shape[2:]:
            found = f"{list(x.shape)}, elsewhere {list(first.shape)}"
            raise WrongShape(f"{shown(key)} has shapes that do not fit together", at=at, found=found)
    n_rows, start = sum(x.shape[0] for x in values), 0
    tail = () if first.ndim == 1 else (max(x.shape[1] for x in values), *first.shape[2:])
    out = first.new_full((n_rows, *tail), -1 if key == "turn_ids" else 0, requires_grad=False)
    for x in values:
        part = out[start : start + x.shape[0]]
        (part if x.ndim == 1 else part[:, : x.shape[1]]).copy_(x.detach())
        start += x.shape[0]
    return out


def _check_split(meta: TrajBatchMeta, width: int) -> None:
    check_meta(meta, sum(meta.traj_group_sizes), sizes_matter=True)
    if not len(meta.traj_group_sizes) == len(meta.traj_seqlens) == meta.n_trajs:
        found = f"{len(meta.traj_group_sizes)} group sizes, {len(meta.traj_seqlens)} widths, n_trajs {meta.n_trajs}"
        raise BadMeta("group sizes, widths and n_trajs disagree", at="meta", found=found)
    for i, seqlen in enumerate(meta.traj_seqlens):
        if not is_integer(seqlen, at_least=0) or seqlen > width:
            what = "a prompt's width does not lie in the batch's"
            raise BadMeta(what, at=f"meta.traj_seqlens[{i}]", found=f"{shown(seqlen)} in a batch {width} tokens wide")
