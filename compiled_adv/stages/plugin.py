"""Takes a resolved user function and its contract's inputs; gives its checked result, or an error that names it.

The functions here serve every backend. A function gets copies, so no caller's tensor is ever written to; a copy that
changed is an error. The stages at the end put a function into the Pipeline: it sees exact shapes, never padding.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_adv.advantage import (
    EXTRAS,
    AdvantageInputs,
    AdvantageResult,
    OutcomeResult,
    OutcomeRewardInputs,
    ProcessAdvantageInputs,
)
from compiled_adv.advantage_algorithms import TemporalInputs, TemporalResult
from compiled_adv.batch import TrajBatchMeta
from compiled_adv.errors import CompiledAdvError, MissingReferences, PluginRaised, PluginResult, PluginWroteInput
from compiled_adv.gae import call_lambda, lambda_context
from compiled_adv.resolve import Plugin
from compiled_adv.stage import Stage
from compiled_adv.stages.estimator import clean

# A channel by name: None where an optional one is absent.
Channels = Callable[[str], Any]

if TYPE_CHECKING:
    from compiled_adv.admit import Admitted


def place(plugin: Plugin) -> str:
    """Where the config names this function."""
    return f"{plugin.at} = {plugin.path}"


def call(plugin: Plugin, inputs: Any) -> Any:
    """The function's raw result on copies of the inputs' tensors."""
    handed = _copied(inputs)
    try:
        result = plugin.fn(handed, **copy.deepcopy(dict(plugin.kwargs)))
    except CompiledAdvError:
        raise
    except Exception as error:
        at, found = place(plugin), f"{type(error).__name__}: {error}"
        raise PluginRaised("the function raised", at=at, found=found) from error
    for name, given, held in _tensors(inputs, handed):
        if not _same(given, held):
            hint = "return new tensors; clone before writing"
            raise PluginWroteInput(f"the function wrote to its input '{name}'", at=place(plugin), hint=hint)
    if getattr(inputs, "meta", None) != getattr(handed, "meta", None):
        raise PluginWroteInput("the function wrote to its input 'meta'", at=place(plugin), hint="copy it first")
    return result


def call_outcome(
    plugin: Plugin, inputs: OutcomeRewardInputs, n_members: int | None, references_required: bool
) -> OutcomeResult:
    """One float32 reward per row [B], and one float32 shaped reference per logical rollout [N] or None.

    `n_members` is the number of logical rollouts, None where the metadata does not give them.
    """
    result = call(plugin, inputs)
    given_B = inputs.data["rewards"]
    raw_rewards = _field(plugin, result, OutcomeResult, "rewards")
    rewards_B = _checked(plugin, "rewards", raw_rewards, given_B.shape, given_B.device)
    references = getattr(result, "normalization_rewards", None)
    if references is None:
        if references_required:
            what = "reward normalisation uses explicit references and shaping is custom: shaped references are needed"
            raise MissingReferences(what, at=place(plugin), hint=f"normalization_rewards of shape [{n_members}]")
        return OutcomeResult(rewards_B)
    if n_members is None:
        hint = "batch and metadata from concat_batch, with rollout_group in each prompt"
        what = "normalization_rewards needs complete metadata with logical rollouts"
        raise PluginResult(what, at=place(plugin), hint=hint)
    shape = torch.Size([n_members])
    return OutcomeResult(rewards_B, _checked(plugin, "normalization_rewards", references, shape, given_B.device))


def call_estimator(plugin: Plugin, inputs: TemporalInputs) -> TemporalResult:
    """Advantages, returns and total rewards, float32 [B,T]."""
    result, given = call(plugin, inputs), inputs.outcome_rewards
    names = ("advantages", "returns", "total_rewards")
    parts = {name: _field(plugin, result, TemporalResult, name) for name in names}
    return TemporalResult(*(_checked(plugin, name, x, given.shape, given.device) for name, x in parts.items()))


def call_process(plugin: Plugin, inputs: ProcessAdvantageInputs) -> Tensor:
    """Advantages, float32 [B,T]."""
    given = inputs.advantages
    return _checked(plugin, "advantages", call(plugin, inputs), given.shape, given.device)


def call_compute(plugin: Plugin, inputs: AdvantageInputs, *, decoupled: bool) -> dict[str, Tensor]:
    """Every computed channel of a replacement of the whole computation, by output name."""
    result, mask = call(plugin, inputs), inputs.data["loss_mask"]
    rows, device = torch.Size([mask.shape[0]]), mask.device
    out = {}
    for name in ("advantages", "returns", "loss_mask", "logprobs", "rewards", "tot_rewards", "kl_rewards"):
        x = _field(plugin, result, AdvantageResult, name)
        out[name] = _checked(plugin, name, x, rows if name == "rewards" else mask.shape, device)
    _binary(plugin, "loss_mask", out["loss_mask"])
    extras = getattr(result, "extras", None)
    extras = {} if extras is None else extras
    if not isinstance(extras, Mapping):
        raise PluginResult("extras must be a mapping", at=place(plugin), found=type(extras).__name__)
    for name, x in extras.items():
        if name not in EXTRAS:
            raise PluginResult(f"extras may not hold '{name}'", at=place(plugin), hint=f"only {', '.join(EXTRAS)}")
        mask_like = name in ("input_token_loss_mask", "is_truncated")
        shape = rows if name == "is_truncated" else mask.shape
        out[name] = _checked(plugin, f"extras.{name}", x, shape, device, floating=not mask_like)
        if mask_like:
            _binary(plugin, f"extras.{name}", out[name])
    if inputs.data.get("mopd_teacher_logp_sum") is not None and "mopd_behavior_logprobs" not in extras:
        hint = "extras={'mopd_behavior_logprobs': the rollout's own aligned log probabilities, ...}"
        what = "a batch with mopd_teacher_logp_sum needs extras.mopd_behavior_logprobs"
        raise PluginResult(what, at=place(plugin), hint=hint)
    if not decoupled:
        out.setdefault("prox_logp", out["logprobs"].clone())
    return out


# ---- copies and checks ----


def _copied(inputs: Any) -> Any:
    """The same dataclass or mapping with every tensor cloned, and lists of the metadata of its own."""
    if isinstance(inputs, TrajBatchMeta):
        lists: Any = {k: [*v] for k, v in vars(inputs).items() if isinstance(v, list)}
        return replace(inputs, **lists)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        own = {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name != "config"}
        copied = (Tensor, Mapping, TrajBatchMeta)
        return replace(inputs, **{k: _copied(v) for k, v in own.items() if isinstance(v, copied)})
    if isinstance(inputs, Mapping):
        return MappingProxyType({k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in inputs.items()})
    return inputs.detach().clone()


def _tensors(inputs: Any, handed: Any) -> list[tuple[str, Tensor, Tensor]]:
    """(name, given, handed out) of every tensor."""
    found = []
    for f in fields(inputs):
        given, held = getattr(inputs, f.name), getattr(handed, f.name)
        if f.name != "config" and isinstance(given, Tensor):
            found.append((f.name, given, held))
        elif f.name != "config" and isinstance(given, Mapping):
            found += [(k, v, held[k]) for k, v in given.items() if isinstance(v, Tensor)]
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _field(plugin: Plugin, result: Any, kind: type, name: str) -> Any:
    """A field of the documented result class, or of one that looks like it."""
    if not hasattr(result, name) or isinstance(result, (Tensor, Mapping)):
        found = type(result).__name__
        raise PluginResult(f"the function must return {kind.__name__}(..., {name}=...)", at=place(plugin), found=found)
    return getattr(result, name)


def _checked(
    plugin: Plugin, name: str, x: Any, shape: torch.Size, device: torch.device, *, floating: bool = True
) -> Tensor:
    """x as a new contiguous tensor without grad, float32 (or bool for masks), of that shape, on that device, finite."""
    at = place(plugin)
    if not isinstance(x, Tensor):
        raise PluginResult(f"'{name}' must be a tensor", at=at, found=type(x).__name__)
    if x.layout != torch.strided or x.is_complex():
        raise PluginResult(f"'{name}' must be a plain real tensor", at=at, found=f"{x.layout}, {x.dtype}")
    if x.shape != shape:
        raise PluginResult(f"'{name}' has the wrong shape", at=at, found=f"{list(x.shape)}, not {list(shape)}")
    if x.device != device:
        raise PluginResult(f"'{name}' is on another device", at=at, found=f"{x.device}, not {device}")
    if floating and not x.is_floating_point():
        raise PluginResult(f"'{name}' must be floating point", at=at, found=x.dtype)
    x = x.detach().to(torch.float32, copy=True).contiguous()
    if not torch.isfinite(x).all():
        bad = (~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero().flatten().tolist()
        raise PluginResult(f"'{name}' holds a non-finite number", at=at, found=f"rows {bad[:8]}")
    return x


def _binary(plugin: Plugin, name: str, x: Tensor) -> None:
    if not ((x == 0) | (x == 1)).all():
        raise PluginResult(f"'{name}' must be binary", at=place(plugin), hint="only 0 and 1")


# ---- stages ----


class PluginStage(Stage):
    """A user's function between two segments; `call` sees the admitted batch and exact channels by name."""

    opaque = True

    plugin: Plugin

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{type(self).__name__} has no call")

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.plugin.path})"


class OutcomePlugin(PluginStage):
    """Custom outcome shaping: rewards, and shaped references where it returns them."""

    slot = "actor.advantage.outcome_reward_shaping"
    reads = ("rewards", "references")
    writes = ("rewards", "references")

    penalised: bool
    normalised: bool

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        data = dict(admitted.data)
        if self.penalised:
            data["rewards"] = channel("rewards")
        meta, n_members = admitted.meta, admitted.n_members
        required = self.normalised and admitted.explicit_references
        inputs = OutcomeRewardInputs(MappingProxyType(data), admitted.config, meta)
        result = call_outcome(self.plugin, inputs, n_members, required)
        references_U = channel("references").clone()
        if result.normalization_rewards is not None:
            references_U[:n_members] = result.normalization_rewards
        return result.rewards, references_U


class LambdaPlugin(PluginStage):
    """A user's lambda function."""

    slot = "actor.gae_lambda"
    reads = ("loss_mask", "turn_counts?")
    writes = ("gae_lambda",)

    unit: str

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        context = lambda_context(channel("loss_mask"), None, "token")
        if (counts_B := channel("turn_counts")) is not None:
            context["turn_counts"] = counts_B.to(torch.int64)
        if self.unit == "turn":
            context["timestep_lengths"] = context["turn_counts"].clone()
        at = f"actor.gae_lambda = {self.plugin.path}"
        return (call_lambda(self.plugin.fn, self.plugin.kwargs, context, at=at).to(torch.float64),)


class EstimatorPlugin(PluginStage):
    """A user's estimator: it gets aligned channels and answers for its own time unit."""

    slot = "actor.advantage.estimator"
    reads = (
        "outcome",
        "kl",
        "folded?",
        "values?",
        "bootstrap_values?",
        "is_truncated",
        "loss_mask",
        "aligned_turn_ids?",
    )
    writes = ("advantages", "returns", "tot_rewards")

    discount: float

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        outcome_BT, truncated_B, turn_ids_BT = channel("outcome"), channel("is_truncated"), channel("aligned_turn_ids")

        def given(name: str, like: Tensor) -> Tensor:
            x = channel(name)
            return torch.zeros_like(like) if x is None else x

        inputs = TemporalInputs(
            outcome_rewards=outcome_BT,
            kl_rewards=channel("kl"),
            process_rewards=given("folded", outcome_BT),
            values=clean(given("values", outcome_BT)),
            bootstrap_values=given("bootstrap_values", truncated_B),
            is_truncated=truncated_B > 0,
            loss_mask=channel("loss_mask"),
            turn_ids=turn_ids_BT,
            discount=self.discount,
            config=admitted.config,
        )
        result = call_estimator(self.plugin, inputs)
        return result.advantages, result.returns, result.total_rewards


class ProcessPlugin(PluginStage):
    """A user's process shaping: it always runs, with or without process rewards."""

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct?", "loss_mask")
    writes = ("advantages",)

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        inputs = ProcessAdvantageInputs(channel("advantages"), channel("direct"), channel("loss_mask"), admitted.config)
        return (call_process(self.plugin, inputs),)
