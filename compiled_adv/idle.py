"""Takes a configuration and what it computes of rollouts; gives the keys that have no effect, with the reason.

Only keys that someone wrote, with another value than the default. A reason is read off the configuration where it can
be; of the rest, a key is idle if the default in its place computes the same.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel

from compiled_adv.admit import Call
from compiled_adv.errors import CompiledAdvError, nearest, shown
from compiled_adv.pipeline import by_group
from compiled_adv.spec import Advantage, Compiled, Norm, Spec, load_config

NORMS = ("reward_norm", "adv_norm")


@dataclass(frozen=True)
class Idle:
    """A key without effect, as written, and why."""

    key: str
    value: str
    why: str


def idle_keys(spec: Spec, keys: frozenset[str], groups_given: bool, same: Callable[[Spec], bool]) -> list[Idle]:
    """Keys that we read and that change nothing.

    keys: of the rollouts. groups_given: their metadata tells the groups. same: whether another configuration computes
    the same of these rollouts.
    """
    found: list[Idle] = []
    for key, value in _written(spec):
        if any(f"actor.{key}".startswith(f"{idle.key}.") for idle in found):
            continue  # its whole block is idle
        why = _reason(spec, key, keys, groups_given)
        if why is None and not spec.override and "advantage." not in key and _needless(spec, key, same):
            why = f"the default, {_as_written(_default(key))}, computes the same of these rollouts"
        if why is not None:
            found.append(Idle(f"actor.{key}", _as_written(value), why))
    return found


def ignored_keys(raw: Any) -> list[Idle]:
    """Keys of a mapping that we do not read although their names are like ours, and where they belong."""
    if not isinstance(raw, Mapping):
        return []
    inside = raw.get("actor") if isinstance(raw.get("actor"), Mapping) else None
    actor = raw if inside is None else inside
    found = []
    for key, value in raw.items() if inside is not None else ():
        if key in Spec.model_fields:
            found.append(Idle(key, _as_written(value), f"beside `actor`: only the actor block is read, as actor.{key}"))
    for key, value in actor.items():
        if isinstance(key, str) and key not in Spec.model_fields and (why := _not_read(key)):
            found.append(Idle(f"actor.{key}", _as_written(value), why))
    return found


def _not_read(key: str) -> str | None:
    if key in [f.name for f in fields(Call)]:
        return f"a per-call value: compute(batch, meta, {key}=...)"
    for path, model in (("advantage", Advantage), ("advantage.compiled", Compiled), ("reward_norm", Norm)):
        if key in model.model_fields:
            return f"not read here: actor.{path}.{key}"
    near = nearest(key, Spec.model_fields)
    return near and f"not a key of ours: {near}?"


def _as_written(value: Any) -> str:
    """A value as a configuration file has it, cut short."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError):
        text = shown(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---- what is written ----


def _written(spec: Spec) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what differs from the default."""
    for name in Spec.model_fields:
        value = getattr(spec, name)
        if name in NORMS and value is not None:
            yield name, "{...}"
            yield from ((f"{name}.{key}", x) for key, x in _different(value, Norm))
        elif name == "advantage":
            yield from ((f"advantage.{key}", x) for key, x in _different(value, Advantage) if key != "compiled")
            yield from ((f"advantage.compiled.{key}", x) for key, x in _different(value.compiled, Compiled))
        elif value != Spec.model_fields[name].default:
            yield name, value


def _different(block: BaseModel, model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if (value := getattr(block, name)) != field.default:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value


def _default(key: str) -> Any:
    block, _, name = key.rpartition(".")
    return (Norm if block else Spec).model_fields[name].default


def _needless(spec: Spec, key: str, same: Callable[[Spec], bool]) -> bool:
    """Whether the default in place of one key computes the same."""
    block, _, name = key.rpartition(".")
    values = {each: _plain(getattr(spec, each)) for each in Spec.model_fields}
    (values[block] if block else values).pop(name, None)
    try:
        return same(load_config(values))
    except CompiledAdvError:  # the others need it
        return False


# ---- reasons ----


def _reason(spec: Spec, key: str, keys: frozenset[str], groups_given: bool) -> str | None:
    """Why a key has no effect, where the configuration and the rollouts' keys show it."""
    advantage = spec.advantage
    if spec.override and not key.startswith("advantage."):
        return f"{advantage.compute.implementation} replaces the whole computation, and alone may read it"
    block, _, name = key.rpartition(".")
    if block in NORMS:
        return _norm_reason(getattr(spec, block), name, groups_given)
    if block == "advantage.compiled":
        if advantage.backend != "compiled":
            return f"the backend is {advantage.backend}"
        declared = advantage.compiled.buckets is not None and name in ("max_rows", "max_tokens")
        return "buckets are declared" if declared else None
    custom = "." in spec.estimator
    no_kl = spec.kl_ctl == 0 or (advantage.rules == "strict" and "ref_logp" not in keys)
    reasons: dict[str, tuple[bool, str]] = {
        "gae_lambda_kwargs": (not spec.lambda_is_function, "gae_lambda is a number"),
        "gae_lambda": (custom, f"{spec.estimator} is the estimator: it alone may read it"),
        "gae_timestep_unit": (
            advantage.estimator.implementation != "auto",
            f"advantage.estimator is {spec.estimator}, whatever the unit",
        ),
        "kl_estimator": (no_kl, "there is no KL penalty"),
        "kl_ctl": (no_kl and spec.kl_ctl != 0, "strict rules drop the KL penalty without ref_logp"),
        "token_rewards_as_adv": ("token_rewards" not in keys, "the rollouts carry no token_rewards"),
        "advantage.process_adv_shaping": (
            "token_rewards" not in keys and "." not in advantage.process_adv_shaping.implementation,
            "the rollouts carry no token_rewards",
        ),
        "recompute_logprob": (spec.use_decoupled_loss, "use_decoupled_loss does not read it"),
    }
    for penalty in ("overlong_tokens", "overlong_penalty_factor", "max_new_tokens"):
        reasons[penalty] = (not spec.overlong_reward_penalty, "overlong_reward_penalty is false")
    idle, why = reasons.get(key, (False, ""))
    return why if idle else None


def _norm_reason(norm: Norm, name: str, groups_given: bool) -> str | None:
    if name in ("mean_level", "std_level") or (norm.mean_level is None and norm.std_level is None):
        return None
    if name == "group_size":
        if not by_group(norm):
            return "no level is group"
        return "the metadata of the rollouts tells the groups" if groups_given else None
    if name == "mean_leave1out" and norm.mean_level is None:
        return "mean_level is null"
    return "std_level is null" if name in ("std_unbiased", "eps") and norm.std_level is None else None
