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
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx

from compiled_adv.memory import POOL

Compiled = Callable[..., tuple[Tensor, ...]]

# A value that is read twice is computed once: a shifted load costs more than a store and a load.
# Shapes are checked once, before the call.
SETTINGS: dict[str, Any] = {
    "realize_reads_threshold": 1,
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
}
if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
    # Inductor's own probe for vector units takes seconds, and where it fails, kernels are scalar without a word.
    SETTINGS["cpp.vec_isa_ok"] = True

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
        wanted = _keep_row_values(graph)
        known = set(map(id, PyCodeCache.modules))
        compiled: Any = compile_fx(graph, inputs, config_patches=SETTINGS)
        for module in PyCodeCache.modules:
            if id(module) not in known:
                _lend_outputs(module)
        return lambda *channels: compiled(*channels)[:wanted]

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


def _keep_row_values(graph: fx.GraphModule) -> int:
    """Return the per-row values too, after the graph's own outputs, whose number this gives.

    Inductor would otherwise compute a score, a mean or a divisor again in every vector of the row that reads it.
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    own = output.args[0]
    rows = []
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op.startswith("call") and isinstance(value, Tensor) and value.ndim == 1 and node not in own:
            columns = [user.meta.get("example_value") for user in node.users]
            if any(isinstance(x, Tensor) and tuple(x.shape) == (len(value), 1) for x in columns):
                rows.append(node)
    output.args = ((*own, *rows),)
    graph.recompile()
    return len(own)


def _lend_outputs(module: Any) -> None:
    """Let a generated module take its large buffers from our pool; without this name it allocates as ever."""
    if hasattr(module, "empty_strided_cpu"):
        ordinary = module.empty_strided_cpu

        def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if len(shape) == 2 and stride == (shape[1], 1):
                return POOL.empty(shape, dtype)
            return ordinary(shape, stride, dtype)

        module.empty_strided_cpu = empty


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
