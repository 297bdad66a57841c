"""Takes a configuration (path, recipe, mapping, trainer's object); gives the frozen Spec, or an error that says where.

Only what the configuration alone shows is checked here; resolve.py looks up the names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
)

from compiled_adv import config_file
from compiled_adv.errors import (
    BadKwargs,
    ConfigError,
    ConflictingSettings,
    InvalidValue,
    UnknownKey,
    UnknownName,
    shown,
    suggest,
)
from compiled_adv.scalars import is_finite, is_number

Backend = Literal["reference", "eager", "compiled"]

STAGES = ("outcome_reward_shaping", "estimator", "process_adv_shaping")


def _number(value: Any) -> Any:
    # pydantic would take whatever converts to a float: a numpy bool, a tensor.
    if not is_number(value):
        raise InvalidValue("a number is needed here")
    return value


def _fits_float32(value: float) -> float:
    # Beyond it, it would be infinite beside the float32 numbers of a batch, and its product with 0 no number.
    if abs(value) > LARGEST:
        raise InvalidValue(f"a number of at most {LARGEST:.4g} is needed here")
    return value


LARGEST = 3.4028234663852886e38  # of float32
Number = Annotated[float, BeforeValidator(_number)]
Finite = Annotated[Number, Field(allow_inf_nan=False), AfterValidator(_fits_float32)]
Level = Literal["batch", "group"] | None


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Norm(_Model):
    """How rewards or advantages are normalised."""

    mean_level: Level = "batch"
    mean_leave1out: bool = False
    std_level: Level = "batch"
    std_unbiased: bool = True
    group_size: int = Field(1, ge=1)
    eps: Finite = Field(1e-5, ge=0)


def _a_path(value: Any) -> Any:
    if callable(value):
        path = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
        raise InvalidValue("a function is given by its dotted path, not as an object", hint=path)
    return value


class StageChoice(_Model):
    """A built-in name, `auto` or a dotted path, with keyword arguments."""

    implementation: Annotated[str, BeforeValidator(_a_path)] = "auto"
    kwargs: dict[str, Any] = {}


class ComputeChoice(StageChoice):
    """`default`, or the dotted path of a replacement of the whole computation."""

    implementation: Annotated[str, BeforeValidator(_a_path)] = "default"


class Boundaries(_Model):
    """Declared bucket boundaries."""

    rows: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    tokens: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


def _buckets(value: Any) -> Any:
    """The boundaries, or a YAML file or shipped name that holds them; `auto` is None."""
    if not isinstance(value, str):
        return value
    if value == "auto":
        return None
    found = config_file.read(config_file.find(value, config_file.bucket_files()))[0]
    return found.get("buckets", found) if isinstance(found, Mapping) else found


def _passes(value: Any) -> Any:
    """Names of passes; `default` is None."""
    if isinstance(value, str) and value != "default":
        raise InvalidValue("passes are `default`, or a list of names and dotted paths", hint=f"passes: [{value}]")
    return None if value == "default" else value


def _yaml_word(value: Any) -> Any:
    """YAML reads the words on and off as true and false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class Compiled(_Model):
    """Settings of the compiled backend: the block `actor.advantage.compiled`."""

    passes: Annotated[list[str] | None, BeforeValidator(_passes)] = None
    numerics: Literal["exact", "close"] = "exact"
    fuel: Annotated[int, Field(ge=0)] | None = None
    buckets: Annotated[Boundaries | None, BeforeValidator(_buckets)] = None
    max_rows: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    overflow: Literal["exact", "error"] = "exact"
    max_buckets: Annotated[int, Field(ge=1)] = 64
    verify_steps: Annotated[int, Field(ge=0)] = 1
    on_compile_error: Literal["raise", "eager"] = "raise"
    on_missing: Literal["error", "eager"] = "error"
    plugins: Literal["auto", "require", "never"] = "auto"
    cuda_graphs: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_word)] = "auto"
    graph_outputs: Literal["copy", "view"] = "copy"
    cache_dir: str | None = None


def _no_bare_string(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        mapping = f"{info.field_name}: {{implementation: {value}, kwargs: {{}}}}"
        raise InvalidValue("a stage is chosen by a mapping, not by a bare string", hint=mapping)
    return _a_path(value)


def _number_or_path(value: Any) -> float | str:
    if isinstance(_a_path(value), str):
        return value
    if is_finite(value):
        return float(value)
    raise InvalidValue("gae_lambda must be a finite number or the dotted path of a function")


class Shadow(_Model):
    """A second opinion on every N-th batch: the block `actor.advantage.shadow`."""

    against: Annotated[str, BeforeValidator(_a_path)]  # eager, reference or a dotted path
    every: int = Field(1, ge=1)


def _a_mapping(value: Any) -> Any:
    if isinstance(value, str):
        hint = f"shadow: {{against: {value}, every: 1}}"
        raise InvalidValue("a shadow is chosen by a mapping, not by a bare string", hint=hint)
    return value


Choice = Annotated[StageChoice, BeforeValidator(_no_bare_string)]


class Advantage(_Model):
    """The block `actor.advantage`."""

    compute: Annotated[ComputeChoice, BeforeValidator(_no_bare_string)] = ComputeChoice()
    outcome_reward_shaping: Choice = StageChoice()
    estimator: Choice = StageChoice()
    process_adv_shaping: Choice = StageChoice()
    rules: Literal["default", "strict"] = "default"
    backend: Backend = "compiled"
    compiled: Compiled = Compiled()
    shadow: Annotated[Shadow | None, BeforeValidator(_a_mapping)] = None
    stats: bool = False


@dataclass(frozen=True)
class Source:
    """Where a configuration came from, for error messages and for plugins."""

    # Not compared: Specs with the same values are equal wherever they came from.
    own: Any = field(default=None, compare=False)  # the trainer's own object, if one was given
    file: str | None = field(default=None, compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    def at(self, dotted: str) -> str:
        return f"{dotted} ({self.file}:{self.lines[dotted]})" if dotted in self.lines else dotted


class Spec(_Model):
    """The actor block, complete and checked. Keys that are not ours stay readable as attributes."""

    model_config = ConfigDict(extra="allow")

    # temporal estimation
    discount: Finite = 1.0
    gae_lambda: Annotated[float | str, PlainValidator(_number_or_path)] = 1.0
    gae_lambda_kwargs: dict[str, Any] = {}
    gae_timestep_unit: Literal["token", "turn"] = "token"
    # KL penalty
    kl_ctl: Finite = 0.1
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    # outcome reward
    reward_bias: Finite = 0.0
    reward_scaling: Finite = 1.0
    reward_clip: Number = Field(20.0, ge=0)
    reward_norm: Norm | None = None
    adv_norm: Norm | None = None
    overlong_reward_penalty: bool = False
    overlong_tokens: int | None = None
    overlong_penalty_factor: Finite | None = None
    max_new_tokens: int = 1024
    mask_no_eos_with_zero: bool = False
    # process rewards
    token_rewards_as_adv: bool = True
    # log probabilities
    use_decoupled_loss: bool = False
    recompute_logprob: bool = False
    # ours
    advantage: Advantage = Advantage()

    _source: Source = PrivateAttr(default_factory=Source)

    def with_advantage(self, **changed: Any) -> Spec:
        """The same with other values under `actor.advantage`, unchecked."""
        return self.model_copy(update={"advantage": self.advantage.model_copy(update=changed)})

    @property
    def estimator(self) -> str:
        """`token_gae`, `turn_gae` or a dotted path."""
        chosen = self.advantage.estimator.implementation
        return f"{self.gae_timestep_unit}_gae" if chosen == "auto" else chosen

    @property
    def timestep_unit(self) -> str | None:
        """The estimator's unit; a custom one answers for its own."""
        return {"token_gae": "token", "turn_gae": "turn"}.get(self.estimator)

    @property
    def lambda_is_function(self) -> bool:
        return isinstance(self.gae_lambda, str)

    @property
    def override(self) -> bool:
        """Whether one function replaces the whole computation."""
        return self.advantage.compute.implementation != "default"

    @property
    def config(self) -> Any:
        """What plugins get as `config`: the trainer's own object if one was given, else this Spec."""
        return self if self._source.own is None else self._source.own

    def at(self, dotted: str) -> str:
        """A key's location for an error message, with file and line where known."""
        return self._source.at(dotted)


def load_config(config: Any) -> Spec:
    """The Spec of a path, a shipped recipe, a mapping (with `actor`, or the actor block), or a trainer's object."""
    if isinstance(config, Spec):
        return config
    file: str | None = None
    lines: dict[str, int] = {}
    if isinstance(config, (str, os.PathLike)):
        path = config_file.find(config)
        config, lines = config_file.read(path)
        file = path.name
        if not isinstance(config, Mapping):
            raise InvalidValue("a configuration file holds a mapping", at=file, found=type(config).__name__)
        if "actor" not in config:
            lines = {f"actor.{dotted}": line for dotted, line in lines.items()}
    try:
        actor = _actor_of(config)
        # A plain mapping cannot be read by attribute, so plugins get the Spec instead.
        plain = _is_mapping(actor) and not any(name in actor and hasattr(actor, name) for name in Spec.model_fields)
        values = _actor_values(actor, plain)
    except ConfigError:
        raise
    except Exception as error:  # an attribute or a key of the caller's own object failed
        raise InvalidValue("the configuration cannot be read", at="actor", found=error) from error
    source = Source(None if plain else actor, file, lines)
    try:
        spec = Spec.model_validate(values)
    except ValidationError as error:
        raise _ours(error, source) from None
    spec._source = source
    _check_together(spec)
    return spec


# ---- reading what was given ----


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def _is_object(value: Any) -> bool:
    """Whether something is read by its attributes."""
    plain = (str, bytes, int, float, complex, Sequence, Set, type(None))
    return not isinstance(value, plain) and not _is_mapping(value) and not callable(value)


def _actor_of(config: Any) -> Any:
    if not _is_mapping(config) and not _is_object(config):
        what = "a configuration is a path, the name of a recipe, a mapping or a config object"
        raise InvalidValue(what, found=type(config).__name__)
    if _is_mapping(config):
        actor = config["actor"] if "actor" in config else config
    else:
        actor = getattr(config, "actor", config)
    if actor is None:
        return {}
    if not _is_mapping(actor) and not _is_object(actor):
        raise InvalidValue("the actor block is no mapping", at="actor", found=shown(actor))
    return actor


def _actor_values(actor: Any, plain: bool) -> dict[str, Any]:
    """Our keys, and a plain mapping's other ones too unless they would hide an attribute of Spec."""
    values = _named(actor, Spec.model_fields)
    if plain:
        others = (key for key in actor if isinstance(key, str) and not key.startswith("_") and key not in values)
        values.update({key: actor[key] for key in others if not hasattr(Spec, key)})
    for name in ("reward_norm", "adv_norm"):
        norm = values.get(name)
        # A trainer's norm object may have attributes of its own; a mapping is written for us.
        values[name] = (_named(norm, Norm.model_fields) or norm) if _is_object(norm) else _block(norm, Norm)
    values["advantage"] = _advantage_values(values.get("advantage"))
    values["gae_lambda_kwargs"] = _copy({} if (kwargs := values.get("gae_lambda_kwargs")) is None else kwargs)
    return values


def _advantage_values(value: Any) -> Any:
    """The block as plain dicts. Null means the default for every key in it, so the nulls of known keys go."""
    block = _given({} if value is None else value, Advantage)
    if isinstance(block, dict):
        models: dict[str, type[_Model]] = {"compiled": Compiled, "shadow": Shadow}
        for name in {"compute", *STAGES, *models} & block.keys():
            block[name] = _copy(_given(block[name], models.get(name, StageChoice)))
    return block


def _given(value: Any, model: type[BaseModel]) -> Any:
    block = _block(value, model)
    if not isinstance(block, dict):
        return block
    return {key: each for key, each in block.items() if each is not None or key not in model.model_fields}


def _named(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those of the named keys or attributes that something has."""
    if _is_mapping(value):
        return {name: value[name] for name in names if name in value}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _block(value: Any, model: type[BaseModel]) -> Any:
    """All keys of a mapping or public attributes of an object, as a dict; anything else as it is."""
    if _is_mapping(value):
        return {key: value[key] for key in value.keys()}
    if not _is_object(value):
        return value
    if is_dataclass(value):
        return _named(value, [f.name for f in fields(value)])
    if isinstance(value, BaseModel):
        return _named(value, type(value).model_fields)
    public = [name for name in dir(value) if not name.startswith("_")]
    return _named(value, [n for n in public if n in model.model_fields or not callable(getattr(value, n, None))])


def _copy(value: Any, room: list[int] | None = None) -> Any:
    """Plain dicts and lists all the way down, so that no later change by the caller reaches the Spec.

    `room` holds how many more values there may be: lists that hold each other stand for more than memory has.
    """
    room = [config_file.MAX_NODES] if room is None else room
    room[0] -= 1
    if room[0] < 0:
        raise BadKwargs(f"kwargs hold more than {config_file.MAX_NODES} values")
    try:
        if _is_mapping(value):
            return {key: _copy(value[key], room) for key in value.keys()}
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple)):
            return [_copy(each, room) for each in value]
    except RecursionError:
        raise BadKwargs("kwargs contain themselves, or are nested too deeply") from None
    return value


# ---- saying what is wrong ----


def _ours(error: ValidationError, source: Source) -> ConfigError:
    """The first mistake that pydantic found, as our error."""
    first = error.errors(include_url=False)[0]
    kind, found = first["type"], shown(first["input"])
    # "[key]" is how pydantic marks a mapping's bad key; it names none where a key of the actor itself is no text.
    loc = tuple(name for name in first["loc"] if name != "[key]") or ("a key",)
    at = source.at(".".join(("actor", *map(str, loc))))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return type(cause)(cause.what, at=at, found=found, hint=cause.hint)
    if kind == "extra_forbidden":
        return UnknownKey(f"unknown key '{loc[-1]}'", at=at, hint=suggest(loc[-1], _model_at(loc[:-1]).model_fields))
    if kind == "literal_error":
        hint = suggest(first["input"], _names(_model_at(loc[:-1]), loc[-1]))
        return UnknownName(f"unknown {loc[-1]}", at=at, found=found, hint=hint)
    what = "should be a mapping" if kind in ("model_type", "dict_type") else first["msg"].removeprefix("Input ")
    mistake = BadKwargs if any("kwargs" in str(name) for name in loc) else InvalidValue
    return mistake(f"'{loc[-1]}' {what}", at=at, found=found)


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = Spec
    for name in loc:
        annotation = model.model_fields[str(name)].annotation
        model = next(x for x in (annotation, *get_args(annotation)) if isinstance(x, type) and issubclass(x, BaseModel))
    return model


def _names(model: type[BaseModel], name: int | str) -> list[str]:
    """The names that a key may have, from its Literal annotation."""
    annotation = model.model_fields[str(name)].annotation
    flat = [y for x in get_args(annotation) for y in (get_args(x) or (x,))]
    return ["null" if x is type(None) else x for x in flat]


# ---- settings that exclude or need each other ----


def _check_together(spec: Spec) -> None:
    _check_compute(spec)
    _check_process(spec)
    if spec.overlong_reward_penalty:
        _check_penalty(spec)


def _check_compute(spec: Spec) -> None:
    advantage, at = spec.advantage, spec.at("actor.advantage.compute")
    if not spec.override:
        if advantage.compute.kwargs:
            what = "the default compute takes no kwargs"
            raise BadKwargs(what, at=at, found=advantage.compute.kwargs, hint="configure its stages instead")
        return
    if "." not in advantage.compute.implementation:
        raise UnknownName(
            "unknown compute implementation",
            at=at,
            found=shown(advantage.compute.implementation),
            hint="default, or the dotted path of a function",
        )
    for stage in STAGES:
        if stage in advantage.model_fields_set:
            what = f"a full override of the computation cannot be combined with '{stage}'"
            raise ConflictingSettings(what, at=spec.at(f"actor.advantage.{stage}"), hint=f"{stage}: null")
    if advantage.rules == "strict":
        what = "rules belong to the default computation, and a full override replaces it"
        raise ConflictingSettings(what, at=spec.at("actor.advantage.rules"), found="strict", hint="rules: default")


def _check_process(spec: Spec) -> None:
    choice, at = spec.advantage.process_adv_shaping, spec.at("actor.advantage.process_adv_shaping")
    if choice.implementation == "auto" and choice.kwargs:
        hint = "name an implementation: additive, gvpo, process_weighted or a dotted path"
        raise BadKwargs("process auto takes no kwargs", at=at, found=choice.kwargs, hint=hint)
    if choice.implementation in ("gvpo", "process_weighted") and not spec.token_rewards_as_adv:
        what = f"{choice.implementation} needs token rewards as advantages"
        raise ConflictingSettings(what, at=at, found="token_rewards_as_adv: false", hint="token_rewards_as_adv: true")
    if choice.implementation == "process_weighted" and spec.mask_no_eos_with_zero:
        what = "process_weighted excludes mask_no_eos_with_zero"
        raise ConflictingSettings(what, at=at, found="mask_no_eos_with_zero: true", hint="mask_no_eos_with_zero: false")


def _check_penalty(spec: Spec) -> None:
    """The penalty's parameters matter only when it is on."""
    for name in ("overlong_tokens", "overlong_penalty_factor", "max_new_tokens"):
        value = getattr(spec, name)
        if value is None or (name != "overlong_penalty_factor" and value < 1):
            what = f"overlong_reward_penalty needs {'a' if value is None else 'a positive'} '{name}'"
            raise InvalidValue(what, at=spec.at(f"actor.{name}"), found="null" if value is None else value)
