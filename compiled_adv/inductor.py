"""Takes a segment's graph and a bucket's example tensors; gives a callable compiled for exactly these shapes.

torch.compile is the front door: full graph, static shapes, no guards, a code object of its own for each bucket, and our
backend, which rewrites the captured graph before Inductor. A user's function is captured here too (`capture`), which
says why where that fails, and compiled by itself for any shape. The only file that touches torch's underscore-named
modules.
"""

import os
import re
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config
from torch import Tensor, fx
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import counters
from torch._inductor import lowering
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import cache_dir_utils
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import ops
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_adv.memory import LEAST_BYTES, POOL

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


def settings_of(device: torch.device) -> dict[str, Any]:
    """Inductor's settings for a device. On a GPU no index is asserted: a device assert takes the whole context along,
    and a captured graph may hold none. Indices are made by us, or flagged."""
    return SETTINGS if device.type == "cpu" else SETTINGS | {"assert_indirect_indexing": False}


# Torch keeps readers of one channel apart if they stand 64 nodes from each other: each would read memory again.
FAR = "are_long_distant_nodes"

WRITING = 600  # seconds that a compiler may take to write a library

# Dynamo and Inductor compile one graph at a time.
LOCK = threading.RLock()

# A segment with a user's function is compiled anew when what that reads (a global, a closure, the configuration)
# changes. More often than this, and the function does not belong into a Program.
MOST_STATES = 4


class NotCaptured(Exception):
    """Why torch cannot make one graph of a user's function: what, the user's file and line, and what would work."""

    def __init__(self, what: str, line: str = "", hint: str = "") -> None:
        super().__init__(f"{what} ({line})" if line else what)
        self.what, self.line, self.hint = what, line, hint


def compile_graph(
    module: fx.GraphModule,
    example: Sequence[Tensor],
    *,
    replace: dict[Any, Any],
    cache_dir: str | None = None,
    watch: Sequence[str] = (),
) -> Compiled:
    """`module` compiled for tensors like `example`. `replace`: the operators that stand for others on this device.

    Without guards nothing checks a later call: shapes, dtypes and contiguity are the caller's to keep. Only what users'
    functions read beside their arguments is watched: `watch` names where they lie in the module.
    """
    states = 0

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal states
        states += 1
        if states > MOST_STATES:
            raise NotCaptured("what it reads beside its arguments keeps changing")
        _put_native(graph, replace)
        wanted = _keep_row_values(graph)
        known = set(map(id, PyCodeCache.modules))
        nothing_is_far = patch.object(Scheduler, FAR, lambda *_: False, create=True)
        with patch.object(lowering, "range_mask_high", _below), nothing_is_far:
            compiled: Any = compile_fx(graph, inputs, config_patches=settings_of(example[0].device))
        if max(x.numel() for x in inputs) * 4 >= LEAST_BYTES:
            for module in PyCodeCache.modules:
                if id(module) not in known:
                    _lend_outputs(module)
        return lambda *channels: compiled(*channels)[:wanted]

    def run(*channels: Tensor) -> tuple[Tensor, ...]:
        return module(*channels)

    _keep_device_guard()
    compiled = torch.compile(
        _with_own_code(run),
        fullgraph=True,
        dynamic=False,
        backend=backend,
        options={"guard_filter_fn": lambda guards: [_is_state(guard.name, watch) for guard in guards]},
    )
    start = time.time()
    with LOCK, _cache(cache_dir), torch.no_grad():
        _remove_cut_off()
        while True:
            try:
                compiled(*example)
                break
            except Exception as error:
                if not _remove_damaged(error, start):
                    raise
                states = 0
        return _watched(compiled) if watch else _direct(compiled, example)


@cache
def _keep_device_guard() -> None:
    """A CUDA build of torch without a GPU stands a guard in when it first traces, in memory of the thread that traced
    (seen in 2.11), and crashes once that thread has ended: so one that stays asks first."""
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    asked = threading.Event()

    def ask() -> None:
        ensure()
        asked.set()
        threading.Event().wait()

    threading.Thread(target=ask, name="device guard", daemon=True).start()
    asked.wait()


def _put_native(graph: fx.GraphModule, replace: dict[Any, Any]) -> None:
    """The operators that stand for others on this device, in their place."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in replace:
            node.target = replace[node.target]
    graph.recompile()


def _direct(compiled: Compiled, example: Sequence[Tensor]) -> Compiled:
    """What Inductor made, called without the wrappers of Dynamo and AOTAutograd around it, where one call shows that
    all they do is to hand on tensors in another order."""
    calls: list[tuple[CompiledFxGraph, list[Any], list[Any]]] = []
    ordinary = CompiledFxGraph.__call__

    def seen(graph: CompiledFxGraph, inputs: Any) -> Any:
        given = [*inputs]
        results = ordinary(graph, inputs)
        calls.append((graph, given, [*results]))
        return results

    with patch.object(CompiledFxGraph, "__call__", seen):
        wanted = compiled(*example)
    if len(calls) != 1:
        return compiled
    graph, given, results = calls[0]
    reads, gives = _places(given, example), _places(wanted, results)
    call = graph.current_callable
    if reads is None or gives is None or call is None:
        return compiled

    def run(*channels: Tensor) -> tuple[Tensor, ...]:
        results = call([channels[i] for i in reads])
        return tuple([results[i] for i in gives])

    run.owner = graph  # type: ignore[attr-defined]  # it takes parts of what it made with it when it goes
    return run


def _places(some: Sequence[Any], others: Sequence[Any]) -> list[int] | None:
    """Where each stands among the others, by identity; None where one does not stand there exactly once."""
    found = [[i for i, other in enumerate(others) if other is one] for one in some]
    return [places[0] for places in found] if all(len(places) == 1 for places in found) else None


def _remove_damaged(error: BaseException, start: float) -> bool:
    """Delete the files of torch's cache that an error names, and what they were made from, unless all of it is new;
    False where there is none."""
    pattern, named = re.escape(cache_dir_utils.cache_dir()) + r"[\w/.-]+", set()
    cause: BaseException | None = error
    while cause is not None:
        named |= {Path(found) for found in re.findall(pattern, f"{cause} {getattr(cause, 'path', None)}")}
        cause = cause.__cause__ or cause.__context__
    families = [[path, *path.parent.glob(f"{path.name.split('.')[0]}.*")] for path in named]
    damaged = [family for family in families if any(path.stat().st_mtime < start for path in family if path.is_file())]
    for path in (path for family in damaged for path in family if path.is_file()):
        path.unlink(missing_ok=True)
    return bool(damaged)


def _remove_cut_off() -> None:
    """Delete libraries in torch's cache that end too early, to load one of which ends the process, unless they are so
    new that another process may be writing them."""
    for path in Path(cache_dir_utils.cache_dir()).rglob("*.so"):
        with suppress(OSError), path.open("rb") as file:
            head = file.read(64)
            at, size, count = (int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
            found, whole = path.stat(), at + size * count
            if head[:5] == b"\x7fELF\x02" and found.st_size < whole and found.st_mtime < time.time() - WRITING:
                path.unlink()


def _watched(compiled: Compiled) -> Compiled:
    """The same, raising NotCaptured where it must be compiled anew and cannot."""

    def run(*channels: Tensor) -> tuple[Tensor, ...]:
        try:
            return compiled(*channels)
        except Exception as error:
            raise why_not(error) from error

    return run


def _is_state(guard: str, watch: Sequence[str]) -> bool:
    """Whether a guard, by its name, is about state that a user's function reads: its own, or its module's globals."""
    ours = ("G['__import_torch", "G['__import_compiled_adv", "G['__builtins")
    return bool(watch) and (
        any(name in guard for name in watch) or guard.startswith("G['__") and not guard.startswith(ours)
    )


def _keep_row_values(graph: fx.GraphModule) -> int:
    """Return the per-row values too, after the graph's own outputs, whose number this gives.

    Inductor would otherwise compute a score, a mean or a divisor again in every vector of the row that reads it.
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    own = output.args[0]
    rows: list[fx.Node] = []
    nested = 0  # inside torch.func.vmap a tensor has dims that a graph cannot return
    for node in graph.graph.nodes:
        nested += ("_increment_nesting" in str(node.target)) - ("_decrement_nesting" in str(node.target))
        value = node.meta.get("example_value")
        if nested:
            continue
        if node.op.startswith("call") and isinstance(value, Tensor) and value.ndim == 1 and node not in own:
            columns = [user.meta.get("example_value") for user in node.users]
            if any(isinstance(x, Tensor) and tuple(x.shape) == (len(value), 1) for x in columns):
                rows.append(node)
    output.args = ((*own, *rows),)
    graph.recompile()
    return len(own)


def _below(column: Any, width: Any) -> Any:
    """The bound of a padded shift, compared as int32, sixteen at once. Torch compares int64, eight at once."""
    return ops.lt(ops.index_expr(column, torch.int32), ops.index_expr(width, torch.int32))


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
    """Inductor's on-disk caches in this folder while compiling, if it can be written."""
    if folder is None or not _can_write(folder):
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


def _can_write(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        text = f"compiling without actor.advantage.compiled.cache_dir: {folder} cannot be written ({error})"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False


def graph_error(module: torch.nn.Module, args: Sequence[Any]) -> Exception | None:
    """Why torch cannot capture a module as one graph; None where it can."""

    def run(*channels: Any) -> Any:
        return module(*channels)

    try:
        torch.compile(_with_own_code(run), fullgraph=True, dynamic=False, backend="eager")(*args)
    except Exception as error:
        return error
    return None


def abandon_capture(device: torch.device, pool: Any) -> None:
    """Tell torch's allocator that a capture has failed. To torch before 2.12 one that CUDA itself has spoiled is under
    way for ever, and the process's next torch.cuda.empty_cache() fails."""
    with suppress(Exception):  # it ended as it should
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]


def graphs_captured() -> int:
    """How many graphs Dynamo has captured in this process."""
    return counters["stats"]["unique_graphs"]


# ---- a user's function ----


@dataclass(frozen=True)
class Captured:
    """A function as one graph, for tensors like an example, and the parts of what it computes of the example."""

    graph: fx.GraphModule | None  # None: it computes nothing
    reads: tuple[str, ...]  # the names of the tensors that it reads, or hands on as they are
    result: dict[str, Any]

    @property
    def operations(self) -> tuple[str, ...]:
        return () if self.graph is None else _operations(self.graph)


def capture(fn: Callable[..., dict[str, Any]], example: Sequence[Tensor], names: Sequence[str]) -> Captured:
    """`fn` as a graph of pure torch operations, or NotCaptured. `names`: of the example's tensors, for messages.

    What torch.compile would take though its result is another one, or may be, is found by the graph's own marks:
    writes to an input, random numbers, numbers read on the host, shapes that depend on numbers.
    """
    found: list[tuple[fx.GraphModule, tuple[str, ...]]] = []
    by_id = {id(x): name for x, name in zip(example, names, strict=True)}

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        reads = tuple(by_id.get(id(x), "") for x in inputs)
        found.append((graph, tuple(name for name in reads if name)))
        return _Marks(graph, reads).run

    def run(*tensors: Tensor) -> Any:
        return fn(*tensors)

    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    captured = torch.compile(_with_own_code(run), fullgraph=True, dynamic=False, backend=backend, options=options)
    try:
        # A reason is given once, by us; and what is drawn here is not to change what the function draws later.
        drawn = torch.random.fork_rng([x.device for x in example[:1] if x.device.type == "cuda"])
        with LOCK, _told(), torch.no_grad(), drawn, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = captured(*example)
    except Exception as error:
        raise why_not(error) from error
    graph, reads = found[0] if found else (None, ())
    handed_on = tuple(by_id[id(x)] for x in result.values() if id(x) in by_id)
    return Captured(graph, reads + handed_on, result)


def compile_any_shape(
    fn: Callable[..., Any], example: Sequence[Tensor], *, replace: dict[Any, Any], cache_dir: str | None = None
) -> Callable[..., Any]:
    """`fn` compiled for tensors of any shape, with torch's own guards. It raises where it must be compiled for another
    reason than a shape: what was found out about the first graph holds for the same operations alone."""
    first: list[tuple[str, ...]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        first.append(_operations(graph))
        if first[-1] != first[0]:
            raise NotCaptured("what it computes changes with what it reads beside its arguments")
        _put_native(graph, replace)
        with _cache(cache_dir):
            return compile_fx(graph, inputs)

    def run(*tensors: Tensor) -> Any:
        return fn(*tensors)

    compiled = torch.compile(_with_own_code(run), fullgraph=True, backend=backend)
    for x in example:  # dynamic=True would make inputs of Python's floats as well
        for dim in range(x.ndim):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    with LOCK, torch.no_grad():
        compiled(*example)
    return compiled


def _operations(graph: fx.GraphModule) -> tuple[str, ...]:
    """What a graph does to tensors; arithmetic of sizes is left out."""
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    return tuple(str(node.target) for node in calls if isinstance(node.meta.get("example_value"), Tensor))


class _Marks(fx.Interpreter):
    """Runs a captured graph, and stops where it is not pure."""

    TAGS = {
        torch.Tag.nondeterministic_seeded: (
            "it draws random numbers",
            "numbers from a seed of its own, made at import",
        ),
        torch.Tag.data_dependent_output: ("it reads a number on the host", "a 0-d tensor: x.max(), not x.max().item()"),
        torch.Tag.dynamic_output_shape: (
            "a shape depends on numbers",
            "torch.where(mask, x, 0.0) instead of x[mask]",
        ),
    }

    def __init__(self, graph: fx.GraphModule, names: Sequence[str]) -> None:
        super().__init__(graph)
        self.names = names

    def run(self, *inputs: Any, **_: Any) -> Any:
        tensors = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        self.watched = [(name, x, x._version) for name, x in zip(self.names, tensors, strict=True) if name]
        with _Tags() as self.tags:
            return super().run(*tensors)

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        for tag in self.tags.found & self.TAGS.keys():
            what, hint = self.TAGS[tag]
            raise NotCaptured(what, users_line(node.stack_trace or ""), hint)
        for name, x, version in self.watched:
            if x._version != version:
                hint = "return new tensors; clone before writing"
                raise NotCaptured(f"it writes to its input '{name}'", users_line(node.stack_trace or ""), hint)
        return result


class _Tags(TorchDispatchMode):
    """The tags of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.Tag] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # aten.index changes its shape with numbers only where an index is a mask
        by_place = operator is torch.ops.aten.index.Tensor and not any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        self.found.update(() if by_place else operator.tags)
        return operator(*args, **(kwargs or {}))


@contextmanager
def _told() -> Iterator[None]:
    """While capturing: a function that changes Python objects outside itself is refused, and what depends on numbers
    reaches the graph, where our marks find it."""
    config: Any = torch._dynamo.config
    replay = "side_effect_replay_policy"
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        if hasattr(config, replay):
            with config.patch(**{replay: "error"}):
                yield
        else:  # torch before 2.11 replays such changes without a word
            with patch.object(SideEffects, "codegen_update_mutated", _refuse_changes):
                yield


def _refuse_changes(effects: Any, _: Any) -> None:
    changed = [x for x in effects._get_modified_vars() if type(x.mutation_type).__name__.endswith("MutationExisting")]
    if changed:
        names = ", ".join(sorted(str(x.source.name()) for x in changed))
        raise NotCaptured(f"it changes what lies outside it: {names}", hint="return what is to be kept")


def why_not(error: BaseException) -> NotCaptured:
    """The reason in torch's error: ours, if it wraps one; else its name of it, the user's line and the first hint."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotCaptured):
            return cause
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    text = str(error)
    if changed := re.search(r"certain side effects happened.*: \[(.*)\]", text):
        names = re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), changed[1].strip("\"'"))
        return NotCaptured(f"it changes what lies outside it: {names}", hint="return what is to be kept")
    what = getattr(error, "gb_type", None) or text.strip().split("\n")[0] or type(error).__name__
    if what == "Observed exception" and (raised := re.search(r"raised exception (.*)", text)):
        return NotCaptured(f"it raises {raised[1]}", users_line(text))
    hint = re.search(r"Hint: (.*)", text)
    return NotCaptured(what, users_line(text), hint[1].strip() if hint else "")


def users_line(stack: str) -> str:
    """The innermost line of a stack trace in text that is neither torch's nor ours, as file:line."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    lines = re.findall(r'File "([^"]+)", line (\d+)', stack)
    users = [f"{Path(file).name}:{line}" for file, line in lines if not file.startswith(ours)]
    return users[-1] if users else ""
