"""Takes a configuration and rollouts; gives what may harm training with them, worst first, and what to do about it.

Both rule sets are run. What a warning costs is how far its strict rule alone moves the advantages of active tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compiled_adv import config_file
from compiled_adv.admit import Admitted, admit, admit_call
from compiled_adv.compiler import MOPD, SWITCH, backend_of, build, ladder
from compiled_adv.diagnosis import Batch, Change, Diagnosis, Finding, Sight
from compiled_adv.errors import CompiledAdvError, NoBucket
from compiled_adv.executable import EagerExecutable
from compiled_adv.idle import Idle, idle_keys, ignored_keys
from compiled_adv.pipeline import Pipeline, wire
from compiled_adv.program import lower
from compiled_adv.resolve import Resolved, resolve_spec
from compiled_adv.spec import Spec, load_config
from compiled_adv.stage import Stage
from compiled_adv.stages.alignment import Alignment
from compiled_adv.stages.estimator import PlaceOutcome
from compiled_adv.stages.kl_rewards import KLRewards
from compiled_adv.stages.length_penalty import LengthPenalty
from compiled_adv.stages.plugin import call_compute
from compiled_adv.stages.reward_norm import RewardNorm, RowGroups, Units
from compiled_adv.stages.strict import STRICT
from compiled_adv.status import WARNINGS, raise_errors
from compiled_adv.verify import verify

Rules = tuple[type[Stage], ...]

# warning -> the stages whose strict form repairs it, and what else helps
REMEDIES: dict[str, tuple[Rules, str]] = {
    "outcome_on_masked_token": ((PlaceOutcome,), "end every row with a generated token"),
    "first_token_generated": ((Alignment,), "start every row with a prompt token"),
    "truncated_by_width": ((), "give is_truncated, a bool for each row, in the rollouts (strict rules insist on it)"),
    "rows_outside_groups": ((RowGroups,), "pass metadata that tells the groups, or whole groups only"),
    "kl_without_reference": ((KLRewards,), "give ref_logp in the rollouts, or set kl_ctl: 0"),
    "zero_spread_groups": ((), "drop such prompts, or sample them more often; no setting repairs this"),
    "uncapped_length_penalty": ((LengthPenalty,), "set max_new_tokens to the limit that generation really has"),
    "loo_alone": ((RewardNorm,), "compute more than one rollout at a time"),
    "discarded_rows_counted": ((Units,), "drop truncated rows before, or set mask_no_eos_with_zero: false"),
    "weighted_flip": ((), "additive or gvpo shaping: both keep a negative advantage negative"),
}


@dataclass(frozen=True)
class Rollouts:
    """One batch to look at."""

    name: str
    batch: Mapping[str, Any]
    meta: Any = None


@dataclass(frozen=True)
class Result:
    """What one way of computing gives of a batch."""

    computed: dict[str, Tensor]
    flags: dict[str, list[int]]


def diagnose(config: Any, rollouts: Sequence[Rollouts]) -> Diagnosis:
    """`config` as for build. Raises where neither rule set takes a batch."""
    spec = load_config(config)
    resolved = resolve_spec(spec)
    batches, sights = [], []
    for each in rollouts:
        try:
            facts, seen = _look(spec, resolved, each)
        except CompiledAdvError as error:
            error.add_note(f"  in    {each.name}")
            raise
        batches.append(facts)
        sights += seen
    carried = frozenset(key for each in rollouts for key, value in each.batch.items() if value is not None)
    groups_given = all(each.meta is not None for each in rollouts)
    keys = [
        *ignored_keys(_raw(config)),
        *idle_keys(spec, carried, groups_given, lambda other: _same(spec, other, rollouts)),
    ]
    backend = backend_of(spec)
    if backend != spec.advantage.backend:
        keys.append(Idle("actor.advantage.backend", spec.advantage.backend, f"{SWITCH}={backend} overrules it"))
    return Diagnosis(
        rules=spec.advantage.rules,
        backend=backend,
        override=spec.advantage.compute.implementation if spec.override else None,
        batches=batches,
        findings=_ranked(sights),
        functions=_functions(spec, resolved, carried),
        keys=keys,
    )


def _look(spec: Spec, resolved: Resolved, each: Rollouts) -> tuple[Batch, list[tuple[str, Sight]]]:
    """One batch's facts, and its warnings by name."""
    configured, results, refused = spec.advantage.rules, {}, {}
    for rules in ("default", "strict") if resolved.compute is None else ("default",):
        try:
            results[rules] = _run(spec.with_advantage(rules=rules), resolved, each)
        except CompiledAdvError as error:
            refused[rules] = error
    if not results:
        raise refused[configured]
    default, strict = results.get("default"), results.get("strict")
    if default is not None and "strict" in refused and each.batch.get("is_truncated") is None:
        given = {**each.batch, "is_truncated": default.computed["is_truncated"]}
        strict = _attempt(spec.with_advantage(rules="strict"), resolved, replace(each, batch=given))
    change = None if default is None or strict is None else _change(default, strict)
    facts = _facts(spec, each, change, {rules: str(error) for rules, error in refused.items()})

    mine, other = (default, strict) if configured == "default" else (strict, default)
    sights = [] if configured in results else [(REFUSED, Sight(each.name, [], facts.rows, None, None))]
    for name in WARNINGS:
        rows, others = (x.flags.get(name, []) if x is not None else [] for x in (mine, other))
        if rows or others:
            moved = None if default is None else _moved(name, spec, resolved, each, default)
            differ = others if other is not None and others != rows and name != "truncated_by_width" else None
            sights.append((name, Sight(each.name, rows, facts.rows, differ, moved)))
    return facts, sights


REFUSED = "refused"


def _moved(name: str, spec: Spec, resolved: Resolved, each: Rollouts, default: Result) -> Change | None:
    """What one strict rule alone changes. The rule about the width has no stage: it is measured as if none was cut."""
    spec, stages = spec.with_advantage(rules="default"), REMEDIES[name][0]
    if name == "truncated_by_width":
        ended = torch.zeros_like(default.computed["is_truncated"], dtype=torch.bool)
        each = replace(each, batch={**each.batch, "is_truncated": ended})
    elif not stages:
        return None
    result = _attempt(spec, resolved, each, stages)
    return None if result is None else _change(default, result)


def _attempt(spec: Spec, resolved: Resolved, each: Rollouts, stages: Rules = ()) -> Result | None:
    try:
        return _run(spec, resolved, each, stages)
    except CompiledAdvError:
        return None


def _run(spec: Spec, resolved: Resolved, each: Rollouts, stages: Rules = ()) -> Result:
    """One batch by the eager Program; beside default rules, with the strict form of these stages."""
    with torch.no_grad():
        admitted = admit(each.batch, each.meta, admit_call({}, spec, resolved), spec, resolved)
        if resolved.compute is not None:
            return Result(call_compute(resolved.compute, admitted.inputs, decoupled=spec.use_decoupled_loss), {})
        pipeline = under(_wired(spec, resolved, admitted), stages)
        computed, flags = EagerExecutable(lower(verify(pipeline))).run(admitted)
    raise_errors(flags)
    return Result(computed, flags)


def _wired(spec: Spec, resolved: Resolved, admitted: Admitted) -> Pipeline:
    mopd = admitted.data.get(MOPD) is not None
    return wire(spec, resolved, frozenset(admitted.channels), admitted.call.advantage_shaping_mode, mopd=mopd)


def under(pipeline: Pipeline, stages: Iterable[type[Stage]]) -> Pipeline:
    """A Pipeline wired under default rules, with the strict form of these stages."""
    nodes = tuple(
        replace(node, stage=STRICT[type(node.stage)](**node.stage.numbers())) if type(node.stage) in stages else node
        for node in pipeline.nodes
    )
    return replace(pipeline, nodes=nodes)


def _change(a: Result, b: Result) -> Change:
    """On tokens that are active in either."""
    active_BT = (a.computed["loss_mask"] > 0) | (b.computed["loss_mask"] > 0)
    x_BT, y_BT = (each.computed["advantages"].to(torch.float64) for each in (a, b))
    gap_BT = torch.where(active_BT & ((x_BT - y_BT).abs() > 1e-6 * (1 + x_BT.abs())), (x_BT - y_BT).abs(), 0.0)
    return Change(
        int((gap_BT > 0).any(1).sum()), float(gap_BT.max()), float(gap_BT.sum() / max(1, int(active_BT.sum())))
    )


def _facts(spec: Spec, each: Rollouts, change: Change | None, refused: dict[str, str]) -> Batch:
    mask_BT, valid_BT = each.batch["loss_mask"] != 0, each.batch["attention_mask"] != 0
    (rows, tokens), n_valid = mask_BT.shape, int(valid_BT.sum())
    bucket = padding = None
    if backend_of(spec) == "compiled":
        try:
            fits = ladder(spec).fit(rows, tokens)
            bucket, padding = str(fits), 1 - n_valid / (fits.rows * fits.tokens)
        except NoBucket as error:
            bucket = error.what
    own = 1 - n_valid / (rows * tokens)
    return Batch(each.name, rows, tokens, int(mask_BT.sum()), own, bucket, padding, change, refused)


def _same(spec: Spec, other: Spec, rollouts: Sequence[Rollouts]) -> bool:
    """Whether another configuration computes the same numbers of every batch."""
    try:
        for each in rollouts:
            a, b = (_run(s, resolve_spec(s), each).computed for s in (spec, other))
            if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
                return False
    except CompiledAdvError:  # then it matters
        return False
    return True


def _functions(spec: Spec, resolved: Resolved, keys: frozenset[str]) -> list[dict[str, Any]]:
    """Where users' functions run in the compiled backend, and why."""
    slots = (resolved.compute, resolved.outcome, resolved.estimator, resolved.lambda_fn)
    if backend_of(spec) != "compiled" or (not any(slots) and not hasattr(resolved.process, "path")):
        return []
    functions: list[dict[str, Any]] = build(spec).explain(format="json", channels=sorted(keys))["functions"]
    return functions


def _raw(config: Any) -> Any:
    """What was written, before our keys were taken from it."""
    return config_file.read(config_file.find(config))[0] if isinstance(config, (str, os.PathLike)) else config


def _ranked(sights: Iterable[tuple[str, Sight]]) -> list[Finding]:
    """By name, worst first; a refusal is the worst."""
    by_name: dict[str, list[Sight]] = {}
    for name, sight in sights:
        by_name.setdefault(name, []).append(sight)
    found = []
    for name, seen in by_name.items():
        rules, help_ = REMEDIES.get(name, ((), ""))
        found.append(Finding(name, WARNINGS.get(name, "these rules take no such batch"), help_, bool(rules), seen))
    return sorted(found, key=lambda each: (each.name == REFUSED, *each.harm), reverse=True)
