"""Parsing: what a configuration may say, its defaults, and where an error says it stands."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from compiled_adv import config_file
from compiled_adv.errors import (
    BadKwargs,
    ConfigNotFound,
    ConflictingSettings,
    InvalidValue,
    UnknownKey,
    UnknownName,
)
from compiled_adv.spec import Norm, Spec, load_config

DEFAULTS = dict(
    discount=1.0,
    gae_lambda=1.0,
    gae_lambda_kwargs={},
    gae_timestep_unit="token",
    kl_ctl=0.1,
    kl_estimator="k1",
    reward_bias=0.0,
    reward_scaling=1.0,
    reward_clip=20.0,
    reward_norm=None,
    adv_norm=None,
    overlong_reward_penalty=False,
    overlong_tokens=None,
    overlong_penalty_factor=None,
    max_new_tokens=1024,
    mask_no_eos_with_zero=False,
    token_rewards_as_adv=True,
    use_decoupled_loss=False,
    recompute_logprob=False,
)
NORM_DEFAULTS = dict(
    mean_level="batch", mean_leave1out=False, std_level="batch", std_unbiased=True, group_size=1, eps=1e-5
)
PENALTY = dict(overlong_reward_penalty=True, overlong_tokens=8, overlong_penalty_factor=0.5)
NAN, INF = float("nan"), float("inf")


def advantage(**block: Any) -> dict[str, Any]:
    return {"actor": {"advantage": block}}


def chosen(stage: str, implementation: str, **kwargs: Any) -> dict[str, Any]:
    return {stage: {"implementation": implementation, "kwargs": kwargs}}


# ---- defaults ----


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_empty_actor_block_has_the_listed_default(name):
    assert getattr(load_config({"actor": {}}), name) == DEFAULTS[name]


@pytest.mark.parametrize("name", NORM_DEFAULTS)
@pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
def test_an_empty_norm_block_has_the_listed_default(norm, name):
    assert getattr(getattr(load_config({norm: {}}), norm), name) == NORM_DEFAULTS[name]


@pytest.mark.parametrize("block", [None, {}, {"compute": None}, {"compute": {}}, {"compute": {"implementation": None}}])
def test_a_missing_or_null_choice_of_compute_is_the_default_computation(block):
    spec = load_config({"advantage": block})
    assert spec.advantage.compute.implementation == "default"
    assert not spec.override


@pytest.mark.parametrize("choice", [None, {}, {"implementation": None}, {"implementation": "auto"}, {"kwargs": None}])
@pytest.mark.parametrize("stage", ["outcome_reward_shaping", "estimator", "process_adv_shaping"])
def test_null_and_auto_select_a_stages_default(stage, choice):
    read = getattr(load_config(advantage(**{stage: choice})).advantage, stage)
    assert (read.implementation, read.kwargs) == ("auto", {})


@pytest.mark.parametrize("rules", [{}, {"rules": None}, {"rules": "default"}])
def test_rules_are_default_when_absent_or_null(rules):
    assert load_config(advantage(**rules)).advantage.rules == "default"


def test_gae_lambda_kwargs_may_be_null():
    assert load_config({"gae_lambda_kwargs": None}).gae_lambda_kwargs == {}


# ---- where a configuration may come from ----


def test_an_actor_block_is_read_with_and_without_its_key():
    assert load_config({"discount": 0.5}) == load_config({"actor": {"discount": 0.5}})


def test_an_actor_block_may_be_null():
    assert load_config({"actor": None}) == load_config({})


def test_keys_beside_the_actor_block_are_the_trainers_own():
    assert load_config({"actor": {}, "rollout": {"n": 8}, "discount": 0.1}).discount == 1.0


def test_a_spec_is_taken_as_it_is():
    spec = load_config({})
    assert load_config(spec) is spec


def test_the_shipped_default_recipe_holds_the_defaults():
    assert load_config("default") == load_config({})


def test_an_unknown_recipe_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigNotFound, match=r"try   default"):
        load_config("defualt")


@pytest.mark.parametrize("name", ["no/such/file.yaml", Path("default"), "x" * 5000, ""])
def test_what_is_neither_a_file_nor_a_recipe_is_refused(name):
    with pytest.raises(ConfigNotFound):
        load_config(name)


def test_a_folder_is_no_configuration(tmp_path):
    with pytest.raises(ConfigNotFound):
        load_config(tmp_path)


@pytest.mark.parametrize("config", [None, 5, 1.5, True, b"actor", [1], ({},), {1}, Spec])
def test_what_is_no_configuration_at_all_is_refused(config):
    with pytest.raises(InvalidValue, match="a configuration is a path"):
        load_config(config)


@pytest.mark.parametrize("actor", [5, "grpo", [1]])
def test_an_actor_that_is_no_block_is_refused(actor):
    with pytest.raises(InvalidValue, match="actor"):
        load_config({"actor": actor})


def test_a_file_is_read_by_path_and_by_string(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("actor:\n  discount: 0.25\n")
    assert load_config(path).discount == load_config(str(path)).discount == 0.25


def test_a_json_file_is_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"actor": {"discount": 0.25, "reward_norm": {"eps": 1e-8}}}, indent="\t"))
    assert load_config(path).reward_norm.eps == 1e-8


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "1E-5", ".1e-4", "+1e-05", "1.e-5"])
def test_a_yaml_number_may_be_written_with_an_exponent_alone(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(f"actor:\n  reward_norm: {{eps: {text}}}\n")
    assert load_config(path).reward_norm.eps == 1e-5


def test_reading_exponents_leaves_other_yaml_loading_alone():
    assert yaml.safe_load("1e-5") == "1e-5"


# ---- files that are refused ----


def _file(tmp_path: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    ["actor: {", "actor:\n\t- 1", "- 1\n- 2", "", "just text", "a: 1\n---\nb: 2", "actor: !!python/object:os.x {}"],
)
def test_a_yaml_file_that_holds_no_mapping_is_refused_by_name(tmp_path, text):
    with pytest.raises(InvalidValue, match="mine.yaml"):
        load_config(_file(tmp_path, text))


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"actor": {"discount": 1, "discount": 2}}'])
def test_a_json_file_that_holds_no_clear_mapping_is_refused_by_name(tmp_path, text):
    with pytest.raises(InvalidValue, match="mine.json"):
        load_config(_file(tmp_path, text, "mine.json"))


def test_a_yaml_key_given_twice_is_refused_with_its_line(tmp_path):
    with pytest.raises(InvalidValue, match=r"'discount' is given twice\n  at    mine.yaml:4"):
        load_config(_file(tmp_path, "actor:\n  discount: 1\n  kl_ctl: 0\n  discount: 2\n"))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="mine.yaml"):
        load_config(_file(tmp_path, b"\xff\xfe\x00\x80garbage\x00"))


def test_a_huge_file_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="bytes"):
        load_config(_file(tmp_path, "#" * (config_file.MAX_BYTES + 1)))


def test_aliases_cannot_blow_a_small_file_up(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(InvalidValue, match="too large"):
        load_config(_file(tmp_path, "\n".join(levels)))


def test_a_file_that_contains_itself_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="too large"):
        load_config(_file(tmp_path, "actor: &a\n  gae_lambda_kwargs: *a\n"))


def test_a_file_nested_without_end_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="mine.yaml"):
        load_config(_file(tmp_path, "[" * 20_000))


def test_ordinary_anchors_and_merges_work(tmp_path):
    text = "norm: &n {mean_level: group, std_level: null}\nactor:\n  reward_norm:\n    <<: *n\n    group_size: 4\n"
    assert load_config(_file(tmp_path, text)).reward_norm == Norm(mean_level="group", std_level=None, group_size=4)


# ---- where an error says it stands ----


def test_an_error_gives_the_line_of_its_key(tmp_path):
    path = _file(tmp_path, "actor:\n  discount: 1.0\n  kl_estimator: k4\n")
    with pytest.raises(UnknownName, match=r"actor.kl_estimator \(mine.yaml:3\)"):
        load_config(path)


def test_an_error_gives_the_line_where_the_file_is_the_actor_block(tmp_path):
    with pytest.raises(UnknownName, match=r"actor.kl_estimator \(mine.yaml:1\)"):
        load_config(_file(tmp_path, "kl_estimator: k4\n"))


def test_a_setting_is_located_by_line_only_if_it_came_from_a_yaml_file(tmp_path):
    path = _file(tmp_path, "actor:\n  advantage:\n    estimator: null\n")
    assert load_config(path).at("actor.advantage.estimator") == "actor.advantage.estimator (mine.yaml:3)"
    assert load_config(path).at("actor.kl_ctl") == "actor.kl_ctl"
    assert load_config({}).at("actor.advantage.estimator") == "actor.advantage.estimator"


# ---- unknown keys ----


def test_an_unknown_key_of_the_actor_is_ignored_and_stays_readable():
    spec = load_config({"actor": {"learning_rate": 1e-6, "discount": 0.5}})
    assert (spec.discount, spec.learning_rate) == (0.5, 1e-6)


@pytest.mark.parametrize("key", ["estimator", "config", "at", "override", "model_fields", "_source", 3])
def test_an_unknown_key_never_hides_an_attribute_of_the_spec(key):
    spec = load_config({"actor": {key: "mine"}})
    assert (spec.estimator, spec.config, spec.override) == ("token_gae", spec, False)
    assert spec.at("actor.x") == "actor.x"


@pytest.mark.parametrize("value", [None, {}, "auto"])
def test_an_unknown_key_under_advantage_is_refused_with_the_nearest_known(value):
    with pytest.raises(UnknownKey, match=r"'estimater'\n  at    actor.advantage.estimater\n  try   estimator"):
        load_config(advantage(estimater=value))


def test_an_unknown_key_in_a_stage_is_refused_with_the_nearest_known():
    with pytest.raises(UnknownKey, match=r"try   implementation"):
        load_config(advantage(estimator={"implementatoin": "turn_gae"}))


@pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
def test_an_unknown_key_in_a_norm_is_refused_with_the_nearest_known(norm):
    with pytest.raises(UnknownKey, match=rf"actor.{norm}.mean_levle\n  try   mean_level"):
        load_config({norm: {"mean_levle": "group"}})


def test_the_compiled_block_refuses_unknown_keys():
    with pytest.raises(UnknownKey, match="actor.advantage.compiled.bukets"):
        load_config(advantage(compiled={"bukets": 1}))


# ---- values ----


NUMBERS = ["discount", "gae_lambda", "kl_ctl", "reward_bias", "reward_scaling", "reward_clip"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(1.0), [1.0], {}, NAN, 10**400, None])
def test_a_number_is_no_bool_no_container_and_no_nan(name, value):
    with pytest.raises(InvalidValue, match=f"actor.{name}"):
        load_config({name: value})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "gae_lambda"])
def test_a_number_is_no_string(name):
    with pytest.raises(InvalidValue, match=f"actor.{name}"):
        load_config({name: "1.0"})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "reward_clip"])
@pytest.mark.parametrize("value", [INF, -INF])
def test_a_number_is_finite(name, value):
    with pytest.raises(InvalidValue, match=f"actor.{name}"):
        load_config({name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_serves_as_a_number(name):
    value = getattr(load_config({name: 2}), name)
    assert (value, type(value)) == (2.0, float)


@pytest.mark.parametrize("value", [-0.5, 1.5, 0])
def test_a_lambda_above_one_or_below_zero_is_accepted(value):
    assert load_config({"gae_lambda": value}).gae_lambda == value


def test_an_infinite_clip_is_no_clip():
    assert load_config({"reward_clip": INF}).reward_clip == INF


def test_a_negative_clip_is_refused():
    with pytest.raises(InvalidValue, match="actor.reward_clip"):
        load_config({"reward_clip": -1})


@pytest.mark.parametrize(
    "name",
    [
        "overlong_reward_penalty",
        "mask_no_eos_with_zero",
        "token_rewards_as_adv",
        "use_decoupled_loss",
        "recompute_logprob",
    ],
)
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(InvalidValue, match=f"actor.{name}"):
        load_config({name: value})


@pytest.mark.parametrize(
    "name, value", [("kl_estimator", "k4"), ("gae_timestep_unit", "sentence"), ("kl_estimator", "K1")]
)
@pytest.mark.parametrize("kl_ctl", [0, 0.1])
def test_an_unknown_kind_is_refused_whether_or_not_it_is_used(name, value, kl_ctl):
    with pytest.raises(UnknownName, match=f"actor.{name}"):
        load_config({name: value, "kl_ctl": kl_ctl})


@pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
@pytest.mark.parametrize("name", ["mean_level", "std_level"])
@pytest.mark.parametrize("level", ["none", "null", "", "Batch", False, 0])
def test_a_level_is_batch_group_or_null_and_no_other_word(norm, name, level):
    with pytest.raises(UnknownName, match=rf"actor.{norm}.{name}\n  found .*\n  try   .*batch, group, null"):
        load_config({norm: {name: level}})


@pytest.mark.parametrize("level", ["batch", "group", None])
def test_a_level_may_be_batch_group_or_null(level):
    assert load_config({"reward_norm": {"mean_level": level}}).reward_norm.mean_level == level


@pytest.mark.parametrize("key, value", [("group_size", 0), ("group_size", 1.5), ("group_size", True), ("eps", -1e-9)])
@pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
def test_a_group_size_below_one_and_a_negative_eps_are_refused(norm, key, value):
    with pytest.raises(InvalidValue, match=f"actor.{norm}.{key}"):
        load_config({norm: {key: value}})


@pytest.mark.parametrize("value", [NAN, INF, "1e-5"])
def test_an_eps_is_a_finite_number(value):
    with pytest.raises(InvalidValue, match="actor.reward_norm.eps"):
        load_config({"reward_norm": {"eps": value}})


def test_an_eps_of_zero_is_accepted():
    assert load_config({"adv_norm": {"eps": 0}}).adv_norm.eps == 0.0


@pytest.mark.parametrize("value", ["group", True, 5, [1]])
def test_a_norm_is_a_mapping_or_null(value):
    with pytest.raises(InvalidValue, match="'reward_norm' should be a mapping"):
        load_config({"reward_norm": value})


@pytest.mark.parametrize("key", ["rules", "backend"])
def test_unknown_rules_and_backends_are_refused_with_the_known_ones(key):
    known = {"rules": "default, strict", "backend": "reference, eager, compiled"}[key]
    with pytest.raises(UnknownName, match=f"known: {known}"):
        load_config(advantage(**{key: "lenient"}))


def test_a_shadow_names_what_it_runs_against_and_how_often():
    assert load_config(advantage()).advantage.shadow is None
    assert load_config(advantage(shadow={"against": "eager"})).advantage.shadow.every == 1
    assert load_config(advantage(shadow={"against": "eager", "every": 50})).advantage.shadow.every == 50


@pytest.mark.parametrize("shadow", [{}, {"every": 2}, {"against": None}, {"against": 1}, {"against": len}])
def test_a_shadow_without_the_name_of_its_opponent_is_refused(shadow):
    with pytest.raises(InvalidValue, match="actor.advantage.shadow.against"):
        load_config(advantage(shadow=shadow))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_shadow_runs_on_every_nth_batch_for_a_positive_n(every):
    with pytest.raises(InvalidValue, match="actor.advantage.shadow.every"):
        load_config(advantage(shadow={"against": "eager", "every": every}))


def test_a_shadow_given_as_a_bare_string_is_answered_with_the_mapping_to_write():
    with pytest.raises(InvalidValue, match="shadow: {against: reference, every: 1}"):
        load_config(advantage(shadow="reference"))


def test_an_unknown_key_of_a_shadow_is_refused_with_the_known_ones():
    with pytest.raises(UnknownKey, match="against, every"):
        load_config(advantage(shadow={"against": "eager", "each": 2}))


# ---- the length penalty ----


def test_a_complete_penalty_is_accepted():
    assert load_config(PENALTY).overlong_tokens == 8


@pytest.mark.parametrize("name", ["overlong_tokens", "overlong_penalty_factor", "max_new_tokens"])
def test_a_penalty_with_an_unset_parameter_is_refused(name):
    with pytest.raises(InvalidValue, match=f"actor.{name}"):
        load_config(PENALTY | {name: None})


@pytest.mark.parametrize(
    "name, value", [("overlong_tokens", 0), ("overlong_tokens", -4), ("max_new_tokens", 0), ("max_new_tokens", -1)]
)
def test_a_penalty_without_room_for_tokens_is_refused(name, value):
    with pytest.raises(InvalidValue, match=f"actor.{name}"):
        load_config(PENALTY | {name: value})


@pytest.mark.parametrize("value", [NAN, INF, True, "0.5"])
def test_a_penalty_factor_is_a_finite_number(value):
    with pytest.raises(InvalidValue, match="actor.overlong_penalty_factor"):
        load_config(PENALTY | {"overlong_penalty_factor": value})


@pytest.mark.parametrize("name, value", [("overlong_tokens", 0), ("overlong_tokens", None), ("max_new_tokens", 0)])
def test_a_penalty_that_is_off_demands_nothing_of_its_parameters(name, value):
    assert getattr(load_config({name: value}), name) == value


# ---- choosing stages ----


@pytest.mark.parametrize("stage", ["outcome_reward_shaping", "estimator", "process_adv_shaping", "compute"])
def test_a_bare_string_for_a_stage_is_refused_with_the_mapping_to_write(stage):
    with pytest.raises(InvalidValue, match=re.escape(f"try   {stage}: {{implementation: my.f, kwargs: {{}}}}")):
        load_config(advantage(**{stage: "my.f"}))


def test_a_function_in_place_of_its_path_is_refused_with_the_path():
    with pytest.raises(InvalidValue, match="try   compiled_adv.spec.load_config"):
        load_config(advantage(estimator={"implementation": load_config}))


def test_a_function_in_place_of_a_lambdas_path_is_refused_with_the_path():
    with pytest.raises(InvalidValue, match="try   compiled_adv.spec.load_config"):
        load_config({"gae_lambda": load_config})


@pytest.mark.parametrize("value", [1, ["turn_gae"], True])
def test_an_implementation_is_a_string(value):
    with pytest.raises(InvalidValue, match="actor.advantage.estimator.implementation"):
        load_config(advantage(estimator={"implementation": value}))


@pytest.mark.parametrize("kwargs", [[1], 3, "a=1"])
def test_kwargs_are_a_mapping(kwargs):
    with pytest.raises(BadKwargs, match="actor.advantage.estimator.kwargs"):
        load_config(advantage(estimator={"kwargs": kwargs}))


def test_kwargs_have_strings_for_keys():
    with pytest.raises(BadKwargs, match="actor.advantage.estimator.kwargs"):
        load_config(advantage(estimator={"implementation": "my.f", "kwargs": {1: 2}}))


def test_kwargs_that_contain_themselves_are_refused():
    kwargs: dict[str, Any] = {}
    kwargs["self"] = kwargs
    with pytest.raises(BadKwargs, match="contain themselves"):
        load_config(advantage(estimator={"implementation": "my.f", "kwargs": kwargs}))


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("choice", [None, {"implementation": "auto"}])
def test_the_default_estimator_follows_the_timestep_unit(unit, choice):
    spec = load_config({"gae_timestep_unit": unit, "advantage": {"estimator": choice}})
    assert (spec.estimator, spec.timestep_unit) == (f"{unit}_gae", unit)


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("own", ["token", "turn"])
def test_an_explicit_estimator_overrides_the_timestep_unit(unit, own):
    spec = load_config({"gae_timestep_unit": unit, "advantage": chosen("estimator", f"{own}_gae")})
    assert spec.timestep_unit == own


def test_a_custom_estimator_answers_for_its_own_unit():
    spec = load_config(advantage(**chosen("estimator", "my.estimator")))
    assert (spec.estimator, spec.timestep_unit) == ("my.estimator", None)


def test_a_spec_tells_a_lambda_function_from_a_number():
    assert load_config({"gae_lambda": "my.f"}).lambda_is_function
    assert not load_config({"gae_lambda": 0.5}).lambda_is_function


def test_the_default_compute_takes_no_kwargs():
    with pytest.raises(BadKwargs, match="the default compute takes no kwargs"):
        load_config(advantage(compute={"kwargs": {"x": 1}}))


@pytest.mark.parametrize("implementation", ["auto", None])
def test_process_auto_takes_no_kwargs(implementation):
    block = {"implementation": implementation, "kwargs": {"negative_scale": 0.5}}
    with pytest.raises(BadKwargs, match="process auto takes no kwargs"):
        load_config(advantage(process_adv_shaping=block))


@pytest.mark.parametrize("name", ["gvpo", "process_weighted"])
def test_an_explicit_process_choice_that_needs_direct_rewards_is_refused_without_them(name):
    block = {"token_rewards_as_adv": False, "advantage": chosen("process_adv_shaping", name)}
    with pytest.raises(ConflictingSettings, match="try   token_rewards_as_adv: true"):
        load_config(block)


def test_additive_shaping_is_accepted_without_direct_rewards():
    block = {"token_rewards_as_adv": False, "advantage": chosen("process_adv_shaping", "additive")}
    assert load_config(block).advantage.process_adv_shaping.implementation == "additive"


def test_process_weighted_is_refused_beside_mask_no_eos_with_zero():
    block = {"mask_no_eos_with_zero": True, "advantage": chosen("process_adv_shaping", "process_weighted")}
    with pytest.raises(ConflictingSettings, match="mask_no_eos_with_zero: false"):
        load_config(block)


def test_gvpo_is_accepted_beside_mask_no_eos_with_zero():
    assert load_config({"mask_no_eos_with_zero": True, "advantage": chosen("process_adv_shaping", "gvpo")})


# ---- a full override ----


OVERRIDE = {"compute": {"implementation": "my.compute"}}


def test_a_full_override_is_a_dotted_path():
    assert load_config(advantage(**OVERRIDE)).override


@pytest.mark.parametrize("name", ["defualt", "auto", ""])
def test_an_unknown_compute_is_refused(name):
    with pytest.raises(UnknownName, match="actor.advantage.compute"):
        load_config(advantage(compute={"implementation": name}))


@pytest.mark.parametrize("choice", [{}, {"implementation": "auto"}, {"implementation": "token_gae"}, {"kwargs": {}}])
@pytest.mark.parametrize("stage", ["outcome_reward_shaping", "estimator", "process_adv_shaping"])
def test_a_full_override_excludes_a_stage_block_that_is_not_null(stage, choice):
    with pytest.raises(ConflictingSettings, match=f"actor.advantage.{stage}"):
        load_config(advantage(**OVERRIDE, **{stage: choice}))


def test_a_full_override_may_stand_beside_null_stages():
    nulls = dict(outcome_reward_shaping=None, estimator=None, process_adv_shaping=None)
    assert load_config(advantage(**OVERRIDE, **nulls, rules="default")).override


def test_a_full_override_excludes_strict_rules():
    with pytest.raises(ConflictingSettings, match="actor.advantage.rules"):
        load_config(advantage(**OVERRIDE, rules="strict"))


# ---- a trainer's own object ----


@dataclass
class NormConfig:
    mean_level: str | None = "group"
    std_level: str | None = None
    a_trainers_own: int = 7


@dataclass
class StageConfig:
    implementation: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class AdvantageConfig:
    estimator: StageConfig | None = None
    rules: str = "default"


@dataclass
class MistypedConfig:
    estimater: StageConfig | None = None


@dataclass
class ActorConfig:
    discount: float = 0.5
    learning_rate: float = 1e-6
    reward_norm: NormConfig | None = field(default_factory=NormConfig)
    advantage: Any = None


class Attributes:
    """Reads by attribute and by key, and is no Mapping of Python's: the way of several config libraries."""

    def __init__(self, **content: Any) -> None:
        self._content = content

    def keys(self):
        return self._content.keys()

    def __contains__(self, key):
        return key in self._content

    def __getitem__(self, key):
        return self._content[key]

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._content:
            raise AttributeError(name)
        return self._content[name]


class OmegaLike(Attributes, Mapping):
    """The same as a Mapping."""

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


OBJECTS = [ActorConfig, SimpleNamespace, Attributes, OmegaLike]


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_trainers_object_is_read_by_its_attributes(kind):
    spec = load_config(kind(discount=0.25, reward_norm=NormConfig()))
    assert (spec.discount, spec.reward_norm.mean_level) == (0.25, "group")


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_attribute_that_a_trainers_object_lacks_has_its_default(kind):
    assert load_config(kind(discount=0.25)).kl_ctl == 0.1


@pytest.mark.parametrize("kind", OBJECTS)
def test_plugins_get_the_trainers_own_object(kind):
    config = kind(discount=0.25)
    assert load_config(config).config is config
    assert load_config({"actor": config}).config is config
    assert load_config(SimpleNamespace(actor=config)).config is config


def test_plugins_get_the_spec_where_a_mapping_was_given():
    spec = load_config({"actor": {"discount": 0.25, "mine": 3}})
    assert spec.config is spec
    assert spec.config.mine == 3


@pytest.mark.parametrize("kind", [SimpleNamespace, Attributes, OmegaLike])
def test_a_trainers_object_is_refused_for_a_wrong_value_too(kind):
    with pytest.raises(InvalidValue, match="actor.discount"):
        load_config(kind(discount="high"))


@pytest.mark.parametrize("norm", [NormConfig(), SimpleNamespace(mean_level="group", a_trainers_own=7)])
def test_a_norm_object_is_read_by_the_known_names_only(norm):
    assert load_config(SimpleNamespace(reward_norm=norm)).reward_norm.mean_level == "group"


@pytest.mark.parametrize("norm", [{"a_trainers_own": 7}, OmegaLike(a_trainers_own=7), Attributes(a_trainers_own=7)])
def test_a_norm_mapping_in_a_trainers_object_is_refused_for_an_unknown_key(norm):
    with pytest.raises(UnknownKey, match="actor.reward_norm.a_trainers_own"):
        load_config(SimpleNamespace(reward_norm=norm))


@pytest.mark.parametrize(
    "block",
    [
        AdvantageConfig(estimator=StageConfig("turn_gae")),
        {"estimator": StageConfig("turn_gae")},
        SimpleNamespace(estimator=SimpleNamespace(implementation="turn_gae")),
        Attributes(estimator=Attributes(implementation="turn_gae", kwargs=Attributes())),
        OmegaLike(estimator=OmegaLike(implementation="turn_gae", kwargs=None)),
    ],
)
def test_the_advantage_block_may_be_an_object(block):
    assert load_config(ActorConfig(advantage=block)).estimator == "turn_gae"


@pytest.mark.parametrize("block", [MistypedConfig(), SimpleNamespace(estimater=None), OmegaLike(estimater=None)])
def test_an_unknown_name_in_an_advantage_object_is_refused_with_the_nearest_known(block):
    with pytest.raises(UnknownKey, match="try   estimator"):
        load_config(ActorConfig(advantage=block))


def test_class_attributes_of_an_advantage_object_count():
    class Block:
        estimator = {"implementation": "turn_gae"}

    assert load_config(ActorConfig(advantage=Block())).estimator == "turn_gae"


def test_kwargs_of_a_trainers_object_become_plain_dicts_and_lists():
    kwargs = OmegaLike(levels=(OmegaLike(a=1),), names=["x"])
    block = {"estimator": {"implementation": "my.f", "kwargs": OmegaLike(nested=kwargs)}}
    read = load_config(SimpleNamespace(advantage=block)).advantage.estimator.kwargs
    assert type(read["nested"]) is dict and type(read["nested"]["names"]) is list


# ---- frozen ----


def test_a_spec_is_frozen():
    spec = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        spec.discount = 0.5


def test_a_later_change_of_the_callers_mapping_does_not_reach_the_spec():
    config = advantage(**chosen("estimator", "my.f", table={"a": [1]}))
    spec = load_config(config)
    config["actor"]["advantage"]["estimator"]["kwargs"]["table"]["a"].append(2)
    assert spec.advantage.estimator.kwargs == {"table": {"a": [1]}}


def test_reading_a_configuration_does_not_change_it():
    config = {"actor": {"advantage": {"estimator": None, "compute": {"kwargs": None}}, "gae_lambda_kwargs": None}}
    before = json.dumps(config)
    load_config(config)
    assert json.dumps(config) == before


# ---- the shipped default.yaml ----


DEFAULT_YAML = config_file.recipes()["default"]


def test_default_yaml_writes_every_key_of_the_actor():
    actor = yaml.safe_load(DEFAULT_YAML.read_text())["actor"]
    assert {name: actor[name] for name in DEFAULTS} == DEFAULTS
    assert actor.keys() - DEFAULTS.keys() == {"advantage"}


def test_default_yaml_writes_the_advantage_block():
    block = yaml.safe_load(DEFAULT_YAML.read_text())["actor"]["advantage"]
    assert block["compute"] == {"implementation": "default", "kwargs": {}}
    assert [block[name] for name in ("outcome_reward_shaping", "estimator", "process_adv_shaping")] == [None] * 3


@pytest.mark.parametrize("path", config_file.recipes().values(), ids=lambda path: path.stem)
def test_every_key_of_a_shipped_recipe_has_a_comment_above_it(path):
    lines = path.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\s*\w+:", line):
            assert above.lstrip().startswith("#"), f"no comment above: {line}"


@pytest.mark.parametrize("name", config_file.recipes())
def test_every_shipped_recipe_is_a_valid_configuration(name):
    assert isinstance(load_config(name), Spec)
