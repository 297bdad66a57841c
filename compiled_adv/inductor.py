"""Takes a segment's graph and a bucket's example tensors; gives a callable compiled for exactly these shapes.

torch.compile is the front door: full graph, static shapes, no guards, a code object of its own for each bucket, and our
backend, which rewrites the captured graph before Inductor. The only file that touches torch's underscore-named modules.
"""

import os
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

Compiled = Callable[..., tuple[Tensor, ...]]

# Dynamo and Inductor compile one graph at a time.
LOCK = threading.RLock()


def compile_graph(
    module: fx.GraphModule,
    example: Sequence[Tensor],
    *,
    replace: dict[Any, Any],
    cache_dir: str | None = None,
) -> Compiled:
    """`module` compiled for tensors like `example`. `replace`: the operators that stand for others on this device.

    Without guards nothing checks a later call: shapes, dtypes and contiguity are the caller's to keep.
    """

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in replace:
                node.target = replace[node.target]
        graph.recompile()
        return compile_fx(graph, inputs)  # type: ignore[arg-type]

    def run(*channels: Tensor) -> tuple[Tensor, ...]:
        return module(*channels)

    compiled = torch.compile(
        _with_own_code(run),
        fullgraph=True,
        dynamic=False,
        backend=backend,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    with LOCK, _cache(cache_dir), torch.no_grad():
        compiled(*example)
    return compiled


def _with_own_code(fn: Any) -> Any:
    """The same function with a code object of its own: Dynamo keeps its cache and its limit by code object."""
    code = fn.__code__.replace(co_name=fn.__name__)
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


@contextmanager
def _cache(folder: str | None) -> Iterator[None]:
    """Inductor's on-disk caches in this folder while compiling."""
    if folder is None:
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def graph_error(module: torch.nn.Module, args: Sequence[Any]) -> Exception | None:
    """Why torch cannot capture a module as one graph; None where it can."""

    def run(*channels: Any) -> Any:
        return module(*channels)

    try:
        torch.compile(_with_own_code(run), fullgraph=True, dynamic=False, backend="eager")(*args)
    except Exception as error:
        return error
    return None


def graphs_captured() -> int:
    """How many graphs Dynamo has captured in this process."""
    return counters["stats"]["unique_graphs"]
