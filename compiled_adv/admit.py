"""Takes a batch, its metadata and the call's values; gives what a Program reads, or refuses before any work.

Here is everything that depends on the caller's own shape, keys or Python objects. Numbers in tensors are checked inside
the Program, which reports them as flags (status.py).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_adv.advantage import AdvantageInputs
from compiled_adv.batch import TrajBatchMeta, as_meta, check_meta, check_tensor, covers
from compiled_adv.channel import INPUTS, OPTIONAL
from compiled_adv.errors import (
    BadMask,
    BatchError,
    CallError,
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
from compiled_adv.pipeline import by_group
from compiled_adv.resolve import BUILT_IN, Resolved
from compiled_adv.scalars import is_finite
from compiled_adv.spec import Spec

if TYPE_CHECKING:
    from compiled_adv.distributed import Meeting

REQUIRED = ("input_ids", "attention_mask", "loss_mask", "rewards", "logprobs")
MASKS = ("loss_mask", "is_truncated")
KEYS = (*REQUIRED, *OPTIONAL, "is_truncated")  # all that is ever read here
META = dict.fromkeys(f.name for f in fields(TrajBatchMeta)).keys()
MOST_KNOWN = 256


@dataclass(frozen=True)
class Call:
    """What may change from call to call: the trainer's process-reward settings."""

    advantage_shaping_mode: str = "additive"
    gvpo_negative_scale: float = 0.2
    gvpo_zero_penalty: float = 0.4
    gvpo_zero_eps: float = 1e-6

    @property
    def gvpo(self) -> tuple[float, float, float]:
        return self.gvpo_negative_scale, self.gvpo_zero_penalty, self.gvpo_zero_eps


@dataclass(frozen=True)
class Admitted:
    """One call's input: the caller's own batch, untouched, and the channels that a Program reads."""

    data: Mapping[str, Any]
    meta: TrajBatchMeta | None
    call: Call
    config: Any
    rows: int
    tokens: int
    device: torch.device
    channels: dict[str, Tensor]
    # What users' functions gave, by stage: whoever computes this call again does not call them again.
    answers: dict[str, Sequence[Tensor]] = field(default_factory=dict)
    # Refusals of a batch on a GPU, and the rows they are about, bool [B]: read where its flags are, not here.
    late: list[tuple[BatchError, Tensor]] = field(default_factory=list)
    meeting: "Meeting | None" = None  # of the ranks that compute this call together

    def raise_late(self, found: Tensor | None = None) -> None:
        """The first refusal that holds for a row. `found`: all their rows on the host [late, B], if they are there."""
        late, self.late[:] = list(self.late), []
        if late:
            found = torch.stack([rows for _, rows in late]).cpu() if found is None else found
            for (error, _), rows_B in zip(late, found, strict=True):
                if rows := rows_B.nonzero().flatten().tolist():
                    raise type(error)(error.what, at=error.at, found=f"rows {rows[:8]}", hint=error.hint)

    @property
    def inputs(self) -> AdvantageInputs:
        """What a replacement of the whole computation gets."""
        call, data = self.call, MappingProxyType(dict(self.data))
        return AdvantageInputs(data, self.config, self.meta, call.advantage_shaping_mode, *call.gvpo)

    @property
    def explicit_references(self) -> bool:
        groups = (self.meta and self.meta.rollout_groups) or []
        return any(reference is not None for group in groups if group for reference in group.rewards)

    @property
    def n_members(self) -> int | None:
        """Logical rollouts; None where the metadata does not place every row in one."""
        meta = self.meta
        if meta is None or meta.rollout_groups is None or not covers(meta.traj_group_sizes, self.rows):
            return None
        return sum(meta.logical_group_sizes)


def check_memory(name: str, x: Tensor) -> None:
    """Refuse a tensor whose memory was freed: a kernel that reads there ends the process."""
    if not x.data_ptr():
        raise WrongType(f"'{name}' holds no numbers: its memory was freed", at=f"batch['{name}']")


class Admission:
    """Admits the batches of one configuration, as `admit` and `admit_call` do.

    What depends on keys, shapes, dtypes, per-call values or metadata alone is looked at once for each that comes.
    """

    def __init__(self, spec: Spec, resolved: Resolved) -> None:
        self._spec, self._resolved = spec, resolved
        self._calls: dict[Any, Call] = {}
        self._forms: dict[Any, Form] = {}
        self._metas: dict[Any, dict[str, Tensor]] = {}

    def call(self, values: Mapping[str, Any]) -> Call:
        """The per-call values."""
        key = (*values.items(), *map(type, values.values()))
        try:
            return self._calls[key]
        except (KeyError, TypeError):  # one that cannot be a key is refused, or not kept
            call = admit_call(values, self._spec, self._resolved)
        if set(map(type, values.values())) <= {str, int, float}:
            _keep(self._calls, key, call)
        return call

    def __call__(self, batch: Any, meta: Any, call: Call) -> Admitted:
        """The batch as channels; every refusal that needs no look at the numbers happens here."""
        if not isinstance(batch, Mapping):
            raise WrongType("a batch is a mapping from names to tensors", at="batch", found=type(batch).__name__)
        key = tuple(map(_look, map(batch.get, KEYS)))
        form = self._forms.get(key)
        if form is None:
            form = form_of(batch, self._spec, self._resolved)
            _keep(self._forms, key, form)
        for name in ("attention_mask", *form.keys):
            check_memory(name, batch[name])
        late: list[tuple[BatchError, Tensor]] = []
        channels = {"attention_words": _words(_mask("attention_mask", batch["attention_mask"], late), late)}
        for name in form.keys:
            channels[name] = _channel(name, batch[name], late)
        if "is_truncated" not in channels:
            channels["is_truncated"] = torch.zeros(form.rows, dtype=torch.float32, device=form.device)

        meta, membership = self._membership(form, meta)
        channels |= membership
        # A bad one was refused where it is read.
        numbers = call.gvpo
        if not all(type(x) is float and 0 <= x < math.inf for x in numbers):
            numbers = tuple(float(x) if _is_size(x) else 0.0 for x in numbers)  # type: ignore[assignment]
        channels["gvpo"] = _numbers(numbers)
        config = self._spec.config
        return Admitted(batch, meta, call, config, form.rows, form.tokens, form.device, channels, late=late)

    def _membership(self, form: "Form", meta: Any) -> tuple[TrajBatchMeta | None, dict[str, Tensor]]:
        plain = _plain_meta(meta)
        key = None if plain is None else (plain, form.rows, form.tokens, form.truncation_given)
        known = None if key is None else self._metas.get(key)  # once: another thread may forget it
        if plain is not None and known is not None:
            n_trajs, sizes, seqlens, groups = plain
            # lists of its own: a user's function may change them
            own = TrajBatchMeta(n_trajs, [*sizes], [*seqlens], None if groups is None else [None] * groups)
            return own, known
        meta = as_meta(meta)
        grouped = by_group(self._spec.adv_norm) or by_group(self._spec.reward_norm)
        check_meta(meta, form.rows, sizes_matter=grouped)
        membership = _membership(meta, form.rows, form.tokens, form.truncation_given)
        if key is not None:
            _keep(self._metas, key, membership)
        return meta, membership


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """What is known, within bounds."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = value


def _look(x: Any) -> Any:
    """All that a check of a tensor looks at beside its numbers."""
    if x is not None and isinstance(x, Tensor) and not x.is_nested:
        return type(x), x.dtype, x.shape, x.device, x.layout, x.is_quantized
    return type(x)


def _plain_meta(meta: Any) -> tuple[Any, ...] | None:
    """Metadata as a key: lists of Python's own integers, and no logical rollouts. None if it is anything else."""
    if type(meta) is dict:
        if not meta.keys() <= META:
            return None
        read = meta.get
    else:
        read = partial(getattr, meta)
    n_trajs, sizes, seqlens, groups = [read(name, None) for name in META]
    if type(sizes) is not list or type(seqlens) is not list or {*map(type, (n_trajs, *sizes, *seqlens))} != {int}:
        return None
    if groups is not None and (type(groups) is not list or {*map(type, groups)} - {NoneType}):
        return None
    return n_trajs, tuple(sizes), tuple(seqlens), None if groups is None else len(groups)


def admit_call(values: Mapping[str, Any], spec: Spec, resolved: Resolved) -> Call:
    """The per-call values; gvpo's are checked where gvpo runs, which is not in a full override."""
    known = [f.name for f in fields(Call)]
    for name in values:
        if name not in known:
            raise CallError(f"unknown per-call value '{name}'", at="compute(...)", hint=suggest(name, known))
    call = Call(**values)
    mode, modes = call.advantage_shaping_mode, BUILT_IN["process_adv_shaping"]
    if not isinstance(mode, str) or mode not in modes:
        hint = suggest(mode, modes)
        raise CallError("unknown advantage_shaping_mode", at="compute(...)", found=shown(mode), hint=hint)
    if resolved.compute is not None:
        return call
    chosen = mode if resolved.process is None else resolved.process
    if chosen in ("gvpo", "process_weighted") and not spec.token_rewards_as_adv:
        what = f"{chosen} shapes advantages by direct token rewards"
        raise CallError(what, at=spec.at("actor.token_rewards_as_adv"), found=False, hint="token_rewards_as_adv: true")
    if chosen == "process_weighted" and spec.mask_no_eos_with_zero:
        what, at = "process_weighted excludes mask_no_eos_with_zero", spec.at("actor.mask_no_eos_with_zero")
        raise CallError(what, at=at, found=True, hint="mask_no_eos_with_zero: false")
    if chosen == "gvpo":
        for name, value in zip(known[1:], call.gvpo, strict=True):
            if name.removeprefix("gvpo_") not in resolved.process_kwargs and not _is_size(value):
                raise CallError(f"{name} must be a finite number, at least 0", at="compute(...)", found=shown(value))
    return call


def admit(batch: Any, meta: Any, call: Call, spec: Spec, resolved: Resolved) -> Admitted:
    """The batch as channels; every refusal that needs no look at the numbers happens here."""
    return Admission(spec, resolved)(batch, meta, call)


@dataclass(frozen=True)
class Form:
    """What keys, shapes and dtypes of a batch decide: its size, and the keys that are read as channels."""

    rows: int
    tokens: int
    device: torch.device
    keys: tuple[str, ...]
    truncation_given: bool


def form_of(batch: Mapping[str, Any], spec: Spec, resolved: Resolved) -> Form:
    """The form of a batch, or the refusal of one whose form does not fit."""
    for key in REQUIRED:
        if batch.get(key) is None:
            raise MissingKey(f"the batch has no '{key}'", at="batch", found=f"keys {listed(batch)}")
    if resolved.compute is None:
        _check_needed(batch, spec)

    mask = _tensor(batch, "loss_mask")
    if mask.ndim != 2:
        raise WrongShape("'loss_mask' must be [rows, tokens]", at="batch['loss_mask']", found=list(mask.shape))
    rows, tokens = mask.shape
    if rows == 0 or tokens == 0:
        raise EmptyBatch("the batch has no rows or no tokens", at="batch['loss_mask']", found=list(mask.shape))

    _reads_tensor(batch, "input_ids", (rows, tokens), mask.device)
    _check_dtype("attention_mask", _reads_tensor(batch, "attention_mask", (rows, tokens), mask.device))
    keys = read_keys([key for key in KEYS if batch.get(key) is not None], spec, resolved)
    for key in keys:
        shape = (rows,) if INPUTS[key].dims == "B" else (rows, tokens)
        _check_dtype(key, _reads_tensor(batch, key, shape, mask.device))
    return Form(rows, tokens, mask.device, tuple(keys), batch.get("is_truncated") is not None)


def _check_needed(batch: Mapping[str, Any], spec: Spec) -> None:
    """The keys that the configured stages need; an override answers for its own. None is as good as absent."""
    if batch.get("prox_logp") is None and spec.recompute_logprob and not spec.use_decoupled_loss:
        raise MissingKey("recompute_logprob reads 'prox_logp'", at=spec.at("actor.recompute_logprob"))
    if batch.get("is_truncated") is None and spec.advantage.rules == "strict":
        what = "strict rules read 'is_truncated': the padded width does not say who was cut"
        raise MissingKey(what, at=spec.at("actor.advantage.rules"), hint="is_truncated, bool [B]")
    if batch.get("turn_ids") is None and spec.estimator == "turn_gae":
        raise MissingKey("turn GAE reads 'turn_ids'", at=spec.at("actor.advantage.estimator"))


def legal_modes(spec: Spec, resolved: Resolved) -> list[str]:
    """The per-call shaping modes that this configuration allows."""
    modes = []
    for mode in BUILT_IN["process_adv_shaping"]:
        try:
            admit_call({"advantage_shaping_mode": mode}, spec, resolved)
        except CallError:
            continue
        modes.append(mode)
    return modes


def read_keys(batch: Collection[str], spec: Spec, resolved: Resolved) -> list[str]:
    """Those of a batch's keys that this configuration reads as channels."""
    folds = "token_rewards" in batch and not spec.token_rewards_as_adv
    turns = spec.estimator == "turn_gae" or resolved.lambda_fn is not None or resolved.estimator is not None or folds
    skipped = {
        "prox_logp": not spec.recompute_logprob or spec.use_decoupled_loss,
        "turn_ids": not turns,
    }
    keys = ["loss_mask", "rewards", "logprobs", *OPTIONAL, "is_truncated"]
    return [key for key in keys if key in batch and not skipped.get(key, False)]


def _tensor(batch: Mapping[str, Any], key: str) -> Tensor:
    x = batch[key]
    if not isinstance(x, Tensor):
        raise WrongType(f"'{key}' must be a tensor", at=f"batch['{key}']", found=type(x).__name__)
    check_tensor(key, x, f"batch['{key}']")
    return x


def _reads_tensor(batch: Mapping[str, Any], key: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    x = _tensor(batch, key)
    at = f"batch['{key}']"
    if tuple(x.shape) != shape:
        raise WrongShape(f"'{key}' has the wrong shape", at=at, found=f"{list(x.shape)}, not {[*shape]}")
    if x.device != device:
        raise WrongDevice(f"'{key}' is on another device", at=at, found=f"{x.device}, loss_mask {device}")
    return x


def _check_dtype(key: str, x: Tensor) -> None:
    if x.is_complex() or (key == "turn_ids" and (x.is_floating_point() or x.dtype == torch.bool)):
        wanted = "integers" if key == "turn_ids" else "real numbers"
        raise WrongDtype(f"'{key}' must hold {wanted}", at=f"batch['{key}']", found=x.dtype)
    if not x.is_floating_point() and key in ("logprobs", "prox_logp", "ref_logp", "values"):
        raise WrongDtype(f"'{key}' must be floating point", at=f"batch['{key}']", found=x.dtype)


def _channel(key: str, x: Tensor, late: list[tuple[BatchError, Tensor]]) -> Tensor:
    """x in the dtype that Programs read; a mask of any dtype counts what is not zero."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():  # its memory holds the opposite, and kernels read memory
        x = x.resolve_neg()
    if key == "loss_mask" and x.dtype in (torch.int32, torch.int64):
        return x  # as fast as float32, and a copy less
    if key in MASKS:
        x = _mask(key, x, late)
    dtype = INPUTS[key].dtype
    return x if x.dtype is dtype else x.to(dtype)


def mask_as(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in another dtype: what is not zero stays so."""
    return mask if mask.dtype == dtype else (mask != 0).to(dtype)


def _mask(key: str, x: Tensor, late: list[tuple[BatchError, Tensor]]) -> Tensor:
    """x, if it is finite: what is not zero is set. A float mask other than float32 could lose that: bool."""
    if not x.is_floating_point():
        return x
    x = x.detach()
    if x.device.type != "cpu":
        error = BadMask(f"'{key}' holds a non-finite number", at=f"batch['{key}']")
        late.append((error, (~torch.isfinite(x)).reshape(len(x), -1).any(1)))
    elif not torch.isfinite(x.sum()) and not torch.isfinite(x).all():  # a sum is cheap, and not finite if x is not
        rows = (~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero().flatten().tolist()
        raise BadMask(f"'{key}' holds a non-finite number", at=f"batch['{key}']", found=f"rows {rows[:8]}")
    return x if x.dtype == torch.float32 else x != 0


def _words(mask_BT: Tensor, late: list[tuple[BatchError, Tensor]]) -> Tensor:
    """A mask as int32 words of four tokens, a byte 0 or 1 for each."""
    bool_BT = mask_BT if mask_BT.dtype == torch.bool else mask_BT != 0
    if bool_BT is not mask_BT:
        what, hint = "attention_mask must hold 0 and 1 only", "one sequence to a row; packed rows split"
        error = BadMask(what, at="batch['attention_mask']", hint=hint)
        if mask_BT.device.type != "cpu":
            late.append((error, (bool_BT.to(mask_BT.dtype) != mask_BT).any(1)))
        elif not torch.equal(bool_BT.to(mask_BT.dtype), mask_BT):
            raise error
    rows, tokens = bool_BT.shape
    if not tokens % 4 and bool_BT.stride() == (tokens, 1) and not bool_BT.storage_offset() % 4:
        return bool_BT.view(torch.int32)
    if mask_BT.shape[1] % 4:
        bool_BT = torch.nn.functional.pad(bool_BT, (0, -mask_BT.shape[1] % 4))
    # flat, since a dimension of size 1 may keep any stride and still count as contiguous
    flat = bool_BT.contiguous().flatten()
    aligned = flat.storage_offset() % 4 == 0
    return (flat if aligned else flat.clone()).view(torch.int32).view(len(mask_BT), -1)


def _membership(meta: TrajBatchMeta | None, rows: int, tokens: int, truncation_given: bool) -> dict[str, Tensor]:
    """Who belongs to which logical rollout and prompt, as index tensors; a row is its own rollout without metadata."""
    sizes: tuple[int, ...] = ()
    rollouts: tuple[tuple[tuple[int, ...], tuple[float | None, ...]] | None, ...] | None = None
    if meta is not None:
        sizes = tuple(int(size) for size in meta.traj_group_sizes) if covers(meta.traj_group_sizes, rows) else ()
        if meta.rollout_groups is not None:
            rollouts = tuple(g and (tuple(g.row_counts), tuple(g.rewards)) for g in meta.rollout_groups)  # type: ignore[misc]
    return _index(rows, tokens, truncation_given, sizes, rollouts)


@lru_cache(maxsize=256)
def _index(
    rows: int,
    tokens: int,
    truncation_given: bool,
    sizes: tuple[int, ...],
    rollouts: tuple[Any, ...] | None,
) -> dict[str, Tensor]:
    """The tensors of one composition, made once: only Programs read them, and none is written to."""
    group_of_row = [i for i, size in enumerate(sizes) for _ in range(size)] or [-1] * rows
    first_row: list[int] = []
    references: list[float] = []
    member_of_row: list[int] = []
    start = 0
    for i, size in enumerate(sizes if rollouts is not None else ()):
        counts, rewards = (rollouts and rollouts[i]) or ((1,) * size, ())
        for count, reference in zip(counts, rewards or (None,) * len(counts), strict=True):
            member_of_row += [len(first_row)] * count
            first_row.append(start)
            references.append(math.nan if reference is None else float(reference))
            start += count
    if not first_row:
        first_row, member_of_row, references = [*range(rows)], [*range(rows)], [math.nan] * rows
    members = len(first_row)
    facts = (rows, tokens, members, truncation_given, bool(sizes), rollouts is not None)
    fill = rows - members
    made = partial(torch.tensor, device="cpu")  # whatever default device the first caller has set
    return {
        "group_of_row": made(group_of_row),
        "member_of_row": made(member_of_row),
        "first_row": made(first_row + [0] * fill),
        "references": made(references + [math.nan] * fill, dtype=torch.float32),
        "facts": made(facts, dtype=torch.int32),
    }


@lru_cache(maxsize=256)
def _numbers(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _is_size(value: Any) -> bool:
    return is_finite(value) and value >= 0
