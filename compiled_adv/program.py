"""Takes a Pipeline; gives a Program: segments of torch.fx graphs that run as they are and print as runnable Python.

A Program is cut only around a user's function that must see exact shapes. Each segment is one GraphModule whose
submodules are the stages; it returns the versions that later segments or the caller need, then its flags as one
bool tensor [flags, B].
"""

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.stage import Stage


class StageModule(nn.Module):
    """A stage as a submodule, so that a graph can call it by name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *channels: Tensor | None) -> Any:
        return self.stage.forward(*channels)

    def extra_repr(self) -> str:
        return str(self.stage)


@dataclass(frozen=True)
class Segment:
    """A part of a Program. `module` is a GraphModule, or the Node of a user's function."""

    module: fx.GraphModule | Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def opaque(self) -> bool:
        return isinstance(self.module, Node)


@dataclass(frozen=True)
class Program:
    """Segments in order, the versions that enter, and (name, version) of what leaves."""

    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]


def lower(pipeline: Pipeline) -> Program:
    """Pipeline -> Program. Outputs that would share a version, with each other or with an input, are copied."""
    pipeline, copies = pipeline.in_order(), {}
    seen: set[str] = set(pipeline.inputs)
    outputs = []
    for name, version in pipeline.outputs:
        if version in seen:
            copies[f"{name}.copy"] = version
            version = f"{name}.copy"
        seen.add(version)
        outputs.append((name, version))
    parts = _parts(pipeline)
    segments = []
    for i, nodes in enumerate(parts):
        wanted = {v for later in parts[i + 1 :] for node in later for v in node.reads if v is not None}
        wanted |= {version for _, version in outputs} | (set(copies.values()) if i + 1 < len(parts) else set())
        last = i + 1 == len(parts)
        segments.append(_segment(nodes, wanted, copies if last else {}))
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
    stacked = graph.call_function(torch.stack, ([env[flag] for flag in flags],)) if flags else None
    graph.output((*(env[v] for v in outputs), stacked))
    graph.lint()
    return Segment(fx.GraphModule(root, graph, "Segment"), inputs, outputs, flags)


def identifier(version: str) -> str:
    """A version or node name as a Python name: `flag:loo_alone.1` -> `flag_loo_alone_1`."""
    return version.replace(".", "_").replace(":", "_")
