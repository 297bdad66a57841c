"""Takes a Pipeline and passes; gives the rewritten Pipeline and the log of what changed and what held back.

A pass is data: rows of (pattern, function). The runner here does the rest for every pass: matching, verification
around it, timing, fuel, and running until nothing changes. It knows no pass by name.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import networkx as nx

from compiled_adv.errors import GraphError
from compiled_adv.pipeline import FLAG, Node, Pipeline, flag_name
from compiled_adv.stage import Stage
from compiled_adv.stages.fused import Fused
from compiled_adv.status import ERRORS
from compiled_adv.verify import each_version_is_written_once, verify

Numerics = Literal["exact", "close"]
INVALID = f"{FLAG}invalid"
SETTLED_AFTER = 100  # rounds of one pass; more means that its rules undo each other


@dataclass(frozen=True)
class Pattern:
    """A chain of stages by class, each one reading what the one before it writes. Build it with P(A) >> P(B)."""

    chain: tuple[type[Stage], ...]

    def __rshift__(self, other: "Pattern") -> "Pattern":
        return Pattern(self.chain + other.chain)

    def __str__(self) -> str:
        return " >> ".join(stage.__name__ for stage in self.chain)

    def matches(self, pipeline: Pipeline) -> Iterator[tuple[Node, ...]]:
        """Every place where the chain stands, in the Pipeline's order."""
        for node in pipeline.nodes:
            if isinstance(node.stage, self.chain[0]):
                yield from self._grown(pipeline, (node,))

    def _grown(self, pipeline: Pipeline, found: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
        if len(found) == len(self.chain):
            yield found
            return
        for name in dict.fromkeys(pipeline.graph.successors(found[-1].name)):
            if name != "out":
                node = pipeline.node(name)
                if isinstance(node.stage, self.chain[len(found)]) and node not in found:
                    yield from self._grown(pipeline, (*found, node))


def P(stage: type[Stage]) -> Pattern:  # noqa: N802, as in the literature
    """The pattern of one stage."""
    return Pattern((stage,))


@dataclass(frozen=True)
class Rewrite:
    """What a rule wants: nodes out, nodes in, and versions that stand for others from then on."""

    remove: tuple[Node, ...] = ()
    add: tuple[Node, ...] = ()
    rename: tuple[tuple[str, str | None], ...] = ()  # (old version, the one for it or None: absent)

    def applied(self, pipeline: Pipeline) -> Pipeline:
        """The Pipeline so changed, without stages that nothing needs any longer."""
        gone = {node.name for node in self.remove}
        first = min((i for i, node in enumerate(pipeline.nodes) if node.name in gone), default=0)
        stands_for = dict(self.rename)

        def now(version: str | None) -> str | None:
            return stands_for.get(version, version) if version is not None else None

        kept = [replace(n, reads=tuple(now(v) for v in n.reads)) for n in pipeline.nodes if n.name not in gone]
        kept[first:first] = self.add
        outputs = tuple((name, stands_for.get(version, version) or version) for name, version in pipeline.outputs)
        changed = replace(pipeline, nodes=tuple(kept), outputs=outputs)
        each_version_is_written_once(changed)  # now: the first of two writers would go as idle
        return without_idle(changed.in_order())


Rule = Callable[..., "Rewrite | str | None"]


@dataclass(frozen=True)
class Pass:
    """Rules with one purpose. A rule gets the Pipeline and the matched nodes; it returns a Rewrite, a text that says
    why it held back here, or None where there is nothing to say.

    numerics: "exact" keeps every bit, "close" may round differently and runs only where it is asked for.
    """

    name: str
    why: str
    rules: tuple[tuple[Pattern, Rule], ...]
    numerics: Numerics = "exact"


@dataclass(frozen=True)
class Entry:
    """One thing that a pass did, or why it held back."""

    name: str
    place: str  # the matched stages
    what: str
    source: str  # file:line of the rule
    done: bool


@dataclass
class RewriteLog:
    """What every pass did, in order, with the Pipeline after each pass that changed it, and seconds by pass."""

    entries: list[Entry] = field(default_factory=list)
    snapshots: list[tuple[str, Pipeline]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def rewrites(self) -> int:
        return sum(entry.done for entry in self.entries)


def rewrite(
    pipeline: Pipeline, passes: Sequence[Pass], *, fuel: int | None = None, numerics: Numerics = "exact"
) -> tuple[Pipeline, RewriteLog]:
    """Run each pass until nothing changes. `fuel` stops after that many rewrites, to find a wrong one by bisection."""
    log = RewriteLog(snapshots=[("wired", verify(pipeline))])
    for each in passes:
        start = time.perf_counter()
        if each.numerics == "close" and numerics == "exact":
            log.entries.append(Entry(each.name, "-", "numerics: close is not asked for", "", False))
            continue
        before = pipeline
        pipeline = _settled(pipeline, each, log, fuel)
        log.seconds[each.name] = time.perf_counter() - start
        if pipeline != before:
            log.snapshots.append((each.name, pipeline))
    return pipeline, log


def _settled(pipeline: Pipeline, each: Pass, log: RewriteLog, fuel: int | None) -> Pipeline:
    """One pass, run until no rule fires."""
    for _ in range(SETTLED_AFTER):
        held: list[Entry] = []
        changed = None
        for rule, nodes in _candidates(pipeline, each):
            if fuel is not None and log.rewrites >= fuel:
                log.entries += [*held, Entry(each.name, "-", f"out of fuel after {fuel} rewrites", "", False)]
                return pipeline
            place, source = " >> ".join(node.name for node in nodes), _source(rule)
            result = rule(pipeline, *nodes)
            if isinstance(result, str):
                held.append(Entry(each.name, place, result, source, False))
            elif result is not None:
                changed = _checked(result, pipeline, each)
                added = ", ".join(str(node.stage) for node in result.add) or "nothing"
                log.entries.append(Entry(each.name, place, f"-> {added}", source, True))
                break
        if changed is None:
            log.entries += held
            return pipeline
        pipeline = changed
    what = f"pass '{each.name}' does not settle: its rules undo each other"
    raise GraphError(what, found=f"{SETTLED_AFTER} rewrites", hint="rules that return None when they are done")


def _candidates(pipeline: Pipeline, each: Pass) -> Iterator[tuple[Rule, tuple[Node, ...]]]:
    for pattern, rule in each.rules:
        for nodes in pattern.matches(pipeline):
            yield rule, nodes


def _checked(result: Rewrite, pipeline: Pipeline, each: Pass) -> Pipeline:
    try:
        changed = verify(result.applied(pipeline))
    except GraphError as error:
        raise type(error)(f"after pass '{each.name}': {error.what}", at=error.at, found=error.found) from error
    stands_for = dict(result.rename)
    lost = {flag for flag in pipeline.flags if stands_for.get(flag, flag) not in changed.flags}
    if any(flag_name(flag) == "invalid" for flag in changed.flags):  # for every error; the eager path tells which
        lost = {flag for flag in lost if flag_name(flag) not in ERRORS}
    lost |= dict(pipeline.outputs).keys() - dict(changed.outputs).keys()
    if lost:
        raise GraphError(f"pass '{each.name}' lost an output or a flag", found=", ".join(sorted(lost)))
    return changed


def _source(rule: Rule) -> str:
    try:
        return f"{Path(inspect.getfile(rule)).name}:{inspect.getsourcelines(rule)[1]}"
    except (OSError, TypeError):
        return "?"


def without_idle(pipeline: Pipeline) -> Pipeline:
    """The Pipeline without stages on which neither an output nor a flag depends."""
    useful = nx.ancestors(pipeline.graph, "out")
    return replace(pipeline, nodes=tuple(node for node in pipeline.nodes if node.name in useful))


# ---- what rules ask and build ----


def readers(pipeline: Pipeline, version: str) -> list[Node]:
    """The stages that read a version."""
    return [node for node in pipeline.nodes if version in node.reads]


def fuse(pipeline: Pipeline, *nodes: Node) -> Rewrite:
    """One node in place of several: what they write for each other stays inside, what others read leaves."""
    inside = {node.name for node in nodes}
    reads = tuple(dict.fromkeys(v for node in nodes for v in node.reads if v and not _writes(nodes, v)))
    known = list(reads)
    steps = []
    for node in nodes:
        steps.append((node.stage, tuple(-1 if v is None else known.index(v) for v in node.reads)))
        known += node.produced
    outside = {v for node in pipeline.nodes if node.name not in inside for v in node.reads}
    outside |= {version for _, version in pipeline.outputs}
    writes = tuple(v for node in nodes for v in node.writes if v in outside)
    flags = tuple(flag for node in nodes for flag in node.flags)
    stage = Fused(tuple(steps), tuple(known.index(v) for v in writes + flags))
    return Rewrite(nodes, (Node("+".join(node.name for node in nodes), stage, reads, writes, flags),))


def _writes(nodes: tuple[Node, ...], version: str) -> bool:
    return any(version in node.produced for node in nodes)
