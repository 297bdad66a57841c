"""Takes a Spec, its resolved functions and the channels of a batch; gives the Pipeline: stages wired into a DAG.

Stages talk in channel names; the Pipeline talks in versions (`rewards`, `rewards.1`), each written once. What is
absent or not configured is settled here, so that no stage asks at run time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import networkx as nx

from compiled_adv.channel import base
from compiled_adv.errors import Cycle, MissingChannel
from compiled_adv.gae import BUILT_IN_LAMBDAS
from compiled_adv.resolve import Plugin, Resolved
from compiled_adv.spec import Norm, Spec
from compiled_adv.stage import Stage
from compiled_adv.stages.adv_norm import AdvantageMoments, AdvantageScale, AdvNorm, SingleRollouts
from compiled_adv.stages.alignment import Alignment, CountGenerated, Lengths, Truncation
from compiled_adv.stages.checks import (
    FiniteLogprobs,
    FiniteProxLogp,
    FiniteRefLogp,
    FiniteResult,
    FiniteTokenRewards,
    FiniteValues,
    FirstToken,
    InsideAttention,
    TurnRange,
    UniformTurns,
    WeightRange,
)
from compiled_adv.stages.diagnostics import AdvantageSums, BatchStats, KLSums, MissedSums, ReturnSums, ShapingSums
from compiled_adv.stages.estimator import (
    AlignTurnIds,
    BootstrapValues,
    ConstantLambda,
    LambdaByLength,
    PlaceOutcome,
    TokenGAE,
    TotalRewards,
    TurnCounts,
    TurnGAE,
)
from compiled_adv.stages.kl_rewards import KLInAdvantage, KLRewards
from compiled_adv.stages.length_penalty import LengthPenalty, RawRewards
from compiled_adv.stages.logprobs import BehaviorLogprobs, CopyLogprobs, ProximalLogprobs, ReferenceLogprobs
from compiled_adv.stages.plugin import EstimatorPlugin, LambdaPlugin, OutcomePlugin, ProcessPlugin
from compiled_adv.stages.process_adv_shaping import GVPO, Additive, ProcessWeighted
from compiled_adv.stages.process_rewards import AlignedRewards, DirectRewards, FoldedRewards
from compiled_adv.stages.reward_norm import RewardNorm, RowGroups, SameRawRewards, Score, SingleUnits, Units
from compiled_adv.stages.statistics import AcrossRanks, BatchMoments, GroupCentred, GroupMoments
from compiled_adv.stages.strict import STRICT

FLAG = "flag:"


def flag_name(version: str) -> str:
    """The flag of a version: `flag:loo_alone.1` -> `loo_alone`."""
    return base(version.removeprefix(FLAG))


@dataclass(frozen=True)
class Node:
    """One stage in its place: the version behind each thing it reads (None: absent), writes and flags."""

    name: str
    stage: Stage
    reads: tuple[str | None, ...]
    writes: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def produced(self) -> tuple[str, ...]:
        return self.writes + self.flags


@dataclass(frozen=True)
class Pipeline:
    """Stages over channel versions. `inputs` enter, `outputs` (name, version) leave, and so does every flag."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]

    @cached_property
    def graph(self) -> "nx.MultiDiGraph[str]":
        """Nodes by name, with 'in' and 'out'; an edge for each version that one reads from another, keyed by it."""
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        graph.add_nodes_from(["in", *(node.name for node in self.nodes), "out"])
        writer = dict.fromkeys(self.inputs, "in") | {v: node.name for node in self.nodes for v in node.produced}
        wanted = [(node.name, version) for node in self.nodes for version in node.reads if version is not None]
        wanted += [("out", version) for _, version in self.outputs] + [("out", version) for version in self.flags]
        for reader, version in wanted:
            if version in writer:
                graph.add_edge(writer[version], reader, key=version)
        return graph

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for node in self.nodes for flag in node.flags)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def in_order(self) -> "Pipeline":
        """The same Pipeline with its nodes in an order in which each version is written before it is read."""
        place = {node.name: i for i, node in enumerate(self.nodes)}
        try:
            order = list(nx.lexicographical_topological_sort(self.graph, key=lambda name: place.get(name, -1)))
        except nx.NetworkXUnfeasible as error:
            loop = " -> ".join(edge[0] for edge in nx.find_cycle(self.graph))
            raise Cycle("stages wait for each other", found=loop) from error
        by_name = {node.name: node for node in self.nodes}
        return replace(self, nodes=tuple(by_name[name] for name in order if name in by_name))


class Wiring:
    """Adds stages one after another, each reading the newest version of its channels."""

    def __init__(
        self, inputs: Iterable[str], replaced: dict[type[Stage], type[Stage]], *, across_ranks: bool = False
    ) -> None:
        self.inputs = tuple(inputs)
        self.across_ranks = across_ranks
        self.replaced = replaced
        self.newest: dict[str, str] = {name: name for name in self.inputs}
        self.written: dict[str, int] = {name: 1 for name in self.inputs}
        self.nodes: list[Node] = []
        self.outputs: dict[str, str] = {}

    def add(self, stage: Stage, **versions: str) -> None:
        """Wire one stage, or what stands for it under these rules. `versions`: older ones to read, by channel."""
        if (other := self.replaced.get(type(stage))) is not None:
            stage = other(**stage.numbers())
        reads = tuple(versions.get(name) or self.read(stage, name) for name in stage.reads)
        name = type(stage).__name__
        same = sum(type(node.stage) is type(stage) for node in self.nodes)
        writes = tuple(self.write(channel) for channel in stage.writes)
        flags = tuple(self.write(FLAG + flag) for flag in stage.flags)
        self.nodes.append(Node(f"{name}.{same}" if same else name, stage, reads, writes, flags))

    def meet(self, block: str) -> None:
        """Take the newest batch moments, those of a norm block, over all ranks where there are several."""
        if self.across_ranks:
            self.add(AcrossRanks(block))

    def leave(self, *channels: str, **named: str) -> None:
        """The newest versions of these channels are outputs. `named`: under another name."""
        self.outputs |= {name: self.newest[name] for name in channels}
        self.outputs |= {name: self.newest[channel] for name, channel in named.items()}

    def read(self, stage: Stage, name: str) -> str | None:
        version = self.newest.get(name.removesuffix("?"))
        if version is None and not name.endswith("?"):
            what = f"{type(stage).__name__} reads '{name}', which no earlier stage writes and the batch does not carry"
            raise MissingChannel(what, at=stage.slot or None, found=f"have {', '.join(self.newest)}")
        return version

    def write(self, channel: str) -> str:
        count = self.written.get(channel, 0)
        self.written[channel] = count + 1
        self.newest[channel] = f"{channel}.{count}" if count else channel
        return self.newest[channel]

    def has(self, channel: str) -> bool:
        return channel in self.newest


def wire(
    spec: Spec,
    resolved: Resolved,
    inputs: frozenset[str],
    mode: str,
    *,
    mopd: bool = False,
    across_ranks: bool = False,
) -> Pipeline:
    """The default order as a Pipeline, for a batch with these input channels and this per-call shaping mode.

    across_ranks: batch moments are taken over several ranks, at each of `meeting_points`.
    """
    replaced = STRICT if spec.advantage.rules == "strict" else {}
    wiring = Wiring(sorted(inputs), replaced, across_ranks=across_ranks)
    _align(wiring)
    raw = _outcome(wiring, spec, resolved)
    _normalise_rewards(wiring, spec, raw)
    _logprobs(wiring, spec, mopd)
    _kl(wiring, spec)
    _process_rewards(wiring, spec)
    _estimate(wiring, spec, resolved)
    _normalise_advantages(wiring, spec)
    _shape(wiring, spec, resolved, mode)
    wiring.add(FiniteResult())
    _measure(wiring, spec)
    return Pipeline(tuple(wiring.nodes), wiring.inputs, tuple(wiring.outputs.items()))


def by_group(norm: Any) -> bool:
    """Whether a norm block has a group level."""
    return norm is not None and "group" in (norm.mean_level, norm.std_level)


def meeting_points(spec: Spec) -> tuple[str, ...]:
    """The norm blocks with a batch level, in order: at each of them ranks meet once."""
    blocks = {} if spec.override else {"reward_norm": spec.reward_norm, "adv_norm": spec.adv_norm}
    return tuple(name for name, norm in blocks.items() if norm and "batch" in (norm.mean_level, norm.std_level))


def _align(wiring: Wiring) -> None:
    add = wiring.add
    add(Lengths())
    add(FirstToken())
    add(CountGenerated())
    add(Alignment())
    add(InsideAttention())
    add(Truncation())
    wiring.leave("loss_mask", "is_truncated")


def _outcome(wiring: Wiring, spec: Spec, resolved: Resolved) -> str:
    """The outcome rewards as a caller gets them back; gives the version of the raw ones."""
    add = wiring.add
    add(RawRewards())
    raw = wiring.newest["rewards"]
    if spec.overlong_reward_penalty:
        add(LengthPenalty(spec.overlong_tokens, spec.overlong_penalty_factor, spec.max_new_tokens))  # type: ignore[arg-type]
    if resolved.outcome is not None:
        normalised = _has_level(spec.reward_norm)
        add(OutcomePlugin(resolved.outcome, penalised=spec.overlong_reward_penalty, normalised=normalised))
    wiring.leave("rewards")
    return raw


def _normalise_rewards(wiring: Wiring, spec: Spec, raw: str) -> None:
    add, norm = wiring.add, spec.reward_norm
    score = Score(spec.reward_bias, spec.reward_scaling, spec.reward_clip)
    add(score)
    if norm is None or not _has_level(norm):
        return
    if spec.overlong_reward_penalty:
        add(SameRawRewards(), rewards=raw)
    add(RowGroups(norm.group_size if by_group(norm) else 1))
    add(Units(score, spec.mask_no_eos_with_zero))
    _moments(wiring, norm, SingleUnits(), "reward_norm")
    add(RewardNorm(norm, spec.mask_no_eos_with_zero))


def _has_level(norm: Norm | None) -> bool:
    return norm is not None and (norm.mean_level, norm.std_level) != (None, None)


def _moments(wiring: Wiring, norm: Norm, single: Stage, block: str) -> None:
    """The moments at the levels that a norm block names, of the units wired last."""
    for name in ("group_n", "group_mean", "group_m2", "batch_n", "batch_mean", "batch_m2", "single"):
        wiring.newest.pop(name, None)  # an earlier block's
    if by_group(norm):
        wiring.add(GroupMoments())
        wiring.add(single)
    if norm.mean_level == "group" and norm.std_level == "batch":
        mean, m2 = wiring.newest["unit_mean"], wiring.newest["unit_m2"]
        wiring.add(GroupCentred(norm.mean_leave1out))
        wiring.add(BatchMoments())
        wiring.meet(block)
        wiring.newest |= {"unit_mean": mean, "unit_m2": m2}
    elif "batch" in (norm.mean_level, norm.std_level):
        wiring.add(BatchMoments())
        wiring.meet(block)


def _logprobs(wiring: Wiring, spec: Spec, mopd: bool) -> None:
    add, newest = wiring.add, wiring.newest
    recomputed = spec.recompute_logprob and not spec.use_decoupled_loss
    add(BehaviorLogprobs())
    add(FiniteLogprobs())
    if mopd:
        wiring.leave(mopd_behavior_logprobs="behavior_logprobs")
    if recomputed:
        add(FiniteProxLogp())
        add(ProximalLogprobs())
    newest["logprobs"] = newest["prox_logp" if recomputed else "behavior_logprobs"]
    wiring.leave("logprobs")
    if not spec.use_decoupled_loss:
        add(CopyLogprobs())
        wiring.leave("prox_logp")


def _kl(wiring: Wiring, spec: Spec) -> None:
    add = wiring.add
    if wiring.has("ref_logp"):
        add(FiniteRefLogp())
        add(ReferenceLogprobs())
        wiring.leave("ref_logp")
    add(KLRewards(spec.kl_ctl, spec.kl_estimator))
    wiring.leave("kl_rewards")
    if spec.advantage.stats and wiring.has("ref_logp"):
        add(KLSums(spec.kl_estimator))
    add(KLInAdvantage())


def _process_rewards(wiring: Wiring, spec: Spec) -> None:
    add = wiring.add
    add(PlaceOutcome(spec.mask_no_eos_with_zero))
    if not wiring.has("token_rewards"):
        return
    add(AlignedRewards())
    add(FiniteTokenRewards())
    if spec.token_rewards_as_adv:
        add(DirectRewards(spec.mask_no_eos_with_zero))
    else:
        add(UniformTurns(spec.mask_no_eos_with_zero), loss_mask="loss_mask")  # as given
        add(FoldedRewards(spec.mask_no_eos_with_zero))


def _estimate(wiring: Wiring, spec: Spec, resolved: Resolved) -> None:
    add = wiring.add
    if wiring.has("values"):
        add(FiniteValues())
        add(BootstrapValues())
    if wiring.has("turn_ids") and (resolved.estimator is not None or resolved.lambda_fn is not None):
        add(AlignTurnIds())
    if resolved.estimator is not None:
        add(EstimatorPlugin(resolved.estimator, spec.discount))
    else:
        _gae(wiring, spec, resolved.lambda_fn)
    wiring.leave("returns", "tot_rewards")


def _gae(wiring: Wiring, spec: Spec, lambda_fn: Plugin | None) -> None:
    add, by_turn = wiring.add, spec.estimator == "turn_gae"
    add(TotalRewards())
    if wiring.has("aligned_turn_ids"):
        add(TurnRange())
        add(TurnCounts())
    unit = "turn" if by_turn else "token"
    if lambda_fn is None:
        add(ConstantLambda(float(spec.gae_lambda)))
    elif lambda_fn.fn in BUILT_IN_LAMBDAS:
        add(LambdaByLength(lambda_fn.fn, tuple(lambda_fn.kwargs.items()), unit))
    else:
        add(LambdaPlugin(lambda_fn, unit))
    add(TurnGAE(spec.discount) if by_turn else TokenGAE(spec.discount))


def _normalise_advantages(wiring: Wiring, spec: Spec) -> None:
    add, newest, norm = wiring.add, wiring.newest, spec.adv_norm
    if norm is None:
        return
    add(RowGroups(norm.group_size if by_group(norm) else 1))
    add(AdvantageMoments())
    if spec.estimator == "token_gae":  # what values miss of returns is the advantage
        newest |= {"missed_mean": newest["unit_mean"], "missed_m2": newest["unit_m2"]}
    _moments(wiring, norm, SingleRollouts(), "adv_norm")
    add(AdvantageScale(norm))
    add(AdvNorm())


def _shape(wiring: Wiring, spec: Spec, resolved: Resolved, mode: str) -> None:
    add = wiring.add
    unshaped = wiring.newest["advantages"]
    if isinstance(resolved.process, Plugin):
        add(ProcessPlugin(resolved.process))
    elif wiring.has("direct"):
        chosen = mode if resolved.process is None else resolved.process
        if chosen == "gvpo":
            add(GVPO(**resolved.process_kwargs))
        elif chosen == "additive":
            add(Additive())
        else:
            add(WeightRange())
            add(ProcessWeighted())
    wiring.leave("advantages")
    if spec.advantage.stats and wiring.newest["advantages"] != unshaped:
        add(ShapingSums(), unshaped=unshaped)


def _measure(wiring: Wiring, spec: Spec) -> None:
    """What the batch was and what came of it; sums of what is read before the recurrence are wired there."""
    if spec.advantage.stats:
        add = wiring.add
        add(AdvantageSums())
        if wiring.has("values"):
            add(ReturnSums())
            if not wiring.has("missed_m2"):
                add(MissedSums())
        sizes = [norm.group_size for norm in (spec.reward_norm, spec.adv_norm) if norm is not None and by_group(norm)]
        add(BatchStats(sizes[0] if sizes else 1), rewards=wiring.outputs["rewards"])
        wiring.leave("stats")
