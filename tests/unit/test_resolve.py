"""Resolving: built-in names, dotted paths, keyword arguments, and AReaL's module names."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import compiled_adv.advantage
from compiled_adv.errors import BadKwargs, InvalidValue, PluginNotFound, UnknownName
from compiled_adv.resolve import BUILT_IN, areal_names, check_kwargs, resolve_path, resolve_spec
from compiled_adv.spec import load_config

STAGES = tuple(BUILT_IN)
NAN, INF = float("nan"), float("inf")

MODULE = """
    COUNT = []
    NUMBER = 3

    def plain(inputs): return "plain"
    def scale(inputs, *, factor, shift=0.0): return (factor, shift)
    def anything(inputs, **kwargs): return kwargs
    def nothing(): ...
    def two(a, b): ...
    def lam(context, *, slope): return slope

    class Shaper:
        @staticmethod
        def shape(inputs, *, factor=1.0): return factor
        @classmethod
        def of_class(cls, inputs): return cls.__name__
        def unbound(self, inputs): ...

    class Callable:
        def __call__(self, inputs, *, factor=1.0): return factor

    instance = Callable()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a module importable under a name of its own, and forgets it after the test."""
    names = []

    def make(source: str = MODULE, name: str = "plugins_of_this_test") -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        names.append(name)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    roots = {name.split(".")[0] for name in names}
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]


def resolve(config: dict[str, Any]):
    return resolve_spec(load_config(config))


def stage(slot: str, implementation: str | None, **kwargs: Any) -> dict[str, Any]:
    return {"advantage": {slot: {"implementation": implementation, "kwargs": kwargs}}}


# ---- built-in names ----


def test_by_default_nothing_of_the_users_is_resolved():
    resolved = resolve({})
    assert (resolved.compute, resolved.outcome, resolved.estimator, resolved.lambda_fn) == (None, None, None, None)
    assert (resolved.process, resolved.process_kwargs) == (None, {})


@pytest.mark.parametrize("slot, name", [(slot, name) for slot in STAGES for name in BUILT_IN[slot]])
def test_every_built_in_name_is_known_in_its_stage(slot, name):
    resolved = resolve(stage(slot, name))
    assert resolved.process == (name if slot == "process_adv_shaping" else None)


@pytest.mark.parametrize("slot, name", [("estimator", "gvpo"), ("outcome_reward_shaping", "additive")])
def test_a_built_in_of_another_stage_is_unknown(slot, name):
    with pytest.raises(UnknownName, match=f"actor.advantage.{slot}"):
        resolve(stage(slot, name))


@pytest.mark.parametrize(
    "slot, typo, meant",
    [
        ("outcome_reward_shaping", "identiy", "identity"),
        ("estimator", "Turn_GAE", "turn_gae"),
        ("process_adv_shaping", "gppo", "gvpo"),
    ],
)
def test_a_mistyped_name_is_refused_with_the_nearest(slot, typo, meant):
    with pytest.raises(UnknownName, match=rf"found '{typo}'\n  try   {meant}"):
        resolve(stage(slot, typo))


@pytest.mark.parametrize(
    "slot, name",
    [(slot, name) for slot in STAGES for name in BUILT_IN[slot] if name != "gvpo"]
    + [("outcome_reward_shaping", "auto"), ("estimator", None)],
)
def test_a_built_in_without_parameters_takes_no_kwargs(slot, name):
    with pytest.raises(BadKwargs, match=f"actor.advantage.{slot}.kwargs"):
        resolve(stage(slot, name, factor=1.0))


def test_explicit_gvpo_kwargs_are_kept_and_the_others_left_to_the_call():
    assert resolve(stage("process_adv_shaping", "gvpo", negative_scale=0.5)).process_kwargs == {"negative_scale": 0.5}


def test_an_unknown_gvpo_kwarg_is_refused_with_the_nearest():
    with pytest.raises(BadKwargs, match="try   zero_penalty"):
        resolve(stage("process_adv_shaping", "gvpo", zero_penelty=0.5))


@pytest.mark.parametrize("name", ["negative_scale", "zero_penalty", "zero_eps"])
@pytest.mark.parametrize("value", [-0.1, NAN, INF, True, "0.5", None])
def test_a_gvpo_kwarg_is_a_finite_number_of_at_least_zero(name, value):
    with pytest.raises(InvalidValue, match=f"'{name}'"):
        resolve(stage("process_adv_shaping", "gvpo", **{name: value}))


def test_gvpo_kwargs_may_be_zero():
    assert resolve(stage("process_adv_shaping", "gvpo", zero_eps=0)).process_kwargs == {"zero_eps": 0}


# ---- dotted paths ----


@pytest.mark.parametrize(
    "slot, attribute",
    [("outcome_reward_shaping", "outcome"), ("estimator", "estimator"), ("process_adv_shaping", "process")],
)
def test_every_stage_takes_a_dotted_path_with_kwargs(package, slot, attribute):
    path = f"{package()}.scale"
    plugin = getattr(resolve(stage(slot, path, factor=2.0)), attribute)
    assert (plugin.slot, plugin.path, plugin.kwargs) == (slot, path, {"factor": 2.0})
    assert plugin.fn("inputs", **plugin.kwargs) == (2.0, 0.0)


def test_the_whole_computation_takes_a_dotted_path_with_kwargs(package):
    plugin = resolve(stage("compute", f"{package()}.scale", factor=2.0)).compute
    assert (plugin.slot, plugin.fn(None, **plugin.kwargs)) == ("compute", (2.0, 0.0))


@pytest.mark.parametrize(
    "path, gives", [("Shaper.shape", 1.0), ("Shaper.of_class", "Shaper"), ("instance", 1.0), ("plain", "plain")]
)
def test_a_path_may_lead_to_a_function_a_method_or_a_callable_object(package, path, gives):
    assert resolve_path(f"{package()}.{path}", at="here")(None) == gives


def test_a_path_may_lead_into_a_package(package):
    package("def f(inputs): return 'deep'", "plugins_of_this_test.inner.deep")
    assert resolve_path("plugins_of_this_test.inner.deep.f", at="here")(None) == "deep"


def test_a_module_is_imported_once_however_often_it_is_named(package):
    name = package("import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\ndef f(inputs): ...")
    try:
        first = resolve_path(f"{name}.f", at="here")
        assert resolve_path(f"{name}.f", at="here") is first
        assert sys.modules["builtins"].times == 1
    finally:
        del sys.modules["builtins"].times


@pytest.mark.parametrize("path", ["no_such_module_at_all.f", "no_such_module_at_all.inner.f"])
def test_a_path_to_no_module_is_refused_with_the_path(path):
    with pytest.raises(PluginNotFound, match=f"found {path}"):
        resolve(stage("estimator", path))


def test_a_mistyped_function_is_refused_with_the_nearest(package):
    with pytest.raises(PluginNotFound, match="has no 'scael'(?s:.)*try   scale"):
        resolve(stage("estimator", f"{package()}.scael"))


def test_a_mistyped_method_is_refused_with_the_nearest(package):
    with pytest.raises(PluginNotFound, match="Shaper' has no 'shpae'(?s:.)*try   shape"):
        resolve(stage("estimator", f"{package()}.Shaper.shpae"))


def test_a_mistyped_module_of_a_package_is_refused_with_the_nearest(package):
    package("def f(inputs): ...", "plugins_of_this_test.estimators")
    with pytest.raises(PluginNotFound, match="has no 'estimator'(?s:.)*try   estimators"):
        resolve_path("plugins_of_this_test.estimator.f", at="here")


@pytest.mark.parametrize("path", ["Shaper", "NUMBER"])
def test_a_path_to_no_function_is_refused(package, path):
    with pytest.raises(PluginNotFound, match=path):
        resolve_path(f"{package()}.{path}", at="here")


@pytest.mark.parametrize("path", ["a..b", ".a", "a.", "a.b c", "a.<lambda>", "f.<locals>.g", "a/b.c", "1.5"])
def test_what_is_no_dotted_path_is_refused(path):
    with pytest.raises(PluginNotFound):
        resolve(stage("estimator", path))


def test_a_function_of_the_main_script_is_refused_since_workers_have_another_one():
    with pytest.raises(PluginNotFound, match="main script"):
        resolve(stage("estimator", "__main__.f"))


@pytest.mark.parametrize(
    "source, error",
    [
        ("import a_module_that_is_not_there", ModuleNotFoundError),
        ("from os import no_such_name", ImportError),
        ("1 / 0", ZeroDivisionError),
        ("def f(:", SyntaxError),
    ],
)
def test_a_module_that_fails_on_import_is_reported_with_its_own_error(package, source, error):
    name = package(source)
    with pytest.raises(PluginNotFound, match=f"importing '{name}' failed") as caught:
        resolve(stage("estimator", f"{name}.f"))
    assert isinstance(caught.value.__cause__, error)


def test_a_wrong_path_is_located_in_the_configuration(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("actor:\n  advantage:\n    estimator:\n      implementation: no_such_module.f\n")
    with pytest.raises(PluginNotFound, match=r"actor.advantage.estimator.implementation \(mine.yaml:4\)"):
        resolve_spec(load_config(path))


def test_the_next_valid_configuration_works_after_a_refusal(package):
    name = package()
    with pytest.raises(PluginNotFound):
        resolve(stage("estimator", f"{name}.nope"))
    assert resolve(stage("estimator", f"{name}.plain")).estimator.fn(None) == "plain"


def test_a_spawned_worker_resolves_from_the_json_configuration_alone(package, tmp_path):
    config = json.dumps(stage("outcome_reward_shaping", f"{package()}.scale", factor=0.5))
    code = (
        "import json, sys; from compiled_adv.resolve import resolve_spec; from compiled_adv.spec import load_config\n"
        "plugin = resolve_spec(load_config(json.loads(sys.argv[1]))).outcome\n"
        "print(plugin.fn(None, **plugin.kwargs))"
    )
    root = Path(compiled_adv.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(root), str(tmp_path)))}
    worker = subprocess.run([sys.executable, "-c", code, config], env=env, capture_output=True, text=True)
    assert worker.stdout.strip() == "(0.5, 0.0)", worker.stderr


# ---- keyword arguments ----


def test_a_kwarg_that_the_signature_does_not_know_is_refused_with_the_nearest(package):
    with pytest.raises(BadKwargs, match="takes no 'facter'(?s:.)*try   factor"):
        resolve(stage("estimator", f"{package()}.scale", facter=1.0))


def test_a_missing_argument_is_refused(package):
    with pytest.raises(BadKwargs, match="'factor'"):
        resolve(stage("estimator", f"{package()}.scale"))


def test_the_inputs_cannot_be_given_as_a_kwarg(package):
    with pytest.raises(BadKwargs, match="inputs"):
        resolve(stage("estimator", f"{package()}.anything", inputs=1))


def test_a_function_with_open_kwargs_takes_any(package):
    plugin = resolve(stage("estimator", f"{package()}.anything", whatever=[1, None, {"a": True}])).estimator
    assert plugin.fn(None, **plugin.kwargs) == {"whatever": [1, None, {"a": True}]}


@pytest.mark.parametrize("path", ["nothing", "two", "Shaper.unbound"])
def test_a_function_that_cannot_take_one_input_is_refused(package, path):
    with pytest.raises(BadKwargs, match="cannot be called"):
        resolve(stage("estimator", f"{package()}.{path}"))


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1, 2}, NAN, INF, -INF, print, object(), b"x", 1j, {1: 2}, [[(1,)]], {"a": {"b": NAN}}],
)
def test_a_kwarg_that_json_cannot_carry_is_refused(package, value):
    with pytest.raises(BadKwargs):
        resolve(stage("estimator", f"{package()}.anything", x=value))


@pytest.mark.parametrize("value", [1, 1.5, "x", True, None, [], {}, [1, [2.0]], {"a": {"b": [None]}}])
def test_a_kwarg_that_json_carries_is_accepted(package, value):
    assert resolve(stage("estimator", f"{package()}.anything", x=value)).estimator.kwargs == {"x": value}


def test_a_function_without_a_signature_is_taken_at_its_word():
    check_kwargs(dict.fromkeys, {}, at="here")
    check_kwargs(max, {"default": 1}, at="here")


def test_a_plugins_kwargs_are_its_own(package):
    spec = load_config(stage("estimator", f"{package()}.anything", table=[1]))
    resolve_spec(spec).estimator.kwargs["table"].append(2)
    assert spec.advantage.estimator.kwargs == {"table": [1]}
    assert resolve_spec(spec).estimator.kwargs == {"table": [1]}


# ---- lambda functions ----


@pytest.mark.parametrize("name", ["vapo_length_adaptive_gae", "relative_position_gae_lambda", "constant_gae_lambda"])
def test_a_bare_built_in_lambda_is_refused_with_the_path_to_write(name):
    with pytest.raises(UnknownName, match=f"try   compiled_adv.gae.{name}"):
        resolve({"gae_lambda": name})


@pytest.mark.parametrize("name", ["mine", "", "0,95"])
def test_another_bare_name_for_a_lambda_is_refused_with_the_built_in_paths(name):
    with pytest.raises(UnknownName, match="compiled_adv.gae.vapo_length_adaptive_gae"):
        resolve({"gae_lambda": name})


def test_a_lambda_function_is_resolved_with_its_kwargs(package):
    plugin = resolve({"gae_lambda": f"{package()}.lam", "gae_lambda_kwargs": {"slope": 0.5}}).lambda_fn
    assert (plugin.slot, plugin.fn(None, **plugin.kwargs)) == ("gae_lambda", 0.5)


def test_a_wrong_lambda_path_is_refused_at_build():
    with pytest.raises(PluginNotFound, match="actor.gae_lambda(?s:.)*try   vapo_length_adaptive_gae"):
        resolve({"gae_lambda": "compiled_adv.gae.vapo_length_adaptive"})


def test_an_unknown_lambda_kwarg_is_refused_at_build(package):
    with pytest.raises(BadKwargs, match="actor.gae_lambda_kwargs"):
        resolve({"gae_lambda": f"{package()}.lam", "gae_lambda_kwargs": {"slop": 0.5}})


@pytest.mark.parametrize("kwargs", [{"alpha": 0.5}, {"x": NAN}, {"x": object()}])
def test_lambda_kwargs_beside_a_number_are_ignored(kwargs):
    assert resolve({"gae_lambda": 0.5, "gae_lambda_kwargs": kwargs}).lambda_fn is None


@pytest.mark.parametrize(
    "name, kwargs",
    [("vapo_length_adaptive_gae", {"alpha": value}) for value in (0, -1.0, True, "1", None)]
    + [("relative_position_gae_lambda", {"q": value}) for value in (0, -0.5, 1.5, True, "1", None)]
    + [("constant_gae_lambda", {"value": value}) for value in (True, "1", None)],
)
def test_a_built_in_lambdas_parameter_out_of_range_is_refused_at_build(name, kwargs):
    with pytest.raises(InvalidValue, match="actor.gae_lambda_kwargs"):
        resolve({"gae_lambda": f"compiled_adv.gae.{name}", "gae_lambda_kwargs": kwargs})


@pytest.mark.parametrize("name", ["vapo_length_adaptive_gae", "relative_position_gae_lambda", "constant_gae_lambda"])
def test_a_built_in_lambda_without_its_parameter_is_refused_at_build(name):
    with pytest.raises(BadKwargs, match="missing"):
        resolve({"gae_lambda": f"compiled_adv.gae.{name}"})


# ---- a plugin written for AReaL ----

AREAL_PLUGIN = """
    from areal.trainer.ppo.advantage import OutcomeResult, OutcomeRewardInputs, ProcessAdvantageInputs
    from areal.trainer.ppo.advantage import AdvantageInputs, AdvantageResult
    from areal.trainer.ppo.advantage_algorithms import TemporalInputs, TemporalResult
    from areal.trainer.ppo.gae import GAELambdaContext, GAELambdaInputs, compute_gae_lambda
    from areal.trainer.ppo.lambda_fn import GAELambdaContext as FromLambdaFn, vapo_length_adaptive_gae
    import areal.trainer.ppo.gae as bound

    def scale_outcome(inputs: OutcomeRewardInputs, *, factor: float) -> OutcomeResult:
        return OutcomeResult(rewards=inputs.data["rewards"] * factor)
"""

without_areal = pytest.mark.skipif(importlib.util.find_spec("areal") is not None, reason="AReaL is installed here")


def _areal_left() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "areal"]


@without_areal
def test_a_plugin_that_imports_from_areal_gets_our_contracts(package):
    plugin = resolve(stage("outcome_reward_shaping", f"{package(AREAL_PLUGIN)}.scale_outcome", factor=0.5)).outcome
    inputs = compiled_adv.advantage.OutcomeRewardInputs({"rewards": 4.0}, None, None)
    result = plugin.fn(inputs, **plugin.kwargs)
    assert isinstance(result, compiled_adv.advantage.OutcomeResult) and result.rewards == 2.0


@without_areal
def test_a_module_that_a_plugin_bound_from_areal_stays_usable(package):
    name = package(AREAL_PLUGIN)
    resolve_path(f"{name}.scale_outcome", at="here")
    assert sys.modules[name].bound.compute_gae_lambda is importlib.import_module("compiled_adv.gae").compute_gae_lambda


@without_areal
def test_a_lambda_path_of_areals_leads_to_ours():
    config = {"gae_lambda": "areal.trainer.ppo.lambda_fn.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 1}}
    assert resolve(config).lambda_fn.fn is importlib.import_module("compiled_adv.gae").vapo_length_adaptive_gae


@without_areal
@pytest.mark.parametrize("source", [AREAL_PLUGIN, AREAL_PLUGIN + "\n    1 / 0"])
def test_no_trace_of_areal_is_left_once_the_path_is_imported_or_has_failed(package, source):
    finders = [*sys.meta_path]
    try:
        resolve_path(f"{package(source)}.scale_outcome", at="here")
    except PluginNotFound:
        pass
    assert (_areal_left(), sys.meta_path, importlib.util.find_spec("areal")) == ([], finders, None)


@without_areal
def test_our_own_modules_keep_their_identity_under_areals_names():
    spec = compiled_adv.advantage.__spec__
    with areal_names():
        importlib.import_module("areal.trainer.ppo.advantage")
    assert compiled_adv.advantage.__spec__ is spec and compiled_adv.advantage.__name__ == "compiled_adv.advantage"


@without_areal
def test_what_areal_has_and_we_have_not_is_reported_as_missing(package):
    name = package("from areal.utils import logging\ndef f(inputs): ...")
    with pytest.raises(PluginNotFound, match="areal.utils"):
        resolve_path(f"{name}.f", at="here")


@without_areal
def test_an_areal_that_is_there_is_never_shadowed(package):
    package("class OutcomeResult: real = True", "areal.trainer.ppo.advantage")
    name = package("from areal.trainer.ppo.advantage import OutcomeResult\ndef f(inputs): return OutcomeResult.real")
    assert resolve_path(f"{name}.f", at="here")(None) is True
    assert "areal.trainer.ppo.advantage" in sys.modules


@without_areal
def test_a_real_areal_keeps_no_attribute_of_ours(package):
    for level in ("areal", "areal.trainer", "areal.trainer.ppo"):
        package("", f"{level}.__init__")
    name = package(AREAL_PLUGIN)
    resolve_path(f"{name}.scale_outcome", at="here")
    ppo = importlib.import_module("areal.trainer.ppo")
    assert not hasattr(ppo, "advantage") and "areal.trainer.ppo.advantage" not in sys.modules


@without_areal
def test_areals_names_last_until_the_last_of_several_threads_is_done():
    ours_done, others_in = threading.Event(), threading.Event()
    found = []

    def other():
        with areal_names():
            others_in.set()
            ours_done.wait(10)
            found.append(importlib.import_module("areal.trainer.ppo.gae"))

    thread = threading.Thread(target=other)
    with areal_names():
        thread.start()
        others_in.wait(10)
    ours_done.set()
    thread.join(10)
    assert len(found) == 1 and _areal_left() == []
