"""Takes a configuration and rollouts; gives what may harm training with them, worst first, and what to do about it.

Both rule sets are run. What a warning costs is how far its strict rule alone moves the advantages of active tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compiled_adv import config_file
from compiled_adv.admit import Admitted, admit, admit_call
from compiled_adv.compiler import MOPD, SWITCH, backend_of, build, ladder
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
class Change:
    """How far apart two results are on active tokens: rows that differ, the largest and the mean difference."""

    rows: int
    largest: float
    mean: float

    @property
    def text(self) -> str:
        if not self.rows:
            return "moves no advantage"
        of, mean, largest = _count(self.rows, "row"), _number(self.mean), _number(self.largest)
        return f"moves the advantages of {of}, by {mean} a token on average and {largest} at most"


@dataclass(frozen=True)
class Sight:
    """A warning in one batch. rows: under the configured rules; other_rows: under the other ones, where they differ."""

    batch: str
    rows: list[int]
    of: int
    other_rows: list[int] | None
    change: Change | None  # None: the rule alone moves nothing, or nothing could be computed


@dataclass(frozen=True)
class Finding:
    """A warning, or a refusal, in all batches where it was seen."""

    name: str
    what: str
    help: str
    repaired: bool  # by strict rules
    sights: list[Sight]

    @property
    def harm(self) -> tuple[float, float]:
        """Larger is worse: by change first, by share of rows next."""
        moved = sum(sight.change.mean * sight.of for sight in self.sights if sight.change)
        return moved, sum(len(sight.rows) for sight in self.sights) / sum(sight.of for sight in self.sights)


@dataclass(frozen=True)
class Batch:
    """Facts of one batch."""

    name: str
    rows: int
    tokens: int
    generated: int
    padding: float  # share of slots that hold no token
    bucket: str | None
    bucket_padding: float | None  # the same, of the bucket that serves it
    strict: Change | None  # what strict rules change
    refused: dict[str, str]  # rule set -> why it refuses this batch


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    rules: str
    backend: str
    override: str | None
    batches: list[Batch]
    findings: list[Finding]
    functions: list[dict[str, Any]]
    keys: list[Idle]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# ---- looking ----


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


# ---- saying ----


def text(diagnosis: Diagnosis) -> str:
    """The diagnosis for people."""
    return "\n\n".join(
        part
        for part in (
            _head(diagnosis),
            *(_finding(i, each, diagnosis) for i, each in enumerate(diagnosis.findings, 1)),
            _rules(diagnosis),
            _padding(diagnosis),
            _places(diagnosis),
            _keys(diagnosis),
        )
        if part
    )


def _head(d: Diagnosis) -> str:
    rows, generated = sum(b.rows for b in d.batches), sum(b.generated for b in d.batches)
    batches = f"{len(d.batches)} batches, " if len(d.batches) > 1 else ""
    seen = f"{batches}{_count(rows, 'row')}, {_count(generated, 'generated token')}"
    if d.override:
        return f"{seen}, computed by {d.override}: rules and warnings do not apply"
    if not d.findings:
        return f"{seen}, {d.rules} rules: nothing found that harms training"
    order = ", worst first" if len(d.findings) > 1 else ""
    return f"{seen}, {d.rules} rules: {_count(len(d.findings), 'thing')} that may harm training{order}"


def _finding(number: int, found: Finding, d: Diagnosis) -> str:
    lines = [f"{number}. {found.name}: {found.what}"]
    for sight in found.sights[:MOST]:
        where = f"{sight.batch}: " if len(d.batches) > 1 else ""
        lines.append(f"   {where}{len(sight.rows) or 'none'} of {_count(sight.of, 'row')}{_which(sight.rows)}")
        if sight.other_rows is not None:
            count = f"{len(sight.other_rows) or 'none'} of {_count(sight.of, 'row')}"
            lines.append(f"   under {_other(d)} rules {count}{_which(sight.other_rows)}")
        if sight.change is not None:
            lines.append(f"   {_cause(found.name)} {sight.change.text}")
    lines += _more(found.sights, "batches")
    if found.help:
        also = ", or set advantage.rules: strict" if found.repaired and d.rules == "default" else ""
        lines.append(f"   try {found.help}{also}")
    return "\n".join(lines)


def _cause(name: str) -> str:
    return "counting them as truncated" if name == "truncated_by_width" else "its strict rule"


def _rules(d: Diagnosis) -> str:
    if d.override:
        return ""
    lines = []
    for b in d.batches[:MOST]:
        where = f"{b.name}: " if len(d.batches) > 1 else ""
        lines += [f"  {where}{rules} rules refuse it: {_first(error)}" for rules, error in b.refused.items()]
        if b.strict is not None:
            given = "with is_truncated given, it " if "strict" in b.refused else ""
            lines.append(f"  {where}{given}{b.strict.text}")
    head = f"What advantage.rules: {_other(d)} would change, all in all"
    return "\n".join([head, *lines, *_more(d.batches, "batches")])


def _other(d: Diagnosis) -> str:
    """The rules that are not configured."""
    return "strict" if d.rules == "default" else "default"


def _padding(d: Diagnosis) -> str:
    lines = []
    for b in d.batches[:MOST]:
        line = f"  {b.name}: {b.rows} x {b.tokens}, {b.padding:.0%} of it padding"
        if b.bucket_padding is not None:
            line += f"; in the bucket {b.bucket}, {b.bucket_padding:.0%}"
        elif b.bucket is not None:
            line += f"; {b.bucket}"
        lines.append(line)
    wasteful = [b for b in d.batches if b.bucket_padding is not None and b.bucket_padding - b.padding > 0.1]
    if wasteful:
        rows, tokens = (sorted(sizes)[-3:] for sizes in ({b.rows for b in wasteful}, {b.tokens for b in wasteful}))
        lines.append(f"  try boundaries that fit: actor.advantage.compiled.buckets: {{rows: {rows}, tokens: {tokens}}}")
    return "\n".join(["Padding", *lines, *_more(d.batches, "batches")])


def _places(d: Diagnosis) -> str:
    """Users' functions that are not part of the compiled program."""
    split = [each for each in d.functions if each["where"] != "program"]
    lines = []
    for each in split:
        lines.append(f"  {each['function']} ({each['config']}) runs {each['where']}: {each['why']}")
        lines += [f"    {label} {each[key]}" for label, key in (("at", "line"), ("try", "hint")) if each.get(key)]
    return "\n".join(["Your functions that split the program", *lines]) if split else ""


def _keys(d: Diagnosis) -> str:
    if not d.keys:
        return ""
    return "\n".join(["Keys without effect", *(f"  {each.key}: {each.value}   ({each.why})" for each in d.keys)])


MOST = 6


def _more(things: Sequence[Any], noun: str) -> list[str]:
    return [f"   and {len(things) - MOST} more {noun}"] if len(things) > MOST else []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(x: float) -> str:
    """Three digits, and never an exponent that hides how large it is."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _which(rows: Sequence[int]) -> str:
    """Rows as ranges, as many as fit."""
    if not rows:
        return ""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row - 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges]
    shown = words[:12]
    return f" ({' '.join(shown)}{' ...' if len(words) > len(shown) else ''})"


def _first(error: str) -> str:
    return error.splitlines()[0]
