"""Takes a resolved user function and its contract's inputs; gives its checked result, or an error that names it.

The functions here serve every backend. A function gets copies, so no caller's tensor is ever written to; a copy that
changed is an error. The stages at the end put a function into the Pipeline: it sees exact shapes, never padding. One
that may see padding becomes `Traced`, a stage like any other.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

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
from compiled_adv.gae import GAELambdaContext, call_lambda, lambda_context
from compiled_adv.plugins import ProgramData, ProgramMeta
from compiled_adv.resolve import Plugin
from compiled_adv.stage import Stage
from compiled_adv.stages.forms import clean
from compiled_adv.stages.select import columns, fact, finite

# A channel by name: None where an optional one is absent.
Channels = Callable[[str], Any]

if TYPE_CHECKING:
    from compiled_adv.admit import Admitted


def origin(plugin: Plugin) -> str:
    """Where the config names this function."""
    return f"{plugin.at} = {plugin.path}"


def call(plugin: Plugin, inputs: Any) -> Any:
    """The function's raw result on copies of the inputs' tensors."""
    if plugin.exact is not None and (result := plugin.exact(inputs)) is not None:
        return result
    handed = _copied(inputs)
    try:
        result = plugin.fn(handed, **copy.deepcopy(dict(plugin.kwargs)))
    except CompiledAdvError:
        raise
    except Exception as error:
        at, found = origin(plugin), f"{type(error).__name__}: {error}"
        raise PluginRaised("the function raised", at=at, found=found) from error
    for name, given, held in _tensors(inputs, handed):
        if not _same(given, held):
            hint = "return new tensors; clone before writing"
            raise PluginWroteInput(f"the function wrote to its input '{name}'", at=origin(plugin), hint=hint)
    if getattr(inputs, "meta", None) != getattr(handed, "meta", None):
        raise PluginWroteInput("the function wrote to its input 'meta'", at=origin(plugin), hint="copy it first")
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
            raise MissingReferences(what, at=origin(plugin), hint=f"normalization_rewards of shape [{n_members}]")
        return OutcomeResult(rewards_B)
    if n_members is None:
        hint = "batch and metadata from concat_batch, with rollout_group in each prompt"
        what = "normalization_rewards needs complete metadata with logical rollouts"
        raise PluginResult(what, at=origin(plugin), hint=hint)
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
    for name in COMPUTED:
        x = _field(plugin, result, AdvantageResult, name)
        out[name] = _checked(plugin, name, x, rows if name == "rewards" else mask.shape, device)
    _binary(plugin, "loss_mask", out["loss_mask"])
    extras = getattr(result, "extras", None)
    extras = {} if extras is None else extras
    if not isinstance(extras, Mapping):
        raise PluginResult("extras must be a mapping", at=origin(plugin), found=type(extras).__name__)
    for name, x in extras.items():
        if name not in EXTRAS:
            raise PluginResult(f"extras may not hold '{name}'", at=origin(plugin), hint=f"only {', '.join(EXTRAS)}")
        mask_like = name in ("input_token_loss_mask", "is_truncated")
        shape = rows if name == "is_truncated" else mask.shape
        out[name] = _checked(plugin, f"extras.{name}", x, shape, device, floating=not mask_like)
        if mask_like:
            _binary(plugin, f"extras.{name}", out[name])
    if inputs.data.get("mopd_teacher_logp_sum") is not None and "mopd_behavior_logprobs" not in extras:
        hint = "extras={'mopd_behavior_logprobs': the rollout's own aligned log probabilities, ...}"
        what = "a batch with mopd_teacher_logp_sum needs extras.mopd_behavior_logprobs"
        raise PluginResult(what, at=origin(plugin), hint=hint)
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
        raise PluginResult(f"the function must return {kind.__name__}(..., {name}=...)", at=origin(plugin), found=found)
    return getattr(result, name)


def _checked(
    plugin: Plugin, name: str, x: Any, shape: torch.Size, device: torch.device, *, floating: bool = True
) -> Tensor:
    """x as a new contiguous tensor without grad, float32 (or bool for masks), of that shape, on that device, finite."""
    at = origin(plugin)
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
        raise PluginResult(f"'{name}' must be binary", at=origin(plugin), hint="only 0 and 1")


# ---- stages ----


class PluginStage(Stage):
    """A user's function between two segments; `call` sees the admitted batch and exact channels by name."""

    opaque = True
    mixes_rows = True

    plugin: Plugin

    def inputs(self, channel: Channels, data: Mapping[str, Any], meta: Any, config: Any) -> Any:
        """What the function gets."""
        raise NotImplementedError(f"{type(self).__name__} has no inputs")

    def parts(self, result: Any) -> dict[str, Any]:
        """A result as tensors by name, unchecked."""
        raise NotImplementedError(f"{type(self).__name__} has no parts")

    def whole(self, parts: Mapping[str, Tensor]) -> Any:
        """The result of these parts."""
        raise NotImplementedError(f"{type(self).__name__} has no result")

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{type(self).__name__} has no call")

    def given(self, admitted: "Admitted", channel: Channels) -> Any:
        """What the function gets for an admitted batch."""
        return self.inputs(channel, MappingProxyType(dict(admitted.data)), admitted.meta, admitted.config)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.plugin.path})"


class OutcomePlugin(PluginStage):
    """Custom outcome shaping: rewards, and shaped references where it returns them."""

    slot = "actor.advantage.outcome_reward_shaping"
    reads = ("rewards", "references")
    writes = ("rewards", "references")

    penalised: bool
    normalised: bool

    def inputs(self, channel: Channels, data: Mapping[str, Any], meta: Any, config: Any) -> OutcomeRewardInputs:
        if self.penalised and not isinstance(data, ProgramData):
            data = MappingProxyType({**data, "rewards": channel("rewards")})
        return OutcomeRewardInputs(data, config, meta)

    def parts(self, result: Any) -> dict[str, Any]:
        references = getattr(result, "normalization_rewards", None)
        parts = {"rewards": result.rewards}
        return parts if references is None else parts | {"normalization_rewards": references}

    def whole(self, parts: Mapping[str, Tensor]) -> OutcomeResult:
        return OutcomeResult(**parts)

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        n_members = admitted.n_members
        required = self.normalised and admitted.explicit_references
        result = call_outcome(self.plugin, self.given(admitted, channel), n_members, required)
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

    def inputs(self, channel: Channels, data: Mapping[str, Any], meta: Any, config: Any) -> GAELambdaContext:
        context = lambda_context(channel("loss_mask"), None, "token")
        if (counts_B := channel("turn_counts")) is not None:
            context["turn_counts"] = counts_B.to(torch.int64)
        if self.unit == "turn":
            context["timestep_lengths"] = context["turn_counts"].clone()
        return context

    def parts(self, result: Any) -> dict[str, Any]:
        return {"gae_lambda": result}

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        at = f"actor.gae_lambda = {self.plugin.path}"
        context = self.given(admitted, channel)
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

    def inputs(self, channel: Channels, data: Mapping[str, Any], meta: Any, config: Any) -> TemporalInputs:
        outcome_BT, truncated_B = channel("outcome"), channel("is_truncated")

        def given(name: str, like: Tensor) -> Tensor:
            x = channel(name)
            return torch.zeros_like(like) if x is None else x

        return TemporalInputs(
            outcome_rewards=outcome_BT,
            kl_rewards=channel("kl"),
            process_rewards=given("folded", outcome_BT),
            values=clean(given("values", outcome_BT)),
            bootstrap_values=given("bootstrap_values", truncated_B),
            is_truncated=truncated_B > 0,
            loss_mask=channel("loss_mask"),
            turn_ids=channel("aligned_turn_ids"),
            discount=self.discount,
            config=config,
        )

    def parts(self, result: Any) -> dict[str, Any]:
        return {name: getattr(result, name) for name in ("advantages", "returns", "total_rewards")}

    def whole(self, parts: Mapping[str, Tensor]) -> TemporalResult:
        return TemporalResult(**parts)

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        result = call_estimator(self.plugin, self.given(admitted, channel))
        return result.advantages, result.returns, result.total_rewards


class ProcessPlugin(PluginStage):
    """A user's process shaping: it always runs, with or without process rewards."""

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct?", "loss_mask")
    writes = ("advantages",)

    def inputs(self, channel: Channels, data: Mapping[str, Any], meta: Any, config: Any) -> ProcessAdvantageInputs:
        return ProcessAdvantageInputs(channel("advantages"), channel("direct"), channel("loss_mask"), config)

    def parts(self, result: Any) -> dict[str, Any]:
        return {"advantages": result}

    def whole(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["advantages"]

    def call(self, admitted: "Admitted", channel: Channels) -> tuple[Tensor, ...]:
        return (call_process(self.plugin, self.given(admitted, channel)),)


# Fields of an AdvantageResult, and those of its parts that are masks.
COMPUTED = ("advantages", "returns", "loss_mask", "logprobs", "rewards", "tot_rewards", "kl_rewards")
MASKS = ("loss_mask", "is_truncated")


class ComputePlugin(PluginStage):
    """A replacement of the whole computation, for one per-call shaping mode. Its result may hold extras, too."""

    slot = "actor.advantage.compute"
    reads = ("gvpo",)
    writes = COMPUTED

    mode: str

    def inputs(self, channel: Channels, data: Mapping[str, Any], meta: Any, config: Any) -> AdvantageInputs:
        gvpo = channel("gvpo")
        return AdvantageInputs(data, config, meta, self.mode, gvpo[0], gvpo[1], gvpo[2])

    def parts(self, result: Any) -> dict[str, Any]:
        extras = getattr(result, "extras", None) or {}
        return {name: getattr(result, name) for name in COMPUTED} | {f"extras.{k}": extras[k] for k in sorted(extras)}

    def whole(self, parts: Mapping[str, Tensor]) -> AdvantageResult:
        extras = {k.removeprefix("extras."): x for k, x in parts.items() if k not in COMPUTED}
        return AdvantageResult(**{k: parts[k] for k in COMPUTED}, extras=extras)


class Traced(PluginStage):
    """A user's function as a part of the Program: pad-safe, pure, and torch can trace it.

    It reads `facts`, what `of` reads, the prompt of each row if it is a function of one prompt, and rollout tensors by
    key. Padding holds zeros, -1 in turn ids. A result that is not finite, or a mask that is not binary, is flagged: the
    eager path, which runs in that case, says what is wrong.
    """

    opaque = False
    mixes_rows = True
    STATE: ClassVar[tuple[str, ...]] = ("stage.plugin.fn", "stage.config")  # where it may read more than its arguments

    of: PluginStage
    config: Any
    gives: tuple[str, ...]  # the parts of its result
    keys: tuple[str, ...] = ()  # of the rollout, which it reads
    hidden: tuple[str, ...] = ()  # others, which it must not
    meta: bool = False
    largest: int = 0  # rows of the largest prompt, for a function of one prompt

    def forward(self, facts, *channels):
        n = len(self.of.reads)
        own = {name.removesuffix("?"): x for name, x in zip(self.of.reads, channels[:n], strict=True)}
        rest = channels[n:]
        like = next(x for x in (*rest, *own.values()) if x is not None)
        rows_B = torch.arange(len(like), device=facts.device) < fact(facts, "rows")

        def inside(name: str, x: Tensor) -> Tensor:
            """x, and what padding holds beyond the caller's rows and tokens."""
            at = rows_B if x.ndim == 1 else rows_B[:, None] & (columns(x) < fact(facts, "tokens"))
            return torch.where(at, x, x.new_full((), -1 if name.endswith("turn_ids") else 0))

        own = {name: x if x is None or name in UNPADDED else inside(name, x) for name, x in own.items()}
        prompt_B = None
        if self.largest:
            prompt_B, rest = (rest[0], rest[1:]) if self.meta else (slices(rows_B, self.largest), rest)
        rollout = {k: inside(k, x) for k, x in zip(self.keys, rest, strict=True)}
        if isinstance(self.of, OutcomePlugin) and self.of.penalised:
            rollout["rewards"] = own["rewards"]
        meta = ProgramMeta(prompt_B, self.largest) if self.meta or self.largest else None
        given = self.of.inputs(own.get, ProgramData(rollout, self.hidden), meta, self.config)
        parts = self.of.parts(self.plugin.fn(given, **self.plugin.kwargs))
        bad_B = torch.zeros_like(rows_B)
        results = []
        for name in self.gives:
            x = inside(name, parts[name].to(torch.float32))
            wrong = (x != 0) & (x != 1) if name.endswith(MASKS) else ~finite(x)
            bad_B = bad_B | (wrong if x.ndim == 1 else wrong.any(1))
            results.append(x.to(torch.float64) if name == "gae_lambda" else x)
        if "references" in own:  # outcome shaping hands them on
            results.append(own["references"])
        return *results, bad_B

    @property
    def slot(self) -> str:  # type: ignore[override]
        return self.of.slot

    def __str__(self) -> str:
        return f"{self.of}"


# Channels that padding does not follow row by row.
UNPADDED = ("gvpo", "references")


def slices(rows_B: Tensor, size: int) -> Tensor:
    """The prompt of each row where prompts are slices of `size` rows; -1 where `rows_B` is not set."""
    return torch.where(rows_B, torch.arange(len(rows_B), device=rows_B.device) // size, -1)
