"""AReaL: takes its actors' configs and batches; gives our advantages in its own forms.

An AReaL with the plug-in point calls `compute`, which its config names. Into one without it (SUPPORTED) `enable` puts
our computation behind `PPOActor.compute_advantages`; areal_config.py carries that into its workers.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from compiled_adv.advantage import EXTRAS, AdvantageResult
from compiled_adv.channel import OUTPUTS
from compiled_adv.compiler import Compute
from compiled_adv.errors import ConflictingSettings, InvalidValue, UnsupportedTrainer
from compiled_adv.pipeline import meeting_points
from compiled_adv.resolve import resolve_spec
from compiled_adv.spec import Norm, Spec, load_config

NORMS = ("reward_norm", "adv_norm")
PER_CALL = ("advantage_shaping_mode", "gvpo_negative_scale", "gvpo_zero_penalty", "gvpo_zero_eps")


# ---- an AReaL with the plug-in point ----


def compute(
    inputs: Any,
    *,
    outcome_reward_shaping: Mapping[str, Any] | None = None,
    estimator: Mapping[str, Any] | None = None,
    process_adv_shaping: Mapping[str, Any] | None = None,
    backend: str | None = None,
    compiled: Mapping[str, Any] | None = None,
    rules: str | None = None,
) -> Any:
    """A full override for `actor.advantage.compute.implementation`: AReaL's AdvantageInputs -> its AdvantageResult.

    The actor's own settings are read from `inputs.config`; the keyword arguments stand for the keys of its `advantage`
    block, which itself only names this function. Built on the first call of a config, and again if its values change.
    """
    given = {
        "outcome_reward_shaping": outcome_reward_shaping,
        "estimator": estimator,
        "process_adv_shaping": process_adv_shaping,
        "backend": backend,
        "compiled": compiled,
        "rules": rules,
    }
    block = {name: value for name, value in given.items() if value is not None}
    built = _builds.get(inputs.config, inputs.config, _values(inputs.config) | {"advantage": block})
    per_call = {name: getattr(inputs, name) for name in PER_CALL if hasattr(inputs, name)}
    out = built(inputs.data, inputs.meta, **per_call)
    # Whole numbers of an identity shaping; a full override returns floating point.
    out["rewards"] = out["rewards"].to(torch.float32)
    computed = {name: out[name] for name in OUTPUTS if name in out and name not in EXTRAS}
    extras = {name: out[name] for name in _extras(inputs, built.spec) if name in out}
    return _result(computed | {"extras": extras})


def _extras(inputs: Any, spec: Spec) -> list[str]:
    """The extras that this computation produces; others in its output are the rollout's own."""
    mopd = inputs.data.get("mopd_teacher_logp_sum") is not None
    produced = {"is_truncated": True, "mopd_behavior_logprobs": mopd, "prox_logp": not spec.use_decoupled_loss}
    return [*(name for name, made in produced.items() if made), "ref_logp"]


def _result(fields: dict[str, Any]) -> Any:
    kind = _result_class()
    try:
        return kind(**fields)
    except TypeError as error:
        found, hint = f"{kind.__module__}.{kind.__name__}: {error}", "enable() for the versions below; " + _supported()
        raise UnsupportedTrainer("this AReaL's AdvantageResult has other fields", found=found, hint=hint) from error


@functools.cache
def _result_class() -> Any:
    try:
        return importlib.import_module(PLUG_IN_POINT).AdvantageResult
    except (ImportError, AttributeError):
        return AdvantageResult


def _values(config: Any) -> dict[str, Any]:
    """What a config says now, norm blocks as mappings."""
    if isinstance(config, (Mapping, Spec)):
        values = dict(config)
    else:
        values = {name: getattr(config, name) for name in Spec.model_fields if hasattr(config, name)}
    return values | {name: _norm(values.get(name)) for name in NORMS}


def _norm(norm: Any) -> Any:
    if norm is None or isinstance(norm, Mapping):
        return norm
    return {name: getattr(norm, name) for name in Norm.model_fields if hasattr(norm, name)}


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """The config with these values, of its own class: users' functions get it."""
    if isinstance(config, (Mapping, Spec)):
        return {**dict(config), **values}
    own = copy.copy(config)
    try:
        vars(own).update(values)
    except TypeError as error:
        hint = "the config object of an actor"
        raise InvalidValue("this config cannot be read", at="actor", found=type(config), hint=hint) from error
    return own


# ---- an AReaL without it ----

PLUG_IN_POINT = "areal.trainer.ppo.advantage"

# What it reads and we follow, as released: the first 16 digits of the SHA-256 of each one's source.
SUPPORTED: dict[str, dict[str, str]] = {
    "1.0.4": {
        "areal.trainer.ppo.actor.PPOActor.__init__": "57ec1aecb75b6d04",
        "areal.trainer.ppo.actor.PPOActor.compute_advantages": "5e8a1edd2642d49b",
        "areal.trainer.ppo.actor.PPOActor._compute_advantages": "82931883b0c2c431",
        "areal.utils.data.batched_call": "989bd55dd0c93542",
        "areal.utils.data.KLEstimator": "bfb451360ce79340",
        "areal.utils.data.Normalization": "361728dd674252a3",
        "areal.utils.functional.reward_overlong_penalty": "a3be17083482cd4c",
    }
}

# Keys of a rollout that its own function does not read: it takes a row for truncated if it fills the width, it has no
# process rewards and no turns.
NOT_READ = ("is_truncated", "turn_ids", "token_rewards", "mopd_teacher_logp_sum")

# Settings that it takes from the actor, which may have changed since it was configured.
HELD = ("reward_bias", "reward_scaling", "reward_clip", "kl_ctl", "discount", "gae_lambda", "mask_no_eos_with_zero")

_lock = threading.RLock()
_originals: dict[str, Callable[..., Any]] = {}  # of PPOActor, while ours stand in their place
_settings: dict[str, Any] = {}


def enable(**advantage: Any) -> None:
    """From now on every PPOActor of this process computes its advantages here, by its own config.

    `advantage`: keys of the `actor.advantage` block, for actors whose config has none. Calling it again replaces them.
    Raises, and leaves the trainer as it was: UnsupportedTrainer for another AReaL than SUPPORTED, ConfigError for
    settings that it gives no data for. What an actor's own config shows to be wrong fails when the actor is built.
    """
    check(advantage)
    with _lock:
        patch()
        _settings.clear()
        _settings.update(advantage)


def disable() -> None:
    """PPOActor's own functions again, and no settings."""
    with _lock:
        _settings.clear()
        if not _originals:
            return
        actor = _found("areal.trainer.ppo.actor.PPOActor")
        for name, ours in OURS.items():
            if vars(actor)[name] is not ours:
                found = f"{ours.__qualname__} has been replaced by {vars(actor)[name]}"
                raise UnsupportedTrainer("something else was put over PPOActor after enable()", found=found)
        for name, original in _originals.items():
            setattr(actor, name, original)
        _originals.clear()


def patch() -> None:
    """Put our functions in place of PPOActor's, if these are the ones that we know."""
    with _lock:
        if _originals:
            return
        _check_version()
        actor = _found("areal.trainer.ppo.actor.PPOActor")
        _originals.update({name: vars(actor)[name] for name in OURS})
        for name, ours in OURS.items():
            setattr(actor, name, ours)


def check(advantage: Mapping[str, Any] | None) -> None:
    """Refuse a block that is wrong by itself, or asks for what this AReaL does not give."""
    spec = load_config({"advantage": advantage})
    resolve_spec(spec)
    _check_given(spec)


def compute_of(actor: Any) -> Compute:
    """What computes the advantages of a PPOActor: for `stats()`, `explain()`, `warmup()`, `last_warnings`."""
    block = getattr(actor.config, "advantage", None)
    if block is not None and _settings:
        what = "the actor's config has an advantage block of its own"
        raise ConflictingSettings(what, at="actor.advantage", found=f"enable({_settings})", hint="enable()")
    values = _values(actor.config) | {name: getattr(actor, name) for name in HELD}
    values |= {name: _followed(_norm(getattr(actor, name))) for name in NORMS}
    values |= {"kl_estimator": actor.kl_estimator.kl_estimator, "advantage": _settings if block is None else block}
    return _builds.get(actor, actor.config, values, _check_given)


def _followed(norm: Any) -> Any:
    """A norm block that gives the numbers of AReaL's Normalization."""
    if norm is None or not (norm["mean_level"] == "group" and norm["mean_leave1out"] and norm["group_size"] == 1):
        return norm
    # The only row of a group keeps its value there, where ours would be 0.
    return norm | {"mean_level": None, "mean_leave1out": False}


def _check_given(spec: Spec) -> None:
    """Refuse settings that would do nothing, or fail at the first batch, for want of data."""
    shaping = spec.advantage.process_adv_shaping.implementation
    if spec.estimator == "turn_gae":
        lacks, at, found, hint = "turn_ids", "estimator", "turn_gae", "token_gae"
    elif shaping in ("gvpo", "process_weighted"):
        lacks, at, found, hint = "token_rewards", "process_adv_shaping", shaping, "null, or a function of your own"
    elif spec.advantage.rules == "strict":
        lacks, at, found, hint = "is_truncated", "rules", "strict", "default"
    else:
        return
    what = f"this AReaL hands no {lacks} to the computation of advantages"
    raise ConflictingSettings(what, at=spec.at(f"actor.advantage.{at}"), found=found, hint=hint)


def _init(self: Any, config: Any, engine: Any) -> None:
    _originals["__init__"](self, config, engine)
    compute_of(self)  # a wrong config fails now, before the first rollout


def _compute_advantages(self: Any, data: dict[str, Any]) -> dict[str, Any]:
    """One padded batch, with the results put into it, as AReaL does. Its tensors are not written to."""
    computed = compute_of(self)
    out = computed({name: x for name, x in data.items() if name not in NOT_READ})
    spec, shaping = computed.spec, computed.spec.advantage.outcome_reward_shaping.implementation
    written = {
        "prox_logp": not spec.use_decoupled_loss,
        **dict.fromkeys(("returns", "advantages", "kl_rewards", "tot_rewards", "loss_mask", "logprobs"), True),
        "ref_logp": data.get("ref_logp") is not None,
        "rewards": spec.overlong_reward_penalty or spec.override or shaping not in ("auto", "identity"),
    }
    data.update({name: out[name] for name, is_written in written.items() if is_written})
    return data


OURS: dict[str, Callable[..., Any]] = {"__init__": _init, "_compute_advantages": _compute_advantages}


# ---- which AReaL this is ----


def _check_version() -> None:
    try:
        version = importlib.metadata.version("areal")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedTrainer("AReaL is not installed here", hint=_supported()) from None
    different: list[str] = []
    for known in SUPPORTED.values():
        different = [path for path, digest in known.items() if _digest(path) != digest]
        if not different:
            return
    what = "this AReaL computes advantages otherwise than the versions that we know"
    hint, found = _supported(), f"areal {version}, where these differ: {', '.join(different)}"
    raise UnsupportedTrainer(what, found=found, hint=hint)


def _supported() -> str:
    own = f"{__name__}.compute as actor.advantage.compute.implementation, where AReaL has {PLUG_IN_POINT}"
    return f"areal {', '.join(SUPPORTED)}; or {own}"


def _found(path: str) -> Any:
    parts = path.split(".")
    n = next(i for i, part in enumerate(parts) if part[0].isupper() or i == len(parts) - 1)
    found: Any = importlib.import_module(".".join(parts[:n]))
    for name in parts[n:]:
        found = getattr(found, name)
    return found


def _digest(path: str) -> str | None:
    """Of a function's or a class's source as it stands now; None if there is none."""
    try:
        found = _found(path)
        if path.endswith(".compute_advantages"):
            found = inspect.unwrap(found)  # AReaL's tracer around it
        # By the code object: a function put over another one shows as itself.
        source = inspect.getsource(found if inspect.isclass(found) else found.__code__)
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


# ---- builds ----


class _Builds:
    """The Computes of a config or an actor, by the values and ranks that they were built for; forgotten with it."""

    MOST = 4  # of one owner; more than one where its values change

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], list[tuple[Any, Any, Compute]]]] = {}
        self._lock = threading.RLock()

    def get(
        self, owner: Any, config: Any, values: dict[str, Any], check: Callable[[Spec], None] = lambda spec: None
    ) -> Compute:
        """The Compute of `config` with these values, on the ranks of now. `check` sees its Spec first."""
        ranks = _ranks()
        with self._lock:
            held = self._held(owner)
            for built_from, among, built in held:
                if built_from == values and among is ranks:
                    return built
            values = copy.deepcopy(values)
            spec = load_config(_with(config, values))
            check(spec)
            # As in AReaL, ranks meet only for a batch-level norm: without one they need not all call.
            held.insert(0, (values, ranks, Compute(spec, ranks if meeting_points(spec) else None)))
            del held[self.MOST :]
            return held[0][2]

    def _held(self, owner: Any) -> list[tuple[Any, Any, Compute]]:
        number = id(owner)
        if number not in self._of:
            try:
                reference = weakref.ref(owner, lambda _: self._of.pop(number, None))
            except TypeError:
                hint = "the config object of an actor"
                raise InvalidValue("this config cannot be held", at="actor", found=type(owner), hint=hint) from None
            self._of[number] = (reference, [])
        return self._of[number][1]


def _ranks() -> Any:
    """The group over which AReaL takes batch-level statistics: the default one. None: there is one rank, so far.

    AReaL starts torch.distributed after it has built the actor.
    """
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if many else None


_builds = _Builds()
