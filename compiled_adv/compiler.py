"""Takes a config; gives the callable that turns rollouts into advantages. The composition root.

    config --parse--> Spec --wire--> Pipeline --lower--> Program --> Executable --run--> outputs
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_adv import reference
from compiled_adv.admit import Admitted, admit, admit_call, legal_modes, mask_as, read_keys
from compiled_adv.batch import concat_batch, split_batch
from compiled_adv.bucket import LEAST_TOKENS, Bucket, Ladder, boundaries, rungs
from compiled_adv.cache import Cache
from compiled_adv.channel import OPTIONAL, OUTPUTS
from compiled_adv.errors import CompileFailed, CompilerMissing, Forked, NotWarm, ResultsDiffer
from compiled_adv.executable import CompiledExecutable, EagerExecutable, example_channels
from compiled_adv.passes import DEFAULT
from compiled_adv.pipeline import Pipeline, wire
from compiled_adv.program import Program, lower
from compiled_adv.resolve import resolve_pass, resolve_spec
from compiled_adv.rewrite import Pass, RewriteLog, rewrite
from compiled_adv.shadow import shadow_of
from compiled_adv.show import explain_json, explain_text
from compiled_adv.spec import Spec, load_config
from compiled_adv.stages.plugin import call_compute
from compiled_adv.stats import Stats
from compiled_adv.status import raise_errors, warn
from compiled_adv.verify import verify


class Compute:
    """Advantages of a batch, by one configuration. Build it with `compiled_adv.build`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.last_warnings: dict[str, list[int]] = {}
        self.cache = Cache(spec.advantage.compiled.max_buckets)
        self._resolved = resolve_spec(spec)
        self._ladder = ladder(spec)
        self._passes = find_passes(spec)
        self._warned: set[str] = set()
        self._stats = Stats()
        self._shadow = shadow_of(spec, self._resolved, self._run)
        self._eager: dict[Kind, EagerExecutable] = {}
        self._programs: dict[Kind, Program] = {}
        self._unverified: dict[Kind, int] = {}
        self._frozen = False
        self._process: int | None = None  # the first to compute
        self._mask_dtype: torch.dtype | None = None  # of the first batch; others are cast to it

    def __call__(self, batch: Mapping[str, Any], meta: Any = None, **per_call: Any) -> dict[str, Any]:
        """One padded batch -> a new dict: the batch's own entries, and every computed channel as a new tensor.

        Raises a CompiledAdvError before or after the work; the batch is never written to. `per_call`:
        advantage_shaping_mode, gvpo_negative_scale, gvpo_zero_penalty, gvpo_zero_eps.
        """
        start = time.perf_counter()
        self._check_fork()
        call = admit_call(per_call, self.spec, self._resolved)
        with _plain_torch(batch):
            admitted = admit(batch, meta, call, self.spec, self._resolved)
            computed, flags = self._override(admitted) if self._resolved.compute else self._run(admitted)
            raise_errors(flags)
            self.last_warnings = warn(flags, self._warned)
            self._stats.count(time.perf_counter() - start, self.last_warnings)
            if self._shadow is not None:
                self._shadow.see(admitted, computed)
            return _packed(admitted, computed)

    def compute_advantages(self, rollouts: Sequence[Mapping[str, Any]], **per_call: Any) -> list[dict[str, Any]]:
        """One dict per prompt -> one dict per prompt, computed as one batch."""
        batch, meta = concat_batch(rollouts)
        return split_batch(self(batch, meta, **per_call), meta)

    def warmup(
        self,
        example: Mapping[str, Any] | None = None,
        *,
        channels: Sequence[str] = OPTIONAL,
        freeze: bool = False,
        progress: Callable[[list[Any]], Iterable[Any]] = iter,
    ) -> None:
        """Compile every declared bucket, for all per-call modes that this configuration allows.

        `example`: a batch whose keys say which optional channels will come; or name them in `channels`. `freeze`: from
        then on a missing executable is an error, or runs eager by `on_missing`.
        """
        optional = tuple(channels) if example is None else tuple(example)
        carried = read_keys(optional, self.spec, self._resolved)
        device = next((x.device for x in (example or {}).values() if isinstance(x, Tensor)), torch.device("cpu"))
        mopd = MOPD in optional
        kinds = {self._kind(BARE | {*carried}, mode, mopd) for mode in legal_modes(self.spec, self._resolved)}
        jobs = [(kind, bucket) for bucket in self._ladder.buckets() for kind in sorted(kinds, key=str)]
        mask = (example or {}).get("loss_mask")
        self._mask_dtype = self._mask_dtype or _program_mask(mask if isinstance(mask, Tensor) else None)
        with _plain_torch(example):
            for kind, bucket in progress(jobs):
                self._executable(kind, bucket, device)
        self._frozen = freeze

    def explain(self, format: str = "text", channels: Sequence[str] = OPTIONAL, mode: str = "additive") -> Any:
        """What this configuration becomes for a batch with these optional channels: text, or facts for "json"."""
        carried = read_keys(channels, self.spec, self._resolved)
        kind = self._kind(BARE | {*carried}, mode, False)
        pipeline, log = self._rewritten(kind)
        return explain_json(log, lower(pipeline)) if format == "json" else explain_text(log, lower(pipeline))

    def stats(self) -> dict[str, float]:
        """Numbers for a trainer's logger: calls; seconds and rows of each warning of the last one; the shadow's."""
        return self._stats.flat() | (self._shadow.flat() if self._shadow is not None else {})

    def _check_fork(self) -> None:
        """OpenMP's threads do not survive a fork: a parallel loop in the child waits for them for ever."""
        self._process = self._process or os.getpid()
        if self._process != os.getpid() and torch.get_num_threads() > 1:
            hint = "start workers with spawn, or torch.set_num_threads(1)"
            raise Forked("this process was forked after its parent had computed", found=f"pid {os.getpid()}", hint=hint)

    def _run(self, admitted: Admitted, backend: str | None = None) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        backend = backend or os.environ.get(SWITCH) or self.spec.advantage.backend
        if backend == "reference":
            return reference.run(self.spec, self._resolved, admitted.data, admitted.meta, admitted.call)
        kind = self._kind(frozenset(admitted.channels), admitted.call.advantage_shaping_mode, MOPD in admitted.data)
        computed, flags = (self._run_compiled if backend == "compiled" else self._run_eager)(kind, admitted)
        raw = admitted.data["rewards"]
        as_they_came = self._resolved.outcome is None and not self.spec.overlong_reward_penalty
        if as_they_came and not raw.is_floating_point() and raw.dtype != torch.bool:
            computed["rewards"] = raw.detach().clone()
        return computed, flags

    def _run_eager(self, kind: "Kind", admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        if kind not in self._eager:
            self._eager[kind] = EagerExecutable(lower(verify(self._wired(kind))))
        return self._eager[kind].run(admitted)

    def _run_compiled(self, kind: "Kind", admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        bucket, mask = self._ladder.fit(admitted.rows, admitted.tokens), admitted.channels["loss_mask"]
        self._mask_dtype = self._mask_dtype or mask.dtype
        admitted.channels["loss_mask"] = mask_as(mask, self._mask_dtype)
        executable = self._executable(kind, bucket, admitted.device)
        if executable is None:
            self.cache.fell_back()
            return self._run_eager(kind, admitted)
        computed, flags = executable.run(admitted)
        if "invalid" in flags:
            return self._run_eager(kind, admitted)  # raises the named error
        self.cache.served(admitted.rows * admitted.tokens, bucket.rows * bucket.tokens)
        if self._unverified.setdefault(kind, self.spec.advantage.compiled.verify_steps) > 0:
            self._unverified[kind] -= 1
            compare(computed, self._run_eager(kind, admitted)[0])
        return computed, flags

    def _executable(self, kind: "Kind", bucket: Bucket, device: torch.device) -> CompiledExecutable | None:
        """The executable of a bucket, compiled if it is missing; None where the eager path is to serve."""
        settings = self.spec.advantage.compiled

        def make() -> CompiledExecutable | None:
            if self._frozen and settings.on_missing == "error":
                hint = "warm it up, or actor.advantage.compiled.on_missing: eager"
                raise NotWarm("no executable for this batch after warm-up", found=f"{bucket}, {kind}", hint=hint)
            if self._frozen:
                return None
            if kind not in self._programs:
                self._programs[kind] = lower(self._rewritten(kind)[0])
            program = self._programs[kind]
            try:
                example = example_channels(program.inputs, bucket, device, self._mask_dtype or torch.int64)
                return CompiledExecutable(program, bucket, example, settings.cache_dir)
            except (CompileFailed, CompilerMissing) as error:
                if isinstance(error, CompileFailed) and settings.on_compile_error == "raise":
                    raise
                warnings.warn(f"running eager: {error}", RuntimeWarning, stacklevel=2)
                return None

        return self.cache.get((kind, bucket, device), make)

    def _kind(self, channels: frozenset[str], mode: str, mopd: bool) -> "Kind":
        """What decides a Program beside the configuration; a mode that changes nothing is left out."""
        shaped = self._resolved.process is None and "token_rewards" in channels
        return Kind(channels, mode if shaped else "additive", mopd)

    def _wired(self, kind: "Kind") -> Pipeline:
        return wire(self.spec, self._resolved, kind.channels, kind.mode, mopd=kind.mopd)

    def _rewritten(self, kind: "Kind") -> tuple[Pipeline, RewriteLog]:
        settings = self.spec.advantage.compiled
        return rewrite(self._wired(kind), self._passes, fuel=settings.fuel, numerics=settings.numerics)

    def _override(self, admitted: Admitted) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        assert self._resolved.compute is not None
        return call_compute(self._resolved.compute, admitted.inputs, decoupled=self.spec.use_decoupled_loss), {}


@dataclass(frozen=True)
class Kind:
    """A kind of batch: each has a Program of its own."""

    channels: frozenset[str]
    mode: str
    mopd: bool

    def __str__(self) -> str:
        return f"mode {self.mode}, channels {' '.join(sorted(self.channels - BARE))}{' mopd' if self.mopd else ''}"


MOPD = "mopd_teacher_logp_sum"

# Set to eager or reference, it overrules every configured backend: to rule the compiler out in a running job.
SWITCH = "COMPILED_ADV_BACKEND"

# Input channels that every batch has.
BARE = frozenset(
    ("attention_words", "loss_mask", "rewards", "logprobs", "is_truncated", "member_of_row", "first_row")
    + ("references", "group_of_row", "facts", "gvpo")
)


def ladder(spec: Spec) -> Ladder:
    """The declared buckets."""
    settings = spec.advantage.compiled
    if not isinstance(settings.buckets, str):
        declared = settings.buckets
        return Ladder(boundaries(declared.rows), boundaries(declared.tokens), settings.overflow)
    rows = rungs(1, settings.max_rows) if settings.max_rows else None
    tokens = rungs(LEAST_TOKENS, settings.max_tokens) if settings.max_tokens else None
    return Ladder(rows, tokens, settings.overflow)


def find_passes(spec: Spec) -> tuple[Pass, ...]:
    """The configured passes: built in by name, a user's own by dotted path."""
    chosen = spec.advantage.compiled.passes
    if chosen == "default":
        return DEFAULT
    known = {each.name: each for each in DEFAULT}
    at = spec.at("actor.advantage.compiled.passes")
    return tuple(known[name] if name in known else resolve_pass(name, known, at=at) for name in chosen)


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a compiled result that is not the eager one.

    Rounding may carry an advantage over a threshold of its process shaping, so one number in a million may differ.
    """
    for name, want in expected.items():
        want, have = want.to(torch.float64), got[name].to(torch.float64)
        wrong = (have - want).abs() > 1e-5 * (1 + want.abs())
        if int(wrong.sum()) > want.numel() // 1_000_000:
            at = wrong.nonzero()[0].tolist()
            where = f"channel {name}, row {at[0]}" + (f", column {at[1]}" if len(at) > 1 else "")
            pair = f"{float(have[tuple(at)])}, eager {float(want[tuple(at)])}"
            found = f"{pair}, {int(wrong.sum())} numbers in all"
            hint = f"{SWITCH}=eager runs without the compiler; please report this"
            raise ResultsDiffer("the compiled result is not the eager one", at=where, found=found, hint=hint)


def build(config: Any) -> Compute:
    """Config -> Compute. `config`: a path, the name of a shipped recipe, a mapping with an `actor` key or the actor
    block itself, or a trainer's config object."""
    return Compute(load_config(config))


@contextmanager
def _plain_torch(batch: Any) -> Iterator[None]:
    """No autograd, no inference tensors, and no autocast, which would round matrix products."""
    mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
    device = mask.device.type if isinstance(mask, Tensor) and mask.device.type == "cuda" else "cpu"
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device):
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
                yield
        else:
            yield


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
