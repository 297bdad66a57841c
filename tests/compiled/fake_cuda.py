"""Gives a stand-in for a CUDA device that captures and replays on the CPU, as strictly as a GPU does.

A capture records every operator that runs, with its tensors by address and its numbers as they are; a replay runs them
again into the same memory. What a capture forbids on a GPU (numbers read on the host, copies to it) raises here too.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: "FakeGraph") -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in SYNCS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = operator(*args, **(kwargs or {}))
        self.graph.calls.append((operator, args, kwargs or {}, result))
        return result


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self.calls: list[Any] = []
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")
        for operator, args, kwargs, result in self.calls:
            again = operator(*args, **kwargs)
            for kept, x in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != x.data_ptr():
                    kept.copy_(x)


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("record")

    def wait(self) -> None:
        self.log.append("wait")

    def synchronize(self) -> None:
        pass


class FakeCuda:
    """`log`: what was asked, in order. `fails`: what a capture raises at its end. `pools`: the pool of each graph."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: str | None = None
        self.graphs: list[FakeGraph] = []
        self.pools: list[object] = []

    def here(self) -> Any:
        return nullcontext()

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    pinned = buffer

    def event(self) -> FakeEvent:
        return FakeEvent(self.log)

    def graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self.log))
        return self.graphs[-1]

    def pool(self) -> object:
        return object()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        self.log.append("warm up")
        yield

    @contextmanager
    def capture(self, graph: FakeGraph, pool: object) -> Iterator[None]:
        self.log.append("capture")
        self.pools.append(pool)
        with Recorder(graph):
            yield
        if self.fails:
            raise RuntimeError(self.fails)
