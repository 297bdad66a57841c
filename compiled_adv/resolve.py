"""Takes names and dotted paths of a Spec; gives the functions behind them. The only place where names are looked up."""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import inspect
import math
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from compiled_adv.errors import BadKwargs, InvalidValue, PluginNotFound, UnknownName, shown, suggest
from compiled_adv.gae import BUILT_IN_LAMBDAS, GAELambdaContext
from compiled_adv.plugins import check_slot
from compiled_adv.scalars import is_finite
from compiled_adv.spec import Spec, StageChoice

# What a shadow may run against beside a dotted path.
OPINIONS = ("eager", "reference")

BUILT_IN = {
    "outcome_reward_shaping": ("identity",),
    "estimator": ("token_gae", "turn_gae"),
    "process_adv_shaping": ("additive", "gvpo", "process_weighted"),
}
GVPO_KWARGS = ("negative_scale", "zero_penalty", "zero_eps")

MAX_KWARGS_DEPTH = 64


@dataclass
class Place:
    """Where a user's function runs under the compiled backend, and why it is no part of the Program."""

    where: str = "eager"  # "program": in it; "compiled" or "eager": between two segments, at the batch's own shape
    why: str = ""
    line: str = ""  # of the user's code
    hint: str = ""

    def __str__(self) -> str:
        why = f"{self.why} ({self.line})" if self.line else self.why
        return f"{self.where}: {why}" if why else self.where


@dataclass(frozen=True)
class Plugin:
    """A user's function: where it is configured, its path, itself, and keyword arguments of its own."""

    slot: str
    path: str
    fn: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""  # for error messages
    place: Place = field(default_factory=Place)
    # The same function, compiled and proven to write nothing; None from it: it gave up, and the function itself serves.
    exact: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Resolved:
    """Every name of a Spec looked up. None stands for the default of its slot."""

    compute: Plugin | None  # a replacement of the whole computation
    outcome: Plugin | None  # None: identity
    estimator: Plugin | None  # None: the built-in one of Spec.estimator
    process: Plugin | str | None  # a plugin, the name of an explicit built-in, or None: follows the call
    process_kwargs: Mapping[str, float]  # explicit gvpo kwargs
    lambda_fn: Plugin | None  # None: a number
    shadow: Plugin | None = None  # None: no second opinion, or one of ours


def resolve_spec(spec: Spec) -> Resolved:
    """Look up every name; a wrong path or kwarg fails here, in every worker that builds."""
    chosen = spec.advantage
    compute = _plugin(spec, "compute", chosen.compute) if spec.override else None
    shaping = chosen.process_adv_shaping
    process: Plugin | str | None = _stage(spec, "process_adv_shaping", shaping)
    if process is None and shaping.implementation != "auto":
        process = shaping.implementation
    return Resolved(
        compute=compute,
        outcome=_stage(spec, "outcome_reward_shaping", chosen.outcome_reward_shaping),
        estimator=_stage(spec, "estimator", chosen.estimator),
        process=process,
        process_kwargs=dict(shaping.kwargs) if process == "gvpo" else {},
        lambda_fn=_lambda(spec),
        shadow=_shadow(spec),
    )


def resolve_path(path: str, *, at: str) -> Callable[..., Any]:
    """The function at a dotted path `package.module.function` (or `....Class.function`)."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise PluginNotFound("this is no dotted path of a function", at=at, found=shown(path))
    if parts[0] == "__main__":
        # Workers have another __main__.
        what = "a function of the main script cannot be found by a worker"
        raise PluginNotFound(what, at=at, found=path, hint="move it to a module that every worker can import")
    found, names = _import_longest(parts, path, at)
    for i, name in enumerate(names):
        try:
            found = getattr(found, name)
        except Exception as error:  # a module may look names up by a function of its own
            what = f"'{'.'.join(parts[: len(parts) - len(names) + i])}' has no '{name}'"
            hint = suggest(name, _public(found))
            raise PluginNotFound(what, at=at, found=f"{path}: {error}", hint=hint) from error
    if not callable(found) or inspect.isclass(found):
        what = "a dotted path leads to a function"
        raise PluginNotFound(what, at=at, found=f"{path} is {'a class' if inspect.isclass(found) else shown(found)}")
    return found


def check_kwargs(fn: Callable[..., Any], kwargs: Mapping[str, Any], *, at: str, n_positional: int = 1) -> None:
    """Refuse kwargs that JSON cannot carry, that the function does not take, or that it misses."""
    check_json(kwargs, at=at)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    parameters = [*signature.parameters.values()]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in parameters[n_positional:] if p.kind in by_keyword]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for name in kwargs:
        if name not in known and not takes_any:
            raise BadKwargs(f"the function takes no '{name}'", at=at, found=str(signature), hint=suggest(name, known))
    try:
        signature.bind(*[None] * n_positional, **kwargs)
    except TypeError as error:
        raise BadKwargs(f"the function cannot be called so: {error}", at=at, found=str(signature)) from None


def check_json(value: Any, *, at: str, depth: int = 0) -> None:
    """Refuse what would not survive a way through JSON unchanged."""
    if depth > MAX_KWARGS_DEPTH:
        raise BadKwargs("kwargs are nested too deeply", at=at)
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise BadKwargs("a key in kwargs is not a string", at=at, found=shown(key))
            check_json(each, at=f"{at}.{key}", depth=depth + 1)
    elif isinstance(value, list):
        for i, each in enumerate(value):
            check_json(each, at=f"{at}[{i}]", depth=depth + 1)
    elif type(value) not in (str, int, bool, float, type(None)) or (type(value) is float and not math.isfinite(value)):
        what = "kwargs hold only what JSON can carry: finite numbers, strings, booleans, null, lists and mappings"
        raise BadKwargs(what, at=at, found=f"{shown(value)} ({type(value).__name__})")


# ---- the slots of a Spec ----


def _stage(spec: Spec, slot: str, choice: StageChoice) -> Plugin | None:
    """A stage's plugin; None for `auto` and for a built-in, whose kwargs are checked."""
    name = choice.implementation
    if name != "auto" and name not in BUILT_IN[slot]:
        if "." not in name:
            at = spec.at(f"actor.advantage.{slot}.implementation")
            hint = suggest(name, ("auto", *BUILT_IN[slot])) + ", or the dotted path of a function"
            raise UnknownName(f"unknown implementation of {slot}", at=at, found=shown(name), hint=hint)
        return _plugin(spec, slot, choice)
    at = spec.at(f"actor.advantage.{slot}.kwargs")
    known = GVPO_KWARGS if name == "gvpo" else ()
    for key, value in choice.kwargs.items():
        if key not in known:
            hint = suggest(key, known) if known else "kwargs: {}"
            raise BadKwargs(f"'{name}' takes no '{key}'", at=at, hint=hint)
        if not is_finite(value) or value < 0:
            raise InvalidValue(f"'{key}' must be a finite number of at least 0", at=at, found=shown(value))
    return None


def _plugin(spec: Spec, slot: str, choice: StageChoice) -> Plugin:
    where = f"actor.advantage.{slot}"
    fn = resolve_path(choice.implementation, at=spec.at(f"{where}.implementation"))
    check_slot(fn, slot, at=spec.at(f"{where}.implementation"))
    check_kwargs(fn, choice.kwargs, at=spec.at(f"{where}.kwargs"))
    return Plugin(slot, choice.implementation, fn, copy.deepcopy(choice.kwargs), spec.at(where))


def _lambda(spec: Spec) -> Plugin | None:
    path, at = spec.gae_lambda, spec.at("actor.gae_lambda")
    if not isinstance(path, str):
        return None  # gae_lambda_kwargs beside a number are ignored
    built_in = {fn.__name__: f"{fn.__module__}.{fn.__name__}" for fn in BUILT_IN_LAMBDAS}
    if "." not in path:
        hint = built_in.get(path) or f"a number, the dotted path of a function, or {', '.join(built_in.values())}"
        raise UnknownName("a lambda function is given by its dotted path", at=at, found=shown(path), hint=hint)
    fn, kwargs_at = resolve_path(path, at=at), spec.at("actor.gae_lambda_kwargs")
    check_kwargs(fn, spec.gae_lambda_kwargs, at=kwargs_at)
    if fn in BUILT_IN_LAMBDAS:
        # They check their own numbers; one row of one step shows a bad one now.
        one = torch.ones(1, dtype=torch.int64)
        context = GAELambdaContext(effective_token_lengths=one, turn_counts=one, timestep_lengths=one)
        try:
            fn(context, **spec.gae_lambda_kwargs)
        except InvalidValue as error:
            raise InvalidValue(error.what, at=kwargs_at, found=error.found) from None
    return Plugin("gae_lambda", path, fn, copy.deepcopy(spec.gae_lambda_kwargs), at)


def _shadow(spec: Spec) -> Plugin | None:
    chosen, at = spec.advantage.shadow, spec.at("actor.advantage.shadow.against")
    if chosen is None or chosen.against in OPINIONS:
        return None
    if "." not in chosen.against:
        hint = suggest(chosen.against, OPINIONS) + ", or the dotted path of a function of AdvantageInputs"
        raise UnknownName("unknown second opinion", at=at, found=shown(chosen.against), hint=hint)
    fn = resolve_path(chosen.against, at=at)
    check_kwargs(fn, {}, at=at)
    return Plugin("shadow", chosen.against, fn, at=at)


# ---- importing ----


def _import_longest(parts: list[str], path: str, at: str) -> tuple[Any, list[str]]:
    """The module at the longest importable prefix, and the names that remain."""
    for n in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:n])
        try:
            with areal_names():
                return importlib.import_module(name), parts[n:]
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
                continue  # this prefix is no module; a shorter one may be, with the function inside a class
            what = f"importing '{name}' failed"
            raise PluginNotFound(what, at=at, found=f"{type(error).__name__}: {error}") from error
    hint = f"'{parts[0]}' must be importable in every worker"
    raise PluginNotFound(f"there is no module '{parts[0]}'", at=at, found=path, hint=hint)


def _public(owner: Any) -> list[str]:
    """Names for a hint: attributes, and modules of a package that are not imported yet."""
    modules = [module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", []))]
    return [name for name in sorted({*dir(owner), *modules}) if not name.startswith("_")]


# What a plugin written for AReaL imports, and which module of ours gives it; None is a package around them.
_AREAL: dict[str, str | None] = {
    "areal": None,
    "areal.trainer": None,
    "areal.trainer.ppo": None,
    "areal.trainer.ppo.advantage": "compiled_adv.advantage",
    "areal.trainer.ppo.advantage_algorithms": "compiled_adv.advantage_algorithms",
    "areal.trainer.ppo.gae": "compiled_adv.gae",
    "areal.trainer.ppo.lambda_fn": "compiled_adv.gae",
}


class _ArealNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for AReaL's module names with copies of our namespaces. Asked last, so a real AReaL wins."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _AREAL:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=_AREAL[name] is None)

    def exec_module(self, module: ModuleType) -> None:
        ours = _AREAL[module.__name__]
        if ours is not None:
            names = vars(importlib.import_module(ours))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


_finder = _ArealNames()
_lock = threading.RLock()
_users = 0


@contextmanager
def areal_names() -> Iterator[None]:
    """While it lasts, AReaL's module names that nothing else provides lead to ours; then no trace of them is left."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            sys.meta_path.append(_finder)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.meta_path.remove(_finder)
                for name in reversed(_AREAL):
                    _forget(name)


def _forget(name: str) -> None:
    module = sys.modules.get(name)
    if module is not None and getattr(module.__spec__, "loader", None) is _finder:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        package = sys.modules.get(parent)
        # The import left it as an attribute too, which matters where the package is a real one.
        if package is not None and vars(package).get(child) is module:
            delattr(package, child)


def resolve_pass(path: str, known: Iterable[str], *, at: str) -> Any:
    """A user's own pass at a dotted path."""
    if "." not in path:
        raise UnknownName("unknown pass", at=at, found=shown(path), hint=suggest(path, known))
    found, names = _import_longest(path.split("."), path, at)
    for name in names:
        if not hasattr(found, name):
            hint = suggest(name, _public(found))
            raise PluginNotFound(f"there is no '{name}' at this path", at=at, found=path, hint=hint)
        found = getattr(found, name)
    if not hasattr(found, "rules"):
        raise PluginNotFound("this path leads to no Pass", at=at, found=f"{path} is {shown(found)}")
    return found
