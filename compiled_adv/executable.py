"""Takes a Program (and a Bucket); gives an Executable: an admitted batch in, computed outputs and raised flags out.

`EagerExecutable` runs the segments as they are, at the batch's own shape. `CompiledExecutable` runs them compiled for
one bucket: channels are padded in, outputs cropped out, and a user's function between two segments sees exact shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import MappingProxyType

import torch
from torch import Tensor, fx

from compiled_adv import kernels
from compiled_adv.admit import Admitted
from compiled_adv.bucket import Bucket, crop, pad_channel
from compiled_adv.channel import FACTS, INPUTS, base
from compiled_adv.cudagraph import Graph, NotGraphed, device_of
from compiled_adv.errors import CompileFailed
from compiled_adv.inductor import Compiled, compile_graph, graph_error
from compiled_adv.memory import POOL
from compiled_adv.pipeline import Node, flag_name
from compiled_adv.program import Program, Segment, StageModule
from compiled_adv.stage import Stage
from compiled_adv.stages.plugin import Traced
from compiled_adv.stages.statistics import AcrossRanks
from compiled_adv.status import raise_errors, union

BLOCK = 1 << 18  # tokens of the rows that run at once, for each thread
WHOLE = {name for name, channel in INPUTS.items() if channel.dims == "S"}  # not one entry for each row

Flags = dict[str, list[int]]
Step = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]


@dataclass(frozen=True)
class EagerExecutable:
    """The Program, uncompiled. What takes each row by itself runs on a few rows at a time."""

    program: Program

    def run(self, admitted: Admitted) -> tuple[dict[str, Tensor], Flags]:
        """Outputs by name, and flags by name with their rows. A segment's errors stop what follows it.

        With the flag `invalid` there is no output: a check failed, and the Program as wired says which.
        """
        steps: list[Step | Graph | None] = [_eager_step(segment) for segment in self.program.segments]
        env, flags = _run(self.program, steps, admitted, None)
        return {} if "invalid" in flags else {name: env[version] for name, version in self.program.outputs}, flags


class CompiledExecutable:
    """The Program compiled for one bucket."""

    def __init__(self, program: Program, bucket: Bucket, example: Mapping[str, Tensor], cache_dir: str | None) -> None:
        """`example`: input channels at the bucket's shape. Compiles every segment."""
        self.program, self.bucket = program, bucket
        env = dict(example)
        self._steps: list[Step | Graph | None] = []
        for segment in program.segments:
            if isinstance(segment.module, Node):
                self._steps.append(None)
                env.update(_blanks(segment, bucket, env))
                continue
            inputs = [env[version] for version in segment.inputs]
            compiled = _compile(segment, inputs, cache_dir)
            self._steps.append(_compiled_step(compiled))
            env.update(zip(segment.outputs, compiled(*inputs), strict=False))

    def capture(self, example: Mapping[str, Tensor], *, views: bool = False) -> None:
        """From now on replay every segment as a CUDA graph; NotGraphed, and nothing has changed, if one cannot be.

        `views`: outputs are lent until the next call.
        """
        device, env = device_of(next(iter(example.values())).device), dict(example)
        graphs: list[Step | Graph | None] = []
        for segment, step in zip(self.program.segments, self._steps, strict=True):
            if step is None or isinstance(step, Graph):
                graphs.append(step)
                env.update(_blanks(segment, self.bucket, env))
                continue
            if _watched(segment):
                raise NotGraphed("a user's function inside is compiled anew when what it reads changes")
            inputs = [env[version] for version in segment.inputs]
            graphs.append(Graph(step, segment.inputs, inputs, self.bucket, device, views=views))
            env.update(zip(segment.outputs, step(inputs), strict=False))  # type: ignore[arg-type]
        self._steps = graphs

    @property
    def graphed(self) -> bool:
        """Whether calls replay CUDA graphs."""
        return any(isinstance(step, Graph) for step in self._steps)

    def run(self, admitted: Admitted) -> tuple[dict[str, Tensor], Flags]:
        """As EagerExecutable.run. No output shares memory with a later call's."""
        env, flags = _run(self.program, self._steps, admitted, self.bucket)
        if "invalid" in flags:
            return {}, flags
        outputs = {name: env[version] for name, version in self.program.outputs}
        if self.graphed:
            return {name: self._own(x, admitted) for name, x in outputs.items()}, flags
        if (self.bucket.rows, self.bucket.tokens) != (admitted.rows, admitted.tokens):
            outputs = {name: copy(crop(x, admitted.rows, admitted.tokens, self.bucket)) for name, x in outputs.items()}
        return outputs, flags

    def _own(self, x: Tensor, admitted: Admitted) -> Tensor:
        """The caller's part of what a graph gave: it has been cropped and copied unless a later segment read it too."""
        part = crop(x, admitted.rows, admitted.tokens, self.bucket)
        return x if part.shape == x.shape else copy(part)


def _run(
    program: Program, steps: Sequence[Step | Graph | None], admitted: Admitted, bucket: Bucket | None
) -> tuple[dict[str, Tensor], Flags]:
    """Every segment in turn; what no later one needs is dropped at once. Graphs take channels as they came."""
    env = {name: admitted.channels[name] for name in program.inputs}
    graphed = any(isinstance(step, Graph) for step in steps)
    if admitted.device.type != "cpu" and not graphed:
        env = {name: x.to(admitted.device) for name, x in env.items()}
    if bucket is not None and not graphed:
        fits = (bucket.rows, bucket.tokens) == (admitted.rows, admitted.tokens)
        env = {name: x.contiguous() if fits else pad_channel(name, x, bucket) for name, x in env.items()}
    flags: Flags = {}
    kept = {version for _, version in program.outputs}
    for segment, step, later in zip(program.segments, steps, program.read_after, strict=True):
        if step is None:
            env.update(zip(segment.outputs, _between(segment, admitted, env, bucket), strict=True))
        else:
            inputs = [env[v] for v in segment.inputs]
            if isinstance(step, Graph):
                size = (admitted.rows, admitted.tokens)
                sizes = [None if v in later else size for v in segment.outputs]
                *results, bits = step(inputs, [*sizes, None])
            else:
                *results, bits = step(inputs)
            if raised := _raised(segment, bits, admitted):
                flags = union(flags, raised)
            if "invalid" in flags:  # first: an error with a name of its own may be but a part of what is wrong
                return {}, flags
            if segment.closes and flags:
                raise_errors(flags)
            env.update(zip(segment.outputs, results, strict=True))  # type: ignore[arg-type]
        for version in [v for v in env if v not in kept and v not in later]:
            del env[version]
    return env, flags


def _eager_step(segment: Segment) -> Step | None:
    module = segment.module
    if isinstance(module, Node):
        return None
    return lambda inputs: _in_blocks(segment, inputs) if segment.by_rows else module(*inputs)


def _in_blocks(segment: Segment, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """A segment on so few rows at a time that what lies between its stages stays in the cache."""
    assert isinstance(segment.module, fx.GraphModule)
    cut = [x.ndim > 0 and base(name) not in WHOLE for name, x in zip(segment.inputs, inputs, strict=True)]
    rows = max(len(x) for x, is_cut in zip(inputs, cut, strict=True) if is_cut)
    tokens = max(x.numel() for x in inputs) // rows
    at_once = max(1, BLOCK * torch.get_num_threads() // max(1, tokens))
    if at_once >= rows or inputs[0].device.type != "cpu":
        return segment.module(*inputs)
    whole: list[Tensor] = []
    raised = []
    for start in range(0, rows, at_once):
        block = slice(start, start + at_once)
        *results, flags = segment.module(*(x[block] if is_cut else x for x, is_cut in zip(inputs, cut, strict=True)))
        whole = whole or [POOL.empty((rows, *x.shape[1:]), x.dtype) for x in results]
        for x, part in zip(whole, results, strict=True):
            x[block] = part
        raised.append(flags)
    return *whole, None if raised[0] is None else torch.cat(raised)


def _compiled_step(compiled: Compiled) -> Step:
    return lambda inputs: compiled(*inputs)


def _watched(segment: Segment) -> bool:
    """Whether a user's function runs inside."""
    assert isinstance(segment.module, fx.GraphModule)
    return any(isinstance(m, StageModule) and isinstance(m.stage, Traced) for m in segment.module.children())


def _compile(segment: Segment, inputs: Sequence[Tensor], cache_dir: str | None) -> Compiled:
    assert isinstance(segment.module, fx.GraphModule)
    operators = kernels.native(inputs[0].device)
    watch = Traced.STATE if _watched(segment) else ()
    try:
        return compile_graph(segment.module, inputs, replace=operators, cache_dir=cache_dir, watch=watch)
    except Exception as error:
        stage, cause = _culprit(segment.module, inputs)
        at = None if stage is None else stage.slot or type(stage).__name__
        what = f"{stage or 'the Program'} does not compile"
        hint = "actor.advantage.compiled.on_compile_error: eager, or backend: eager"
        found = str(cause or error).strip().splitlines()[0] if str(cause or error).strip() else type(error).__name__
        raise CompileFailed(what, at=at, found=found, hint=hint) from error


def _culprit(module: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[Stage | None, Exception | None]:
    """The first stage that torch cannot capture alone, and why; none where only the compiler behind it failed."""
    found: list[tuple[Stage, Exception]] = []

    class Search(fx.Interpreter):
        def call_module(self, target, args, kwargs):
            wrapped = self.fetch_attr(target)
            if not found and isinstance(wrapped, StageModule) and (cause := graph_error(wrapped, args)) is not None:
                found.append((wrapped.stage, cause))
            return super().call_module(target, args, kwargs)

    try:
        Search(module).run(*inputs)
    except Exception as error:
        return found[0] if found else (None, error)
    return found[0] if found else (None, None)


def _blanks(segment: Segment, bucket: Bucket, env: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a collective or a user's function may give at a bucket's shape, to compile what follows it."""
    node = segment.module
    assert isinstance(node, Node)
    if isinstance(node.stage, AcrossRanks):
        return dict(zip(node.writes, (env[v] for v in node.reads if v is not None), strict=True))
    device = next(iter(env.values())).device
    per_row = ("rewards", "references", "gae_lambda")
    shapes = {v: bucket.shape("B" if base(v) in per_row else "BT") for v in node.writes}
    return {v: torch.zeros(shape, dtype=torch.float32, device=device) for v, shape in shapes.items()}


def _between(
    segment: Segment, admitted: Admitted, env: Mapping[str, Tensor], bucket: Bucket | None
) -> Sequence[Tensor]:
    """A collective; or a user's function on exact channels, once for each call, its results padded into the bucket."""
    node = segment.module
    assert isinstance(node, Node)
    if isinstance(node.stage, AcrossRanks):
        return node.stage.call(admitted, [env[v] for v in node.reads if v is not None])
    by_channel = {name.removesuffix("?"): version for name, version in zip(node.stage.reads, node.reads, strict=True)}

    def channel(name: str) -> Tensor | None:
        version = by_channel[name]
        if version is None or bucket is None:
            return None if version is None else env[version]
        return crop(env[version], admitted.rows, admitted.tokens, bucket).to(admitted.device)

    if node.name not in admitted.answers:
        admitted.answers[node.name] = node.stage.call(admitted, channel)  # type: ignore[attr-defined]
    results = admitted.answers[node.name]
    if bucket is None:
        return results
    return [pad_channel(version, x, bucket) for version, x in zip(segment.outputs, results, strict=True)]


def _raised(segment: Segment, bits: Tensor | None, admitted: Admitted) -> Flags:
    """Rows of each flag that a segment raised, in one copy to the host with what is left to check of the batch."""
    if bits is None:
        return {}
    if bits.device.type != "cpu":
        late = [bad_B.to(torch.int64) for _, bad_B in admitted.late]
        both = torch.stack([bits[: admitted.rows], *late]).cpu()
        admitted.raise_late(both[1:])
        bits = both[0]
    words = bits.tolist()[: admitted.rows]
    if not any(words):
        return {}
    any_row = reduce(or_, words)
    raised = (i for i in range(len(segment.flags)) if any_row >> i & 1)
    return union(*({flag_name(segment.flags[i]): [r for r, word in enumerate(words) if word >> i & 1]} for i in raised))


def copy(x: Tensor) -> Tensor:
    """The same numbers in memory of their own."""
    return POOL.empty(x.shape, x.dtype).copy_(x) if x.device.type == "cpu" else x.clone()


def example_channels(
    names: Sequence[str],
    bucket: Bucket,
    device: torch.device,
    mask_dtype: torch.dtype,
    rollout: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Input channels of a bucket's shape that hold empty rows alone, to compile with. `rollout`: its tensors, blank."""
    blank = {}
    for name in names:
        if name.startswith("data:"):
            blank[name] = rollout[name[5:]]
            continue
        known = INPUTS[name]
        shape = bucket.shape(known.dims) if known.dims != "S" else (known.size,)
        dtype = mask_dtype if name == "loss_mask" else known.dtype
        blank[name] = torch.full(shape, known.pad, dtype=dtype, device=device)
    blank["facts"][FACTS.index("tokens")] = bucket.tokens  # columns are counted from here: 0 would point outside
    return blank
