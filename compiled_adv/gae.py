"""Takes each row's lengths; gives one GAE lambda per row: the built-in lambda functions, and how any of them is called.

A lambda function is `fn(context, **kwargs) -> float tensor [B]`. B rows, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from compiled_adv.advantage_algorithms import TemporalInputs
from compiled_adv.errors import (
    CompiledAdvError,
    InvalidValue,
    MissingKey,
    PluginRaised,
    PluginResult,
    PluginWroteInput,
    UnknownName,
    shown,
    suggest,
)
from compiled_adv.scalars import is_finite, is_number
from compiled_adv.spec import Spec


class GAELambdaContext(TypedDict):
    """What a lambda function may read, each int64 [B]."""

    effective_token_lengths: Tensor
    turn_counts: Tensor  # 0 without turn ids
    timestep_lengths: Tensor  # the one of these two that is in the estimator's unit


GAELambdaInputs = GAELambdaContext
GAELambdaFn = Callable[..., Tensor]


def constant_gae_lambda(context: GAELambdaContext, *, value: float) -> Tensor:
    """The same lambda for every row."""
    value = _number("value", value, "a finite number", is_finite)
    return torch.full_like(context["timestep_lengths"], value, dtype=torch.float32)


def vapo_length_adaptive_gae(context: GAELambdaContext, *, alpha: float) -> Tensor:
    """VAPO's `1 - 1 / (alpha * length)`, at least 0; an empty row gets 0."""
    alpha = _number("alpha", alpha, "a number above 0", lambda x: x > 0)
    lengths_B = context["timestep_lengths"].to(torch.float64)
    lambda_B = (1 - 1 / (alpha * lengths_B.clamp(min=1))).clamp(min=0)
    return torch.where(lengths_B > 0, lambda_B, 0.0).to(torch.float32)


def relative_position_gae_lambda(context: GAELambdaContext, *, q: float) -> Tensor:
    """`q ** (1 / (length - 1))`: the first step keeps q of the outcome whatever the length; an empty row gets 0."""
    q = _number("q", q, "a number in (0, 1]", lambda x: 0 < x <= 1)
    lengths_B = context["timestep_lengths"].to(torch.float64)
    lambda_B = q ** (1 / (lengths_B - 1).clamp(min=1))
    # A single step has nothing to decay over.
    return torch.where(lengths_B > 1, lambda_B, (lengths_B == 1).to(torch.float64)).to(torch.float32)


BUILT_IN_LAMBDAS = (constant_gae_lambda, relative_position_gae_lambda, vapo_length_adaptive_gae)


# Looked up once: torch cannot trace pydantic's own look-up.
DEFAULT_LAMBDA = Spec.model_fields["gae_lambda"].default


def compute_gae_lambda(inputs: TemporalInputs, timestep_unit: str) -> float | Tensor:
    """For a custom estimator: the configured lambda, a number or one per row [B], lengths in `timestep_unit`."""
    units = ("token", "turn")
    if timestep_unit not in units:
        raise UnknownName("unknown timestep unit", found=shown(timestep_unit), hint=suggest(timestep_unit, units))
    gae_lambda = getattr(inputs.config, "gae_lambda", DEFAULT_LAMBDA)
    if not isinstance(gae_lambda, str):
        return float(gae_lambda)
    from compiled_adv.resolve import resolve_path  # here, since resolve imports this module

    at = f"actor.gae_lambda = {gae_lambda}"
    kwargs = getattr(inputs.config, "gae_lambda_kwargs", None) or {}
    context = lambda_context(inputs.loss_mask, inputs.turn_ids, timestep_unit)
    return call_lambda(resolve_path(gae_lambda, at=at), kwargs, context, at=at)


def lambda_context(loss_mask_BT: Tensor, turn_ids_BT: Tensor | None, unit: str) -> GAELambdaContext:
    """The lengths of each row, from the aligned mask and the aligned turn ids."""
    if unit == "turn" and turn_ids_BT is None:
        raise MissingKey("the turn unit needs turn_ids", at="batch['turn_ids']")
    active_BT = loss_mask_BT != 0
    tokens_B = active_BT.sum(-1)
    turns_B = torch.zeros_like(tokens_B) if turn_ids_BT is None else _distinct(turn_ids_BT, active_BT)
    steps_B = turns_B if unit == "turn" else tokens_B
    return GAELambdaContext(effective_token_lengths=tokens_B, turn_counts=turns_B, timestep_lengths=steps_B)


def call_lambda(fn: Callable[..., Any], kwargs: Mapping[str, Any], context: GAELambdaContext, *, at: str) -> Tensor:
    """One finite float32 lambda per row [B] from a lambda function; what it returns otherwise is an error at `at`."""
    given = dict(cast(Mapping[str, Tensor], context))
    before = {name: value.clone() for name, value in given.items()}
    try:
        result = fn(context, **copy.deepcopy(dict(kwargs)))
    except CompiledAdvError:
        raise
    except Exception as error:
        raise PluginRaised("the lambda function raised", at=at, found=f"{type(error).__name__}: {error}") from error
    if any(context.get(name) is not given[name] or not torch.equal(given[name], before[name]) for name in given):
        raise PluginWroteInput("the lambda function wrote to its context", at=at)
    lengths_B = before["timestep_lengths"]
    if not isinstance(result, Tensor):
        raise PluginResult("a lambda function returns a tensor [B]", at=at, found=type(result).__name__)
    if result.shape != lengths_B.shape:
        found = f"{list(result.shape)} for {len(lengths_B)} rows"
        raise PluginResult("a lambda function returns one number per row", at=at, found=found)
    if not result.is_floating_point() or result.layout != torch.strided:
        found = f"{result.layout}, {result.dtype}"
        raise PluginResult("a lambda function returns a plain floating-point tensor", at=at, found=found)
    if result.device != lengths_B.device:
        found = f"{result.device}, the batch is on {lengths_B.device}"
        raise PluginResult("a lambda function keeps the device", at=at, found=found)
    lambda_B = result.detach().to(torch.float32)
    bad_rows = (~torch.isfinite(lambda_B)).nonzero().flatten().tolist()
    if bad_rows:
        raise PluginResult("a lambda is not finite", at=at, found=f"{lambda_B[bad_rows[0]].item()} in rows {bad_rows}")
    return lambda_B


def _distinct(ids_BT: Tensor, active_BT: Tensor) -> Tensor:
    """Distinct ids per row among active slots, in any order: a custom estimator answers for its own ids."""
    last = torch.iinfo(torch.int64).max  # sorts behind every id, where inactive slots belong
    ids_BT = torch.where(active_BT, ids_BT.to(torch.int64), last).sort(-1).values
    new_BT = ids_BT != last
    new_BT[:, 1:] &= ids_BT[:, 1:] != ids_BT[:, :-1]
    return new_BT.sum(-1)


def _number(name: str, value: object, needed: str, holds: Callable[[Any], bool]) -> float:
    if not (is_number(value) and holds(value)):
        raise InvalidValue(f"'{name}' must be {needed}", at="actor.gae_lambda_kwargs", found=shown(value))
    return float(value)
