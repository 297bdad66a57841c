"""Gives the operations that the compilers lack: backward recurrences, turns, and fixed-order moments.

Each is an operator of the library `compiled_adv`, so that torch.compile keeps it whole. Its plain form (blocked.py)
runs anywhere; the compiled backend puts the device's own form (NATIVE) in its place.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from compiled_adv.kernels import blocked

Plain = TypeVar("Plain", bound=Callable[..., Any])

SCHEMAS = {
    "backward_recurrence": "(Tensor rewards, Tensor? values, Tensor steps, Tensor bootstrap, float discount, "
    "Tensor gae_lambda, Tensor? end, bool with_next) -> (Tensor, Tensor)",
    "row_moments": "(Tensor x, Tensor mask) -> (Tensor, Tensor, Tensor)",
    "merge_moments": "(Tensor n, Tensor mean, Tensor m2, Tensor part) -> (Tensor, Tensor, Tensor)",
    "turn_totals": "(Tensor rewards, Tensor? values, Tensor turn_ids, Tensor mask) -> (Tensor, Tensor, Tensor)",
    "turn_counts": "(Tensor turn_ids, Tensor mask) -> (Tensor, Tensor)",
    "turn_recurrence": "(Tensor rewards, Tensor? values, Tensor turn_ids, Tensor mask, Tensor bootstrap, "
    "float discount, Tensor gae_lambda, Tensor tokens) -> (Tensor, Tensor, Tensor, Tensor)",
    "discounted_sum": "(Tensor x, Tensor factor) -> Tensor",
}


def _like_recurrence(rewards, values, steps, bootstrap, discount, gae_lambda, end, with_next):
    return rewards.new_empty(rewards.shape), rewards.new_empty(rewards.shape if with_next else 0)


def _like_row_moments(x, mask):
    return tuple(x.new_empty(x.shape[0], dtype=torch.float64) for _ in range(3))


def _like_merge_moments(n, mean, m2, part):
    return tuple(n.new_empty(n.shape) for _ in range(3))


def _like_turn_totals(rewards, values, turn_ids, mask):
    none = 0 if values is None else rewards.shape
    return rewards.new_empty(rewards.shape), rewards.new_empty(none), rewards.new_empty(rewards.shape)


def _like_turn_counts(turn_ids, mask):
    return mask.new_empty(mask.shape[0], dtype=torch.int64), mask.new_empty(mask.shape[0], dtype=torch.bool)


def _like_turn_recurrence(rewards, values, turn_ids, mask, bootstrap, discount, gae_lambda, tokens):
    after = rewards.new_empty(0 if values is None else rewards.shape)
    ordered, inside = (mask.new_empty(mask.shape[0], dtype=torch.bool) for _ in range(2))
    return rewards.new_empty(rewards.shape), after, ordered, inside


def _like_discounted_sum(x, factor):
    return x.new_empty(x.shape)


FAKES: dict[str, Callable[..., Any]] = {
    "backward_recurrence": _like_recurrence,
    "row_moments": _like_row_moments,
    "merge_moments": _like_merge_moments,
    "turn_totals": _like_turn_totals,
    "turn_counts": _like_turn_counts,
    "turn_recurrence": _like_turn_recurrence,
    "discounted_sum": _like_discounted_sum,
}

LIBRARY = torch.library.Library("compiled_adv", "DEF")
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, getattr(blocked, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"compiled_adv::{_name}", FAKES[_name], lib=LIBRARY)


def map_rows(name: str) -> None:
    """Let torch.func.vmap map an operator of x and factor, in which leading dims are rows anyway."""
    operator = getattr(torch.ops.compiled_adv, name)

    def mapped(info: Any, dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        rows = (x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True))
        return operator(*rows), 0

    torch.library.register_vmap(f"compiled_adv::{name}", mapped, lib=LIBRARY)


map_rows("discounted_sum")


def native(device: torch.device) -> dict[Any, Any]:
    """The operators of a device by the plain ones that they stand for. On a CPU the first call builds them."""
    if device.type == "cpu":
        from compiled_adv.kernels import cpu

        return cpu.operators()
    if device.type == "cuda":
        from compiled_adv.kernels import triton

        return triton.operators()
    return {}


def _operator(plain: Plain) -> Plain:
    """The operator, taking and giving what its plain form does."""
    return cast(Plain, getattr(torch.ops.compiled_adv, plain.__name__))


backward_recurrence = _operator(blocked.backward_recurrence)
row_moments = _operator(blocked.row_moments)
merge_moments = _operator(blocked.merge_moments)
turn_totals = _operator(blocked.turn_totals)
turn_counts = _operator(blocked.turn_counts)
discounted_sum = _operator(blocked.discounted_sum)


def turn_recurrence(
    rewards_BT: Tensor,
    values_BT: Tensor | None,
    turn_ids_BT: Tensor,
    mask_BT: Tensor,
    bootstrap_B: Tensor,
    discount: float,
    lambda_B: Tensor,
    tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See blocked.turn_recurrence. Where no device's own form stands for it, it is traced as its parts."""
    args = (rewards_BT, values_BT, turn_ids_BT, mask_BT, bootstrap_B, discount, lambda_B, tokens)
    if rewards_BT.device.type == "cpu":
        return torch.ops.compiled_adv.turn_recurrence(*args)
    return blocked.turn_recurrence(*args, turn_totals, turn_counts, backward_recurrence)
