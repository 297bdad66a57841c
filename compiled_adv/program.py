"""Takes a Pipeline; gives a Program: segments of torch.fx graphs that run as they are and print as runnable Python.

A Program is cut around a user's function that must see exact shapes, around a collective and, if asked, between stages
that take each row by itself and stages that do not. Each segment is one GraphModule whose submodules are the stages; it
returns the versions that later segments or the caller need, then its flags as one tensor of bits, int64 [B].
"""

from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.stage import Stage
from compiled_adv.stages.forms import bits


class StageModule(nn.Module):
    """A stage as a submodule, so that a graph can call it by name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *channels: Tensor | None) -> Any:
        return self.stage.forward(*channels)

    def extra_repr(self) -> str:
        return str(self.stage)


class Bits(nn.Module):
    """Flags, bool [B] each, as bits of one word a row, int64 [B]."""

    def forward(self, *flags: Tensor) -> Tensor:
        return bits(*flags)


@dataclass(frozen=True)
class Segment:
    """A part of a Program. `module` is a GraphModule, or the Node of a user's function or a collective.

    by_rows: whether it may run on some rows at a time. closes: whether its flags, and those of the segments before it,
    are looked at before the next one runs.
    """

    module: fx.GraphModule | Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flags: tuple[str, ...]
    by_rows: bool = False
    closes: bool = True

    @property
    def opaque(self) -> bool:
        return isinstance(self.module, Node)


@dataclass(frozen=True)
class Program:
    """Segments in order, the versions that enter, and (name, version) of what leaves."""

    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]

    @cached_property
    def read_after(self) -> tuple[frozenset[str], ...]:
        """The versions that later segments read, for each segment."""
        reads = [segment.inputs for segment in self.segments]
        return tuple(frozenset(v for later in reads[i + 1 :] for v in later) for i in range(len(reads)))


def lower(pipeline: Pipeline, *, by_rows: bool = False) -> Program:
    """Pipeline -> Program. Outputs that would share a version, with each other or with an input, are copied.

    by_rows: cut it between stages that take each row by itself and stages that do not.
    """
    pipeline, copies = pipeline.in_order(), {}
    seen: set[str] = set(pipeline.inputs)
    outputs = []
    for name, version in pipeline.outputs:
        if version in seen:
            copies[f"{name}.copy"] = version
            version = f"{name}.copy"
        seen.add(version)
        outputs.append((name, version))
    parts = [(nodes, True) for nodes in _parts(pipeline)]
    if by_rows:
        cut = [_by_rows(nodes) for nodes, _ in parts]
        parts = [(nodes, nodes is pieces[-1]) for pieces in cut for nodes in pieces]
    segments, known = [], {*pipeline.inputs}
    for i, (nodes, closes) in enumerate(parts):
        known |= {version for node in nodes for version in node.writes}
        here = {} if nodes[0].stage.opaque else {name: v for name, v in copies.items() if v in known}
        copies = {name: v for name, v in copies.items() if name not in here}
        wanted = {v for later, _ in parts[i + 1 :] for node in later for v in node.reads if v is not None}
        wanted |= {version for _, version in outputs} | {*copies.values()}
        segments.append(replace(_segment(nodes, wanted, here), closes=closes))
    return Program(tuple(segments), pipeline.inputs, tuple(outputs))


def _parts(pipeline: Pipeline) -> list[list[Node]]:
    """Traced stages and opaque ones by turns; each traced stage as early as its inputs allow.

    So every check that does not depend on a user's function runs before the first of them.
    """
    depth = {"in": 0}  # even: traced stages; odd: opaque ones
    for node in pipeline.nodes:
        ready = max((depth[name] for name in pipeline.graph.predecessors(node.name)), default=0)
        depth[node.name] = ready + ready % 2 + node.stage.opaque
    parts = []
    for level in range(max(depth.values()) + 1):
        nodes = [node for node in pipeline.nodes if depth[node.name] == level]
        parts += [[node] for node in nodes] if level % 2 else [nodes] if nodes else []
    return parts


def _by_rows(nodes: list[Node]) -> list[list[Node]]:
    """Stages that take each row by itself and stages that mix rows, by turns.

    A stage runs as late as those of its readers that must wait for others; one that nobody waits for runs as soon as
    it can. So little lies between two parts.
    """
    writer = {version: node.name for node in nodes for version in node.produced}
    writers = {node.name: {writer[v] for v in node.reads if v in writer} for node in nodes}

    def after(node: Node, level: dict[str, int]) -> int:
        """The first level behind its writers. Even: by rows; odd: mixed."""
        ready = max((level[name] for name in writers[node.name]), default=0)
        return ready + (ready % 2 != node.stage.mixes_rows)

    early: dict[str, int] = {}
    for node in nodes:
        early[node.name] = after(node, early)
    due: dict[str, int] = {}
    for node in reversed(nodes):
        waiting = [due[other.name] for other in nodes if node.name in writers[other.name] and other.name in due]
        if waiting or early[node.name]:
            last = min(waiting, default=early[node.name])
            due[node.name] = last - (last % 2 != node.stage.mixes_rows)
    level: dict[str, int] = {}
    for node in nodes:
        level[node.name] = due[node.name] if node.name in due else after(node, level)
    parts = [[node for node in nodes if level[node.name] == i] for i in range(max(level.values()) + 1)]
    return [part for part in parts if part]


def _segment(nodes: list[Node], wanted: set[str], copies: dict[str, str]) -> Segment:
    reads = dict.fromkeys(v for node in nodes for v in node.reads if v is not None)
    reads |= dict.fromkeys(copies.values())
    written = {version for node in nodes for version in node.produced}
    inputs = tuple(version for version in reads if version not in written)
    flags = tuple(flag for node in nodes for flag in node.flags)
    outputs = tuple(v for node in nodes for v in node.writes if v in wanted) + tuple(copies)
    if nodes[0].stage.opaque:
        return Segment(nodes[0], inputs, nodes[0].writes, flags)

    graph, root = fx.Graph(), nn.Module()
    env: dict[str, fx.Node] = {version: graph.placeholder(identifier(version)) for version in inputs}
    for node in nodes:
        target = identifier(node.name)
        root.add_module(target, StageModule(node.stage))
        result = graph.call_module(target, tuple(None if v is None else env[v] for v in node.reads))
        if len(node.produced) == 1:
            env[node.produced[0]] = result
        else:
            for i, version in enumerate(node.produced):
                env[version] = graph.create_node("call_function", getitem, (result, i), name=identifier(version))
    for name, version in copies.items():
        env[name] = graph.call_function(torch.clone, (env[version],))
    assert len(flags) < 63, "one word holds the flags of a row"
    root.add_module("bits", Bits())
    bits = graph.call_module("bits", tuple(env[flag] for flag in flags)) if flags else None
    graph.output((*(env[v] for v in outputs), bits))
    graph.lint()
    by_rows = not any(node.stage.mixes_rows for node in nodes)
    return Segment(fx.GraphModule(root, graph, "Segment"), inputs, outputs, flags, by_rows)


def identifier(version: str) -> str:
    """A version or node name as a Python name: `flag:loo_alone.1` -> `flag_loo_alone_1`."""
    return version.replace(".", "_").replace(":", "_")
