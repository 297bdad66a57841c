"""Takes a user's function of one trajectory, or of one prompt; gives a stage function of the batch. All public.

    pad_safe         declares that padding does not change a function's result
    per_trajectory   maps a function of one row over the batch
    per_group        maps a function of one prompt's rows over the prompts
    discounted_sum   the recurrence that such functions need and torch lacks

A mapped function names what it reads as its parameters: fields of the slot's inputs, or keys of the rollout in the
outcome slot. Each comes without its row dimension. Its keyword-only parameters are the `kwargs` of the configuration.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.advantage import OutcomeResult, OutcomeRewardInputs, ProcessAdvantageInputs
from compiled_adv.advantage_algorithms import TemporalInputs, TemporalResult
from compiled_adv.batch import RolloutGroup, TrajBatchMeta, covers
from compiled_adv.errors import BadKwargs, BadMeta, MissingKey, PluginResult, WrongType, suggest

Fn = TypeVar("Fn", bound=Callable[..., Any])

# What a mapped function of each slot may read; None: any key of the rollout.
READS: dict[str, tuple[str, ...] | None] = {
    "outcome_reward_shaping": None,
    "estimator": tuple(f.name for f in fields(TemporalInputs)),
    "process_adv_shaping": tuple(f.name for f in fields(ProcessAdvantageInputs)),
}

# Of these there is one number for each row, so padded tokens cannot reach a function that reads nothing else.
ROW_NUMBERS = frozenset(("rewards", "is_truncated", "bootstrap_values", "discount", "config"))

MEMBERS = "mask"  # the parameter of a function of one prompt that says which entries are rows


def pad_safe(fn: Fn) -> Fn:
    """Declare that a stage function gives the same numbers for a padded batch: rows of zeros below, columns of zeros
    behind (-1 in turn_ids), masks 0. The compiled backend then makes it a part of the Program, and checks this claim on
    the first batch."""
    fn.pad_safe = True  # type: ignore[attr-defined]
    return fn


def is_pad_safe(fn: Callable[..., Any]) -> bool:
    return getattr(fn, "pad_safe", False) is True


def discounted_sum(x: Tensor, factor: Tensor | float) -> Tensor:
    """y[t] = x[t] + factor[t] * y[t+1] along the last dim, float32. A compiled operator; torch.func.vmap maps it."""
    x = x.to(torch.float32)
    factor = factor.to(torch.float32).expand(x.shape) if isinstance(factor, Tensor) else torch.full_like(x, factor)
    return kernels.discounted_sum(x, factor)


def per_trajectory(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A stage function from one of a single row, by torch.func.vmap.

    Outcome: returns one number. Estimator: returns (advantages, returns, total_rewards), each [T]. Process: returns
    advantages [T]. It must not branch on a tensor. Rows cannot see each other; where tokens are read, declare
    `@pad_safe` too if those behind the mask do not matter.
    """
    names, needed = _parameters(fn)

    def stage(inputs: Any, **kwargs: Any) -> Any:
        given = _given(inputs, names, needed)
        mapped = [name for name in given if isinstance(given[name], Tensor)]
        constant = {name: x for name, x in given.items() if name not in mapped}

        def row(*tensors: Tensor) -> Any:
            return _parts(fn(**dict(zip(mapped, tensors, strict=True)), **constant, **kwargs))

        return _result(inputs, torch.func.vmap(row, randomness="different")(*(given[name] for name in mapped)))

    return _as_stage_function(stage, fn, names, frozenset(READS), ())


def per_group(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An outcome function from one of a single prompt's rows, by torch.func.vmap.

    What it reads has the prompt's rows as its first dim, K of them, padded to the largest prompt: `mask` [K] says which
    entries are rows. It returns one reward for each row [K], or one number for the prompt. Prompts come from the
    metadata; without metadata they are slices of `group_size` rows, a keyword argument of the configuration.
    """
    names, needed = _parameters(fn)

    def stage(inputs: OutcomeRewardInputs, *, group_size: int | None = None, **kwargs: Any) -> OutcomeResult:
        given = _given(inputs, tuple(name for name in names if name != MEMBERS), needed - {MEMBERS})
        mapped = [name for name in given if isinstance(given[name], Tensor)]
        constant = {name: x for name, x in given.items() if name not in mapped}
        like = inputs.data["rewards"]
        prompt_B, prompts, largest = prompts_of(inputs.meta, group_size, like)
        place_B, rows_GK, mask_GK = _gathered(prompt_B, prompts, largest)

        def prompt(mask_K: Tensor, *tensors: Tensor) -> Tensor:
            members = {MEMBERS: mask_K} if MEMBERS in names else {}
            result = fn(**dict(zip(mapped, tensors, strict=True)), **members, **constant, **kwargs)
            return result.expand(mask_K.shape)

        blocks = [_with_a_blank(given[name])[rows_GK] for name in mapped]
        shaped_GK = torch.func.vmap(prompt, randomness="different")(mask_GK, *blocks)
        return OutcomeResult(torch.where(prompt_B >= 0, shaped_GK[prompt_B.clamp(min=0), place_B], 0.0))

    size = inspect.Parameter("group_size", inspect.Parameter.KEYWORD_ONLY, default=None)
    mapped_fn: Any = _as_stage_function(stage, fn, names, frozenset(("outcome_reward_shaping",)), (size,))
    mapped_fn.by_prompt = True
    return mapped_fn


def check_slot(fn: Callable[..., Any], slot: str, *, at: str) -> None:
    """Refuse a mapped function in a slot that cannot take it, or one that reads what the slot does not give."""
    slots: frozenset[str] | None = getattr(fn, "slots", None)
    if slots is None:
        return
    if slot not in slots:
        what = f"a function mapped over {'prompts' if len(slots) == 1 else 'rows'} cannot stand here"
        raise BadKwargs(what, at=at, found=slot, hint=", ".join(sorted(slots)))
    known = READS[slot]
    for name in fn.reads:  # type: ignore[attr-defined]
        if known is not None and name not in known:
            what = f"the function reads '{name}', which this slot does not give"
            raise BadKwargs(what, at=at, hint=suggest(name, known))


HIDDEN = "the lists of inputs.meta change from batch to batch"


class ProgramMeta(TrajBatchMeta):
    """Metadata inside a compiled Program: the prompt of each row [B] as a tensor, for a function of one prompt. Its
    lists, which change from batch to batch, cannot be read there."""

    __dataclass_params__ = None  # torch before 2.11 builds what is marked as a frozen dataclass by its fields

    def __init__(self, prompt_B: Tensor | None, largest: int) -> None:
        object.__setattr__(self, "prompt_B", prompt_B)
        object.__setattr__(self, "largest", largest)

    @property
    def n_trajs(self) -> int:  # type: ignore[override]
        raise RuntimeError(HIDDEN)

    @property
    def traj_group_sizes(self) -> list[int]:  # type: ignore[override]
        raise RuntimeError(HIDDEN)

    @property
    def traj_seqlens(self) -> list[int]:  # type: ignore[override]
        raise RuntimeError(HIDDEN)

    @property
    def rollout_groups(self) -> list[RolloutGroup | None] | None:  # type: ignore[override]
        raise RuntimeError(HIDDEN)


class ProgramData(Mapping[str, Any]):
    """A rollout inside a compiled Program: its tensors. The rest, which changes from batch to batch, cannot be read."""

    def __init__(self, tensors: dict[str, Tensor], hidden: Sequence[str]) -> None:
        self._tensors, self._hidden = tensors, hidden

    def __getitem__(self, key: str) -> Any:
        if key in self._hidden:
            raise RuntimeError(f"inputs.data['{key}'] is no tensor of the batch's rows and tokens")
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._tensors, *self._hidden))

    def __len__(self) -> int:
        return len(self._tensors) + len(self._hidden)


# ---- what a mapped function gets and gives ----


def _parameters(fn: Callable[..., Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names that a function reads, and those of them without a default."""
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [p for p in inspect.signature(fn).parameters.values() if p.kind is by_name]
    return tuple(p.name for p in parameters), frozenset(p.name for p in parameters if p.default is p.empty)


def _given(inputs: Any, names: Sequence[str], needed: frozenset[str]) -> dict[str, Any]:
    """What the inputs have under these names; one with a default may be missing."""
    if not isinstance(inputs, OutcomeRewardInputs):
        return {name: getattr(inputs, name) for name in names}
    given = {}
    for name in names:
        if name == "config":
            given[name] = inputs.config
        elif name in inputs.data:
            x = inputs.data[name]
            if not isinstance(x, Tensor):
                found = type(x).__name__
                raise WrongType(f"the function reads '{name}', which is no tensor", at=f"batch['{name}']", found=found)
            given[name] = x.to(torch.float32) if name == "rewards" else x
        elif name in needed:
            raise MissingKey(f"the function reads '{name}', which the batch does not have", at=f"batch['{name}']")
    return given


def _parts(result: Any) -> Any:
    """Tensors, which is what vmap takes."""
    if isinstance(result, TemporalResult):
        return result.advantages, result.returns, result.total_rewards
    return result.rewards if isinstance(result, OutcomeResult) else result


def _result(inputs: Any, mapped: Any) -> Any:
    if isinstance(inputs, OutcomeRewardInputs):
        return OutcomeResult(mapped)
    if not isinstance(inputs, TemporalInputs):
        return mapped
    if not isinstance(mapped, tuple) or len(mapped) != 3:
        raise PluginResult("an estimator of one row returns (advantages, returns, total_rewards)")
    return TemporalResult(*mapped)


def _as_stage_function(
    stage: Callable[..., Any],
    fn: Callable[..., Any],
    names: tuple[str, ...],
    slots: frozenset[str],
    more: tuple[inspect.Parameter, ...],
) -> Callable[..., Any]:
    """`stage` under the function's own name, with the signature of a stage function."""
    functools.update_wrapper(stage, fn)
    first = inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_ONLY)
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    own = [p for p in inspect.signature(fn).parameters.values() if p.kind in keyword]
    marked: Any = stage
    marked.__signature__ = inspect.Signature([first, *more, *own])
    marked.reads, marked.slots = tuple(name for name in names if name != MEMBERS), slots
    if set(marked.reads) <= ROW_NUMBERS:
        pad_safe(stage)
    return stage


# ---- rows by prompt ----


def prompts_of(meta: Any, group_size: int | None, rewards_B: Tensor) -> tuple[Tensor, int, int]:
    """The prompt of each row, -1 for a row of none; a number that no prompt reaches; the rows of the largest."""
    rows, device = len(rewards_B), rewards_B.device
    if isinstance(meta, ProgramMeta):
        return meta.prompt_B, rows, meta.largest  # type: ignore[attr-defined]
    if meta is not None:
        if not covers(meta.traj_group_sizes, rows):
            found = f"{meta.traj_group_sizes} for {rows} rows"
            raise BadMeta("group sizes do not sum to the rows of the batch", at="meta.traj_group_sizes", found=found)
        sizes = torch.tensor([*meta.traj_group_sizes], device=device)
        prompt_B = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        return prompt_B, len(sizes), max(meta.traj_group_sizes)
    if group_size is None or group_size < 1:
        hint = "metadata from concat_batch, or kwargs: {group_size: 8}"
        raise BadMeta("a function of one prompt needs to know the prompts", at="meta", found=group_size, hint=hint)
    return torch.arange(rows, device=device) // group_size, -(-rows // group_size), group_size


def _gathered(prompt_B: Tensor, prompts: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's place in its prompt; the rows of each prompt [G,K], B for none; and which of those are rows."""
    rows = len(prompt_B)
    row_B = torch.arange(rows, device=prompt_B.device)
    starts_B = torch.nn.functional.pad(prompt_B[1:] != prompt_B[:-1], (1, 0), value=True)
    place_B = row_B - torch.where(starts_B, row_B, 0).cummax(0).values
    place_B = torch.where(prompt_B >= 0, place_B, 0)
    to_B = torch.where(prompt_B >= 0, prompt_B, prompts)  # rows of none fall into one prompt more, which is cut off
    rows_GK = torch.full((prompts + 1, largest), rows, device=prompt_B.device).index_put((to_B, place_B), row_B)
    return place_B, rows_GK[:-1], rows_GK[:-1] < rows


def _with_a_blank(x_B: Tensor) -> Tensor:
    """The rows, and one of zeros for entries that are no row."""
    return torch.cat([x_B, x_B.new_zeros(1, *x_B.shape[1:])])
