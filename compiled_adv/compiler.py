"""Takes a config; gives the callable that turns rollouts into advantages. The composition root.

config --parse--> Spec --wire--> Pipeline --lower--> Program --> Executable --run--> outputs
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor

from compiled_adv import reference
from compiled_adv.admit import Admission, Admitted, legal_modes, mask_as, read_keys
from compiled_adv.arguments import Rollout, blank_rollout, rollout_of
from compiled_adv.batch import as_meta, concat_batch, split_batch
from compiled_adv.bucket import LEAST_TOKENS, Bucket, Ladder, ascending, rungs
from compiled_adv.cache import Cache
from compiled_adv.channel import OPTIONAL, OUTPUTS
from compiled_adv.cudagraph import NotGraphed, is_cuda
from compiled_adv.distributed import Meeting, ranks_of
from compiled_adv.equality import unequal
from compiled_adv.errors import (
    BuildFailed,
    CompileFailed,
    CompilerMissing,
    Forked,
    InvalidValue,
    NotCapturable,
    NotWarm,
    ResultsDiffer,
    UnknownName,
    suggest,
)
from compiled_adv.executable import CompiledExecutable, EagerExecutable, example_channels
from compiled_adv.inductor import NotCaptured
from compiled_adv.passes import DEFAULT
from compiled_adv.pipeline import Pipeline, meeting_points, wire
from compiled_adv.placing import (
    Placing,
    check_required,
    watched,
    whole_computation,
    with_extras,
)
from compiled_adv.plugins import is_pad_safe
from compiled_adv.program import Program, lower
from compiled_adv.resolve import Plugin, resolve_pass, resolve_spec
from compiled_adv.rewrite import Pass, RewriteLog, rewrite
from compiled_adv.shadow import shadow_of
from compiled_adv.show import explain_json, explain_text
from compiled_adv.spec import Backend, Spec, load_config
from compiled_adv.stages.plugin import PluginStage, call_compute
from compiled_adv.stats import Stats
from compiled_adv.status import raise_errors, warn
from compiled_adv.verify import verify


class Compute:
    """Advantages of a batch, by one configuration. Build it with `compiled_adv.build`."""

    def __init__(self, spec: Spec, reduce_group: Any = None) -> None:
        self.spec = spec
        self._ranks = ranks_of(reduce_group, meeting_points(spec))
        self.last_warnings: dict[str, list[int]] = {}
        self.cache = Cache(spec.advantage.compiled.max_buckets)
        self._resolved = resolve_spec(spec)
        self._admit = Admission(spec, self._resolved)
        self._ladder = ladder(spec)
        self._passes = find_passes(spec)
        self._warned: set[str] = set()
        self._stats = Stats(measures=spec.advantage.stats and not spec.override)
        self._shadow = shadow_of(spec, self._resolved, self._run)
        self._eager: dict[Kind, EagerExecutable] = {}
        self._programs: dict[Kind, Program] = {}
        self._unverified: dict[Kind, int] = {}
        self._uncompiled: set[Kind] = set()
        self._placing = Placing(spec.advantage.compiled.plugins, spec.advantage.compiled.cache_dir)
        if spec.advantage.compiled.plugins == "require":
            named = self._resolved
            shaping = named.process if isinstance(named.process, Plugin) else None
            check_required((named.compute, named.outcome, named.estimator, shaping, named.lambda_fn))
        self._known: set[Kind] = set()  # kinds whose first batch has shown what users' functions get and give
        self._frozen = False
        self._process: int | None = None  # the first to compute
        self._lock = threading.Lock()
        self._mask_dtype: torch.dtype | None = None  # of the first batch; others are cast to it

    def __call__(self, batch: Mapping[str, Any], meta: Any = None, **per_call: Any) -> dict[str, Any]:
        """One padded batch -> a new dict: the batch's own entries, and every computed channel as a new tensor.

        Raises a CompiledAdvError before or after the work; the batch is never written to. `per_call`:
        advantage_shaping_mode, gvpo_negative_scale, gvpo_zero_penalty, gvpo_zero_eps.

        With a reduce_group all its ranks call this in the same order, and what is raised on one is raised on all.
        """
        with self._meeting() as meeting:
            return self._compute(batch, meta, per_call, meeting)

    def compute_advantages(self, rollouts: Sequence[Mapping[str, Any]], **per_call: Any) -> list[dict[str, Any]]:
        """One dict per prompt -> one dict per prompt, computed as one batch."""
        with self._meeting() as meeting:
            batch, meta = concat_batch(rollouts)
            return split_batch(self._compute(batch, meta, per_call, meeting), meta)

    def join(self) -> None:
        """Take part in one call of the other ranks of the reduce_group without a batch of one's own."""
        with self._meeting():
            pass

    def _meeting(self) -> AbstractContextManager[Meeting | None]:
        return nullcontext() if self._ranks is None else self._ranks.meeting()

    def _compute(
        self, batch: Mapping[str, Any], meta: Any, per_call: Mapping[str, Any], meeting: Meeting | None
    ) -> dict[str, Any]:
        start = time.perf_counter()
        self._check_fork()
        call = self._admit.call(per_call)
        with _plain_torch(batch):
            admitted = self._admit(batch, meta, call)
            if meeting is not None:
                admitted = replace(admitted, meeting=meeting)
            computed, flags = self._run_override(admitted) if self._resolved.compute else self._run(admitted)
            admitted.raise_late()
            raise_errors(flags)
            self.last_warnings = warn(flags, self._warned) if flags else {}
            self._stats.count(time.perf_counter() - start, self.last_warnings, computed.pop("stats", None))
            if self._shadow is not None:
                self._shadow.see(admitted, computed)
            return _packed(admitted, computed)

    def warmup(
        self,
        example: Mapping[str, Any] | None = None,
        meta: Any = None,
        *,
        channels: Sequence[str] = OPTIONAL,
        device: torch.device | str = "cpu",
        freeze: bool = False,
        progress: Callable[[list[Any]], Iterable[Any]] = iter,
    ) -> None:
        """Compile every declared bucket, or the example's own, for all per-call modes that this configuration allows.

        `example`: a batch whose keys say which optional channels will come, with its metadata; or name them in
        `channels`, and the batches' `device`. `freeze`: from then on a missing executable is an error, or runs eager by
        `on_missing`.
        """
        self._frozen = False
        if backend_of(self.spec) != "compiled":
            return
        optional = tuple(channels) if example is None else tuple(key for key, x in example.items() if x is not None)
        carried = read_keys(optional, self.spec, self._resolved)
        found = (x.device for x in (example or {}).values() if isinstance(x, Tensor))
        device = next(found, None) or torch.empty(0, device=device).device  # with its index
        mopd = MOPD in optional
        data, meta = blank_rollout(optional, self._reader) if example is None else ({**example}, as_meta(meta))
        whole = self._resolved.compute is not None
        kinds = {
            replace(self._kind(BARE | {*carried}, mode, mopd, data, meta), whole=whole)
            for mode in legal_modes(self.spec, self._resolved)
        }
        mask = (example or {}).get("loss_mask")
        buckets = dict.fromkeys(bucket.on(device) for bucket in self._buckets(mask))
        jobs = [(kind, bucket) for bucket in buckets for kind in sorted(kinds, key=str)]
        self._masks(_program_mask(mask if isinstance(mask, Tensor) else None))
        with _plain_torch(example):
            for kind, bucket in progress(jobs):
                if not whole or self._in_program(kind):
                    self._executable(kind, bucket, device)
                self._placing.warm(kind)
        self._frozen = freeze

    def _buckets(self, mask: Any) -> list[Bucket]:
        """What a warm-up with such a loss mask compiles."""
        if declared := self._ladder.buckets():
            return declared
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return [self._ladder.fit(*mask.shape)]
        what = "warm-up needs declared buckets or an example: buckets: auto has no end"
        hint = "max_rows and max_tokens, or warmup(example=...)"
        raise InvalidValue(what, at=self.spec.at("actor.advantage.compiled.buckets"), hint=hint)

    def explain(self, format: str = "text", channels: Sequence[str] = OPTIONAL, mode: str = "additive") -> Any:
        """What this configuration becomes for a batch with these optional channels: text, or facts for "json"."""
        carried = read_keys(channels, self.spec, self._resolved)
        kind = self._kind(BARE | {*carried}, mode, False, *blank_rollout(channels, self._reader))
        kind = replace(kind, whole=self._resolved.compute is not None)
        pipeline, log = self._rewritten(kind, may_split=True)
        return explain_json(log, lower(pipeline)) if format == "json" else explain_text(log, lower(pipeline))

    def stats(self) -> dict[str, float]:
        """Numbers of the last batch for a trainer's logger; the same names at every step. The first call after a batch
        waits for the device. With ranks they are of this rank's own rows.

        calls, seconds; rows, tokens (generated); groups of several rollouts, the share of them without spread in their
        rewards; shares of truncated rows and of padding; moments of rewards (after shaping, before normalisation), of
        advantages (generated tokens) and of response lengths (generated tokens of a row); mean KL to ref_logp, without
        its weight; explained variance of values; shares of tokens whose advantage process shaping flipped or cleared;
        rows of each warning; the shadow's. NaN where a batch lacks what is measured. Without
        actor.advantage.stats, and where one function replaces the whole computation, what is measured in the batch is
        left out.
        """
        return self._stats.flat() | (self._shadow.flat() if self._shadow is not None else {})

    def _check_fork(self) -> None:
        """OpenMP's threads do not survive a fork: a parallel loop in the child waits for them for ever."""
        self._process = self._process or os.getpid()
        if self._process != os.getpid() and torch.get_num_threads() > 1:
            hint = "start workers with spawn, or torch.set_num_threads(1)"
            raise Forked("this process was forked after its parent had computed", found=f"pid {os.getpid()}", hint=hint)

    def _run(self, admitted: Admitted, backend: str | None = None) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        backend = backend or backend_of(self.spec)
        if backend == "reference":
            data, meta, call = admitted.data, admitted.meta, admitted.call
            return reference.run(self.spec, self._resolved, data, meta, call, admitted.meeting)
        kind = self._kind_of(admitted, backend)
        computed, flags = (self._run_compiled if backend == "compiled" else self._run_eager)(kind, admitted)
        raw = admitted.data["rewards"]
        as_they_came = self._resolved.outcome is None and not self.spec.overlong_reward_penalty
        if as_they_came and not raw.is_floating_point() and raw.dtype != torch.bool:
            computed["rewards"] = raw.detach().clone()
        return computed, flags

    def _run_override(self, admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """A replacement of the whole computation: as a Program where it may be one, else by itself."""
        if backend_of(self.spec) != "compiled":
            return self._override(admitted, self._resolved.compute), {}
        kind = replace(self._kind_of(admitted, "compiled"), whole=True)
        if kind not in self._known:
            return self._run_first(kind, admitted), {}
        if self._in_program(kind):
            return self._run_compiled(kind, admitted)
        return self._override(admitted, self._placed(kind).nodes[0].stage.plugin), {}  # type: ignore[attr-defined]

    def _run_first(self, kind: "Kind", admitted: Admitted) -> dict[str, Tensor]:
        """The first batch of a kind, eager and with users' functions watched: it decides where they run from now on."""
        pipeline, watches = watched(self._wired(kind))
        if kind.whole:
            computed = self._override(admitted, pipeline.nodes[0].stage.plugin)  # type: ignore[attr-defined]
        else:
            computed = EagerExecutable(lower(verify(pipeline))).run(admitted)[0]
        seen = {name: (stage, *watch.seen[-1]) for name, (stage, watch) in watches.items()}
        self._placed(kind, {name: inputs for name, (_, inputs, _) in seen.items()})
        for name, (stage, inputs, result) in seen.items():
            self._placing.check(kind, name, stage, inputs, result)
        self._known.add(kind)
        return computed

    def _run_eager(self, kind: "Kind", admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        if kind.whole:
            return self._override(admitted, self._resolved.compute), {}
        if kind not in self._eager:
            self._eager[kind] = EagerExecutable(lower(verify(self._wired(kind)), by_rows=True))
        return self._eager[kind].run(admitted)

    def _run_compiled(self, kind: "Kind", admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        bucket = self._ladder.fit(admitted.rows, admitted.tokens).on(admitted.device)
        mask = admitted.channels["loss_mask"]
        admitted.channels["loss_mask"] = mask_as(mask, self._masks(mask.dtype))
        expected = None
        if kind not in self._known:
            expected = self._run_first(kind, admitted) if self._has_functions(kind) else None
            self._known.add(kind)
        executable = self._executable(kind, bucket, admitted.device)
        if executable is None:
            self.cache.fell_back()
            return self._run_eager(kind, admitted)
        for name in executable.program.inputs:
            if name.startswith("data:"):
                admitted.channels[name] = admitted.data[name[5:]].detach()
        try:
            computed, flags = executable.run(admitted)
        except NotCaptured as error:  # what a user's function reads beside its arguments has changed
            if not self._move_out(kind, error.what):
                raise
            return self._run_override(admitted) if kind.whole else self._run_compiled(kind, admitted)
        if "invalid" in flags:
            return self._run_eager(kind, admitted)  # raises the named error
        self.cache.served(admitted.rows * admitted.tokens, bucket.rows * bucket.tokens)
        if self._unverified.setdefault(kind, self.spec.advantage.compiled.verify_steps) > 0:
            compare(computed, self._run_eager(kind, admitted)[0] if expected is None else expected)
            self._unverified[kind] -= 1
        return computed, flags

    def _executable(self, kind: "Kind", bucket: Bucket, device: torch.device) -> CompiledExecutable | None:
        """The executable of a bucket, compiled if it is missing; None where the eager path is to serve."""
        settings = self.spec.advantage.compiled

        def make() -> CompiledExecutable | None:
            if self._frozen and settings.on_missing == "error":
                hint = "warm it up, or actor.advantage.compiled.on_missing: eager"
                raise NotWarm("no executable for this batch after warm-up", found=f"{bucket}, {kind}", hint=hint)
            if self._frozen or kind in self._uncompiled:
                return None
            if kind not in self._programs:
                self._programs[kind] = lower(self._rewritten(kind)[0])
            program = self._programs[kind]
            try:
                rollout = {} if kind.rollout is None else kind.rollout.blank(bucket.rows, bucket.tokens, device)
                example = example_channels(program.inputs, bucket, device, self._masks(torch.int64), rollout)
                return self._graphed(CompiledExecutable(program, bucket, example, settings.cache_dir), example, device)
            except (CompileFailed, BuildFailed, CompilerMissing) as error:
                if isinstance(error, CompileFailed) and self._move_out(kind, f"{error.what}: {error.found}"):
                    return None if kind.whole else make()
                if error.at is not None:
                    error = type(error)(error.what, at=self.spec.at(error.at), found=error.found, hint=error.hint)
                if not isinstance(error, CompilerMissing) and settings.on_compile_error == "raise":
                    raise error
                self._run_eager_from_now(kind, error)
                return None

        return self.cache.get((kind, bucket, device), make)

    def _graphed(
        self, executable: CompiledExecutable, example: Mapping[str, Tensor], device: torch.device
    ) -> CompiledExecutable:
        """The same, replaying CUDA graphs where the configuration wants them and they can be captured."""
        settings = self.spec.advantage.compiled
        if settings.cuda_graphs == "on" or (settings.cuda_graphs == "auto" and is_cuda(device)):
            try:
                executable.capture(example, views=settings.graph_outputs == "view")
            except NotGraphed as error:
                if settings.cuda_graphs == "on":
                    at, hint = self.spec.at("actor.advantage.compiled.cuda_graphs"), "cuda_graphs: auto"
                    raise NotCapturable("no CUDA graph can be captured", at=at, found=error, hint=hint) from error
                if NotGraphed.__name__ not in self._warned:
                    self._warned.add(NotGraphed.__name__)
                    warnings.warn(f"running without CUDA graphs: {error}", RuntimeWarning, stacklevel=2)
        return executable

    def _masks(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which this instance's Programs read loss masks: that of the first one."""
        with self._lock:
            self._mask_dtype = self._mask_dtype or dtype
            return self._mask_dtype

    def _move_out(self, kind: "Kind", why: str) -> bool:
        """Run users' functions of this kind between segments from now on; False where none is in a Program."""
        if not self._placing.move_out(kind, why):
            return False
        self._programs.pop(kind, None)
        self.cache.forget(lambda key: key[0] == kind)
        return True

    def _run_eager_from_now(self, kind: "Kind", error: Exception) -> None:
        """What failed once is not tried again, and said once."""
        self._uncompiled.add(kind)
        if type(error).__name__ not in self._warned:
            self._warned.add(type(error).__name__)
            warnings.warn(f"running eager: {error}", RuntimeWarning, stacklevel=2)

    def _kind_of(self, admitted: Admitted, backend: str) -> "Kind":
        mode, mopd = admitted.call.advantage_shaping_mode, admitted.data.get(MOPD) is not None
        data = admitted.data if backend == "compiled" else None
        return self._kind(frozenset(admitted.channels), mode, mopd, data, admitted.meta)

    def _kind(
        self, channels: frozenset[str], mode: str, mopd: bool, data: Mapping[str, Any] | None, meta: Any
    ) -> "Kind":
        """What decides a Program beside the configuration; a mode that changes nothing is left out. `data`: a rollout,
        for the compiled backend."""
        shaped = self._resolved.process is None and "token_rewards" in channels or self._resolved.compute is not None
        mode, reader = mode if shaped else "additive", self._reader
        rollout = rollout_of(reader, data, meta) if reader is not None and data is not None else None
        return Kind(channels, mode, mopd, rollout)

    @property
    def _reader(self) -> Plugin | None:
        """The function of the rollout itself that may be a part of the Program."""
        reader = self._resolved.compute or self._resolved.outcome
        may = self.spec.advantage.compiled.plugins != "never" and reader is not None and is_pad_safe(reader.fn)
        return reader if may else None

    def _wired(self, kind: "Kind") -> Pipeline:
        if kind.whole and self._resolved.compute is not None:
            return whole_computation(self._resolved.compute, kind.mode)
        across_ranks = self._ranks is not None
        return wire(self.spec, self._resolved, kind.channels, kind.mode, mopd=kind.mopd, across_ranks=across_ranks)

    def _has_functions(self, kind: "Kind") -> bool:
        return any(isinstance(node.stage, PluginStage) for node in self._wired(kind).nodes)

    def _placed(
        self, kind: "Kind", seen: Mapping[str, Any] = MappingProxyType({}), *, may_split: bool = False
    ) -> Pipeline:
        """The Pipeline with every user's function where it is to run. `seen`: what each got, by node, where known."""
        wired = self._wired(kind)
        pipeline = self._placing.placed(kind, wired, seen, kind.rollout, self.spec.config, may_split=may_split)
        if not kind.whole or pipeline.nodes[0].stage.opaque:
            return pipeline
        return with_extras(pipeline, decoupled=self.spec.use_decoupled_loss)

    def _in_program(self, kind: "Kind") -> bool:
        return not any(node.stage.opaque for node in self._placed(kind).nodes)

    def _rewritten(self, kind: "Kind", *, may_split: bool = False) -> tuple[Pipeline, RewriteLog]:
        settings = self.spec.advantage.compiled
        placed = self._placed(kind, may_split=may_split)
        return rewrite(placed, self._passes, fuel=settings.fuel, numerics=settings.numerics)

    def _override(self, admitted: Admitted, plugin: Plugin | None) -> dict[str, Tensor]:
        assert plugin is not None
        return call_compute(plugin, admitted.inputs, decoupled=self.spec.use_decoupled_loss)


@dataclass(frozen=True)
class Kind:
    """A kind of batch: each has a Program of its own."""

    channels: frozenset[str]
    mode: str
    mopd: bool
    rollout: Rollout | None = None  # for a user's function that reads the rollout itself
    whole: bool = False  # for a replacement of the whole computation

    def __str__(self) -> str:
        return f"mode {self.mode}, channels {' '.join(sorted(self.channels - BARE))}{' mopd' if self.mopd else ''}"


MOPD = "mopd_teacher_logp_sum"

# Set to eager or reference, it stands for `compiled` in every config: to rule the compiler out in a running job.
SWITCH = "COMPILED_ADV_BACKEND"

# Input channels that every batch has.
BARE = frozenset(
    ("attention_words", "loss_mask", "rewards", "logprobs", "is_truncated", "member_of_row", "first_row")
    + ("references", "group_of_row", "facts", "gvpo")
)


def backend_of(spec: Spec) -> str:
    """The configured backend, or what the environment puts in the place of the compiled one."""
    configured, known = spec.advantage.backend, get_args(Backend)
    backend = (os.environ.get(SWITCH) or configured) if configured == "compiled" else configured
    if backend not in known:
        raise UnknownName("unknown backend", at=SWITCH, found=backend, hint=suggest(backend, known))
    return backend


def ladder(spec: Spec) -> Ladder:
    """The declared buckets."""
    settings = spec.advantage.compiled
    if (declared := settings.buckets) is not None:
        return Ladder(ascending(declared.rows), ascending(declared.tokens), settings.overflow)
    rows = rungs(1, settings.max_rows) if settings.max_rows else None
    tokens = rungs(LEAST_TOKENS, settings.max_tokens) if settings.max_tokens else None
    return Ladder(rows, tokens, settings.overflow)


def find_passes(spec: Spec) -> tuple[Pass, ...]:
    """The configured passes: built in by name, a user's own by dotted path."""
    chosen = spec.advantage.compiled.passes
    if chosen is None:
        return DEFAULT
    known = {each.name: each for each in DEFAULT}
    at = spec.at("actor.advantage.compiled.passes")
    return tuple(known[name] if name in known else resolve_pass(name, known, at=at) for name in chosen)


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a compiled result that is not the eager one.

    Rounding may carry an advantage over a threshold of its process shaping, so one number in a million may differ.
    """
    for name, want in expected.items():
        if name == "stats":  # a count may turn on rounding
            continue
        have = got[name]
        wrong = unequal(have, want)
        if int(wrong.sum()) > want.numel() // 1_000_000:
            at = wrong.nonzero()[0].tolist()
            where = f"channel {name}, row {at[0]}" + (f", column {at[1]}" if len(at) > 1 else "")
            pair = f"{float(have[tuple(at)])}, eager {float(want[tuple(at)])}"
            found = f"{pair}, {int(wrong.sum())} numbers in all"
            hint = f"{SWITCH}=eager runs without the compiler; please report this"
            raise ResultsDiffer("the compiled result is not the eager one", at=where, found=found, hint=hint)


def build(config: Any, reduce_group: Any = None) -> Compute:
    """Config -> Compute. `config`: a path, the name of a shipped recipe, a mapping with an `actor` key or the actor
    block itself, or a trainer's config object.

    `reduce_group`: the ranks over which batch-level statistics are taken: None (this one alone), "world" or a
    torch.distributed process group.
    """
    return Compute(load_config(config), reduce_group)


def _plain_torch(batch: Any) -> AbstractContextManager[Any]:
    """No autograd, no inference tensors, and no autocast, which would round matrix products."""
    mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
    device = mask.device.type if isinstance(mask, Tensor) and mask.device.type == "cuda" else "cpu"
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device):
        stack = ExitStack()
        for each in (torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False)):
            stack.enter_context(each)
        return stack
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _program_mask(mask: Tensor | None) -> torch.dtype:
    """The dtype in which Programs will read loss masks like this one."""
    if mask is None:
        return torch.int64
    return mask.dtype if mask.dtype in (torch.int32, torch.int64) else torch.float32


def _packed(admitted: Admitted, computed: Mapping[str, Tensor]) -> dict[str, Any]:
    """The batch's own entries as they are, and what was computed over them."""
    out = dict(admitted.data)
    for name in (*OUTPUTS, "input_token_loss_mask"):
        if name in computed:
            x = computed[name]
            out[name] = x.to(torch.bool) if name == "is_truncated" else x
    return out
