"""Takes the stages of a Pipeline that are users' functions; gives each its place in the compiled backend, and why.

    program    pad-safe, and torch can trace it: a stage of the Program like any other
    compiled   torch can trace it, but it must see exact shapes: between two segments, compiled for any shape
    eager      between two segments, as it is

A function is captured alone, on a few rows and tokens (inductor.capture), so that a reason names it and its line. What
was declared pad-safe, or compiled, is checked on the first batch of its kind against what the function gave for it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.arguments import PER_ROW, SMALL, Form, Rollout, blank_inputs, form_of
from compiled_adv.equality import unequal
from compiled_adv.errors import PadUnsafe, PluginSplits
from compiled_adv.gae import BUILT_IN_LAMBDAS
from compiled_adv.inductor import Captured, NotCaptured, compile_any_shape, why_not
from compiled_adv.pipeline import FLAG, Node, Pipeline
from compiled_adv.plugins import is_pad_safe
from compiled_adv.resolve import Place, Plugin
from compiled_adv.stages.plugin import COMPUTED, ComputePlugin, LambdaPlugin, OutcomePlugin, PluginStage, Traced, origin

# What a claim is checked with: the first batch with so many rows and tokens of padding.
MORE_ROWS, MORE_TOKENS = 3, 5

PAD_SAFE = "@compiled_adv.pad_safe, if padding does not change its result"

MOST_FORMS = 4  # signatures of inputs for which one function is compiled

# ---- the place of one function ----


def find_place(form: Form) -> tuple[Place, Captured | None]:
    """Where a function may run, and its graph on a small batch, if there is one."""
    stage, defined = form.stage, _defined(form.stage.plugin)
    try:
        first, second = (form.captured(form.sized(*size)) for size in SMALL)
        _check_result(form, first)
    except NotCaptured as error:
        return Place("eager", error.what, error.line or defined, error.hint), None
    if first.operations != second.operations:
        hint = "operations on whole tensors; compiled_adv.discounted_sum for a recurrence over tokens"
        return Place("eager", "its graph grows with the batch", defined, hint), None
    if "normalization_rewards" in first.result:
        why = "it returns normalization_rewards, whose number is the batch's own"
        return Place("compiled", why, defined), first
    if not is_pad_safe(stage.plugin.fn):
        where = "eager" if isinstance(stage, LambdaPlugin) else "compiled"  # one number a row: nothing to gain
        return Place(where, "it is not declared pad-safe", defined, PAD_SAFE), first
    return Place("program", line=defined), first


def _check_result(form: Form, captured: Captured) -> None:
    """Every part must be a tensor of rows, or of rows and tokens; what else is wrong, its first call says."""
    for name, x in captured.result.items():
        per_row = name in PER_ROW or name.endswith(("normalization_rewards", "is_truncated"))
        fits = isinstance(x, Tensor) and x.shape == SMALL[0][: 1 if per_row else 2]
        if not fits or x.is_complex() or x.layout != torch.strided:
            raise NotCaptured(f"'{name}' of its result is not as documented")


class Exact:
    """A function compiled for any shape. It gives up for good on inputs for which that fails."""

    def __init__(self, stage: PluginStage, place: Place, cache_dir: str | None) -> None:
        self._stage, self._place, self._cache_dir = stage, place, cache_dir
        self._compiled: dict[Hashable, tuple[tuple[str, ...], Callable[..., Any]] | None] = {}

    def __call__(self, inputs: Any) -> Any:
        """The function's result, or None: call it as it is."""
        form = form_of(self._stage, inputs)
        try:
            made = self._made(form)
            if made is None:
                return None
            names, compiled = made
            return self._stage.whole(compiled(*(form.tensors[name].contiguous() for name in names)))
        except Exception as error:
            self.give_up(form, error)
            return None

    def prepare(self, form: Form) -> None:
        """Compile for inputs of this form."""
        try:
            self._made(form)
        except Exception as error:
            self.give_up(form, error)

    def give_up(self, form: Form, error: Exception) -> None:
        self._compiled[form.signature] = None
        why = why_not(error)
        self._place.where, self._place.why, self._place.hint = "eager", why.what, why.hint
        self._place.line = why.line or self._place.line

    def _made(self, form: Form) -> tuple[tuple[str, ...], Callable[..., Any]] | None:
        """Which tensors it takes, and the compiled function; of the rollout it takes what it reads alone."""
        if form.signature not in self._compiled and len(self._compiled) < MOST_FORMS:
            placed, captured = find_place(form)
            if captured is None or placed.where == "eager":
                raise NotCaptured(placed.why, placed.line, placed.hint)
            names = tuple(n for n in form.tensors if not n.startswith("data:") or n in captured.reads)
            device = next(iter(form.tensors.values())).device
            small = form.sized(*SMALL[0])
            example = [small[name] for name in names]
            operators = kernels.native(device)
            run = compile_any_shape(form.function(names), example, replace=operators, cache_dir=self._cache_dir)
            self._compiled[form.signature] = names, run
        return self._compiled.get(form.signature)


# ---- all functions of a configuration ----


@dataclass
class Watch:
    """A function that notes what it was given and gave."""

    fn: Callable[..., Any]
    seen: list[tuple[Any, Any]] = field(default_factory=list)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        result = self.fn(inputs, **kwargs)
        self.seen.append((inputs, result))
        return result


def watched(pipeline: Pipeline) -> tuple[Pipeline, dict[str, tuple[PluginStage, Watch]]]:
    """The Pipeline with every user's function watched; and each stage as it was, with its watch, by node."""
    nodes, found = [], {}
    for node in pipeline.nodes:
        if isinstance(node.stage, PluginStage):
            stage, watch = node.stage, Watch(node.stage.plugin.fn)
            found[node.name] = stage, watch
            node = replace(node, stage=replace(stage, plugin=replace(stage.plugin, fn=watch)))  # type: ignore[type-var]
        nodes.append(node)
    return replace(pipeline, nodes=tuple(nodes)), found


def whole_computation(plugin: Plugin, mode: str) -> Pipeline:
    """The Pipeline of a replacement of the whole computation: one stage."""
    node = Node("ComputePlugin", ComputePlugin(plugin, mode), ("gvpo",), COMPUTED)
    return Pipeline((node,), ("facts", "gvpo"), tuple((name, name) for name in COMPUTED))


def with_extras(pipeline: Pipeline, *, decoupled: bool) -> Pipeline:
    """The same with what its function turned out to give; outside decoupled loss prox_logp is its logprobs."""
    outputs = {version.removeprefix("extras."): version for node in pipeline.nodes for version in node.writes}
    if not decoupled:
        outputs.setdefault("prox_logp", "logprobs")
    return replace(pipeline, outputs=tuple(outputs.items()))


@dataclass(frozen=True)
class Found:
    """What was found out about one function for one kind of batch."""

    place: Place
    form: Form | None = None
    captured: Captured | None = None
    exact: Exact | None = None


class Placing:
    """Where each user's function runs, decided once per kind of batch."""

    def __init__(self, mode: str, cache_dir: str | None) -> None:
        self._mode, self._cache_dir = mode, cache_dir
        self._found: dict[tuple[Hashable, str], Found] = {}

    def placed(
        self,
        kind: Hashable,
        pipeline: Pipeline,
        given: Mapping[str, Any],
        rollout: Rollout | None,
        config: Any,
        *,
        may_split: bool = False,
    ) -> Pipeline:
        """The Pipeline with every user's function in its place, or the error that one cannot be where it is required.

        `given`: what a function got, by node, where that is known. `may_split`: whatever is required.
        """
        nodes = []
        for node in pipeline.nodes:
            if isinstance(node.stage, PluginStage):
                if (kind, node.name) not in self._found:
                    self._found[kind, node.name] = self._find(node, node.stage, given, rollout, config)
                found = self._found[kind, node.name]
                if self._mode == "require" and found.place.where != "program" and not may_split:
                    raise _splits(node.stage.plugin, found.place)
                node = self._node(node, node.stage, found, config)
            nodes.append(node)
        read = {v for node in nodes for v in node.reads if v is not None and v.startswith("data:")}
        return replace(pipeline, nodes=tuple(nodes), inputs=(*pipeline.inputs, *sorted(read)))

    def warm(self, kind: Hashable) -> None:
        """Compile what would be compiled by the first call."""
        for (known, _), found in self._found.items():
            if known == kind and found.exact is not None and found.form is not None:
                found.exact.prepare(found.form)

    def move_out(self, kind: Hashable, why: str) -> bool:
        """No function of this kind is to be part of the Program any longer; False if none was."""
        inside = [at for at, found in self._found.items() if at[0] == kind and found.place.where == "program"]
        for at in inside:
            self._found[at] = Found(Place("eager", why, self._found[at].place.line))
        return bool(inside)

    def check(self, kind: Hashable, name: str, stage: PluginStage, inputs: Any, result: Any) -> None:
        """Hold a function's place against what it gave for the first batch of a kind."""
        found = self._found[kind, name]
        if found.place.where == "eager":
            return
        form, expected = form_of(stage, inputs), stage.parts(result)
        if found.place.where == "program":
            try:
                padded = form.captured(form.padded(MORE_ROWS, MORE_TOKENS)).result
            except NotCaptured as error:
                self._found[kind, name] = Found(Place("eager", error.what, error.line or found.place.line, error.hint))
                return
            if different := _difference(padded, expected):
                what = "a function declared pad-safe gives another result for a padded batch"
                hint = "drop @compiled_adv.pad_safe, or read the masks: padding is zeros, masks are 0"
                raise PadUnsafe(what, at=f"{origin(stage.plugin)} ({found.place.line})", found=different, hint=hint)
        elif found.exact is not None and (compiled := found.exact(inputs)) is not None:
            if different := _difference(stage.parts(compiled), expected):
                found.exact.give_up(form, NotCaptured(f"compiled, it gives another result: {different}"))

    def _find(
        self, node: Node, stage: PluginStage, given: Mapping[str, Any], rollout: Rollout | None, config: Any
    ) -> Found:
        if self._mode == "never":
            return Found(Place("eager", "plugins: never", _defined(stage.plugin)))
        inputs = given[node.name] if node.name in given else blank_inputs(node, rollout, config)
        form = form_of(stage, inputs)
        if rollout is not None:
            form = replace(form, largest=rollout.largest)
        found, captured = find_place(form)
        exact = Exact(stage, found, self._cache_dir) if found.where == "compiled" else None
        return Found(found, form.small, captured, exact)

    def _node(self, node: Node, stage: PluginStage, found: Found, config: Any) -> Node:
        if found.place.where == "program":
            assert found.captured is not None and found.form is not None
            return _traced(node, stage, found.form, found.captured, config)
        plugin = replace(stage.plugin, place=found.place, exact=found.exact)
        return replace(node, stage=replace(stage, plugin=plugin))  # type: ignore[type-var]


def check_required(plugins: Iterable[Plugin | None]) -> None:
    """Where all must be part of the Program: refuse, at build, those that are not even declared pad-safe."""
    for plugin in plugins:
        if plugin is not None and plugin.fn not in BUILT_IN_LAMBDAS and not is_pad_safe(plugin.fn):
            raise _splits(plugin, Place("compiled", "it is not declared pad-safe", _defined(plugin), PAD_SAFE))


def _splits(plugin: Plugin, found: Place) -> PluginSplits:
    what = "a function splits the Program, which plugins: require forbids"
    where = f"{origin(plugin)} ({found.line})"
    return PluginSplits(what, at=where, found=found.why, hint=found.hint or "plugins: auto")


def _traced(node: Node, stage: PluginStage, form: Form, captured: Captured, config: Any) -> Node:
    """The function as a stage of the Program."""
    keys = tuple(name[5:] for name in captured.reads if name.startswith("data:"))
    taken = "rewards" if isinstance(stage, OutcomePlugin) and stage.penalised else None
    keys = tuple(key for key in keys if key != taken)
    known = {name[5:] for name in form.tensors if name.startswith("data:")}
    hidden = tuple(sorted((known | {*form.hidden}) - {*keys, taken}))
    prompt = ("group_of_row",) if form.largest and form.meta else ()
    gives = tuple(captured.result)
    writes = gives if isinstance(stage, ComputePlugin) else node.writes
    reads = ("facts", *node.reads, *prompt, *(f"data:{key}" for key in keys))
    made = Traced(stage.plugin, stage, config, gives, keys, hidden, form.meta, form.largest)
    return Node(node.name, made, reads, writes, (f"{FLAG}invalid.{node.name}",))


def _difference(got: Mapping[str, Tensor], expected: Mapping[str, Any]) -> str:
    """The first place where two results are not the same to rounding; empty where they are."""
    if got.keys() != expected.keys():
        return f"{', '.join(got)}, not {', '.join(expected)}"
    for name, want in expected.items():
        have = got[name]
        if have.ndim != want.ndim or any(h < w for h, w in zip(have.shape, want.shape, strict=True)):
            return f"{name} of shape {list(have.shape)}, not {list(want.shape)}"
        have = have[tuple(slice(size) for size in want.shape)]
        wrong = unequal(have, want)
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            return f"{name} {at}: {float(have[tuple(at)])}, not {float(want[tuple(at)])}"
    return ""


def _defined(plugin: Plugin) -> str:
    """Where a function is written, as file:line."""
    code = getattr(getattr(plugin.fn, "__wrapped__", plugin.fn), "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code is not None else ""
