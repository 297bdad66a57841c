"""A replacement of the whole computation: raw data in, every channel out, checked and packed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from compiled_adv import TrajBatchMeta, build
from compiled_adv.errors import ConflictingSettings, PluginRaised, PluginResult, PluginWroteInput
from tests.contracts.plugins_under_test import WRITES, WRONGS
from tests.contracts.small import Runner, meta_of, plugin, rows

SEE = plugin("compute", "see_compute")
EXTRAS = ["input_token_loss_mask", "is_truncated", "mopd_behavior_logprobs", "prox_logp", "ref_logp"]
RESULT = ["advantages", "returns", "loss_mask", "logprobs", "rewards", "tot_rewards", "kl_rewards"]


def see(extras=(), **kwargs):
    return plugin("compute", "see_compute", extras=list(extras), **kwargs)


def case(**channels):
    return rows("pgg", "pg.", **({"rewards": [1.0, 3.0]} | channels))


# ---- inputs ----


def test_it_gets_the_raw_data(run, seen):
    batch = case(rewards=torch.tensor([1, 3]), note="text", original_rewards=[5.0, 5.0])
    run(batch, SEE)
    data = seen[-1].data
    assert set(data) == set(batch) and data["note"] == "text"
    assert all(torch.equal(data[key], x) for key, x in batch.items() if isinstance(x, torch.Tensor))


def test_it_gets_rewards_before_the_length_penalty(run, seen):
    penalty = {
        "overlong_reward_penalty": True,
        "overlong_tokens": 2,
        "overlong_penalty_factor": 1.0,
        "max_new_tokens": 2,
    }
    run(case(), SEE | penalty)
    assert seen[-1].data["rewards"].tolist() == [1.0, 3.0]


def test_it_gets_config_and_meta(run, seen):
    compute = run.build(SEE)
    compute(case(), meta_of(1, 1))
    assert seen[-1].config is compute.spec
    assert isinstance(seen[-1].meta, TrajBatchMeta) and seen[-1].meta.traj_group_sizes == [1, 1]


def test_it_gets_the_trainers_own_object(run, seen):
    @dataclass
    class Actor:
        advantage: Any
        kl_ctl: float = 0.0

    actor = Actor(SEE["advantage"] | {"backend": run.backend})
    build(actor)(case())
    assert seen[-1].config is actor


def test_it_gets_the_calls_values(run, seen):
    values = {
        "advantage_shaping_mode": "gvpo",
        "gvpo_negative_scale": 0.5,
        "gvpo_zero_penalty": 0.25,
        "gvpo_zero_eps": 0.125,
    }
    run(case(), SEE, **values)
    assert {name: getattr(seen[-1], name) for name in values} == values


def test_it_gets_the_calls_defaults(run, seen):
    run(case(), SEE)
    inputs = seen[-1]
    assert (inputs.advantage_shaping_mode, inputs.gvpo_negative_scale) == ("additive", 0.2)
    assert (inputs.gvpo_zero_penalty, inputs.gvpo_zero_eps) == (0.4, 1e-6)


# ---- what is none of our business ----


@pytest.mark.parametrize(
    ("actor", "channels"),
    [
        ({"gae_timestep_unit": "turn"}, {}),
        ({"recompute_logprob": True}, {}),
        ({}, {"is_truncated": None}),
        ({}, {"logprobs": [[0.0, float("nan"), 0.0]] * 2}),
        ({"kl_ctl": 0.1}, {}),
        ({"mask_no_eos_with_zero": True}, {"is_truncated": [True, True]}),
    ],
    ids=["turn unit", "recompute", "no flags", "nan", "kl", "cleared"],
)
def test_no_need_of_the_default_stages_is_demanded(run, actor, channels):
    run(case(**channels), SEE | actor)


def test_no_warning_is_looked_for(run):
    batch = rows("ggp", "ppp", is_truncated=None)
    run(batch, SEE | {"kl_ctl": 0.1, "reward_norm": {"mean_leave1out": True}})
    assert run.warnings == {}


@pytest.mark.parametrize("mode", ["gvpo", "process_weighted"])
def test_the_mode_is_given_whatever_the_default_stages_would_make_of_it(run, seen, mode):
    actor = SEE | {"token_rewards_as_adv": False, "mask_no_eos_with_zero": True}
    run(case(), actor, advantage_shaping_mode=mode)
    assert seen[-1].advantage_shaping_mode == mode


@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "loss_mask", "rewards", "logprobs"])
def test_the_required_keys_are_demanded(run, key):
    assert f"'{key}'" in str(run.refusal(case() | {key: None}, SEE))


@pytest.mark.parametrize("slot", ["outcome_reward_shaping", "estimator", "process_adv_shaping"])
def test_stage_settings_beside_it_are_refused(slot):
    advantage = SEE["advantage"] | {slot: {"implementation": "auto"}}
    error = Runner("eager").refusal(case(), {"advantage": advantage})
    assert type(error) is ConflictingSettings and slot in str(error)


# ---- results ----


def test_its_channels_are_the_output(run):
    out = run(case(), SEE)
    numbers = {"advantages": 1.0, "returns": 2.0, "logprobs": -3.0, "tot_rewards": 4.0, "kl_rewards": 5.0}
    assert all(out[name].tolist() == [[x] * 3] * 2 for name, x in numbers.items())
    assert out["rewards"].tolist() == [1.0, 3.0]
    assert out["loss_mask"].tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]


def test_nothing_of_the_default_stages_runs_on_it(run):
    out = run(case(), SEE | {"adv_norm": {}, "reward_norm": {}, "kl_ctl": 0.1})
    assert out["advantages"].tolist() == [[1.0] * 3] * 2


def test_it_owns_alignment(run):
    # its loss mask is not rolled, and its logprobs are not masked
    assert run(case(), SEE)["loss_mask"][0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_that_is_allowed_is_in_the_output(run, extra):
    assert extra in run(case(is_truncated=None), see([extra]))


def test_input_token_loss_mask_is_the_unshifted_mask_it_returns(run):
    out = run(case(), see(["input_token_loss_mask"]))
    assert out["input_token_loss_mask"].tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]


def test_its_is_truncated_is_bool_in_the_output(run):
    out = run(case(), see(["is_truncated"]))
    assert out["is_truncated"].dtype == torch.bool and out["is_truncated"].tolist() == [True, True]


def test_without_the_extra_is_truncated_stays_the_batchs(run):
    batch = case()
    assert run(batch, SEE)["is_truncated"] is batch["is_truncated"]


def test_prox_logp_is_filled_from_its_logprobs_outside_decoupled_loss(run):
    out = run(case(prox_logp=[[9.0] * 3] * 2), SEE)
    assert out["prox_logp"].tolist() == [[-3.0] * 3] * 2
    assert out["prox_logp"].data_ptr() != out["logprobs"].data_ptr()


def test_its_own_prox_logp_wins(run):
    assert run(case(), see(["prox_logp"]))["prox_logp"].tolist() == [[-7.0] * 3] * 2


def test_under_decoupled_loss_no_prox_logp_is_filled(run):
    batch = case(prox_logp=[[9.0] * 3] * 2)
    assert run(batch, SEE | {"use_decoupled_loss": True})["prox_logp"] is batch["prox_logp"]
    assert "prox_logp" not in run(case(), SEE | {"use_decoupled_loss": True})


def test_a_mopd_batch_demands_behaviour_logprobs(run):
    error = run.refusal(case(mopd_teacher_logp_sum=[0.0, 0.0]), SEE)
    assert type(error) is PluginResult and "mopd_behavior_logprobs" in str(error)


def test_a_mopd_batch_takes_the_behaviour_logprobs_it_returns(run):
    out = run(case(mopd_teacher_logp_sum=[0.0, 0.0]), see(["mopd_behavior_logprobs"]))
    assert out["mopd_behavior_logprobs"].tolist() == [[-6.0] * 3] * 2


def test_other_keys_pass_through(run):
    batch = case(original_rewards=[5.0, 5.0], values=[[0.5] * 3] * 2, note="text")
    out = run(batch, SEE)
    assert all(out[key] is batch[key] for key in ("original_rewards", "values", "note", "input_ids", "attention_mask"))


# ---- results that are refused ----


@pytest.mark.parametrize("wrong", [name for name in WRONGS if name not in ("numpy",)])
@pytest.mark.parametrize("field", RESULT)
def test_a_wrong_channel_is_refused_by_field_and_function(run, field, wrong):
    error = run.refusal(case(), see(field=field, wrong=wrong))
    assert type(error) is PluginResult
    assert f"'{field}'" in str(error) and "see_compute" in str(error)


@pytest.mark.parametrize("wrong", ["list", "none", "too_long", "extra_dim", "complex", "sparse", "meta", "nan", "inf"])
@pytest.mark.parametrize("extra", ["mopd_behavior_logprobs", "prox_logp", "ref_logp", "is_truncated"])
def test_a_wrong_extra_is_refused_by_name(run, extra, wrong):
    error = run.refusal(case(), see([extra], field=extra, wrong=wrong))
    assert type(error) is PluginResult and extra in str(error)


@pytest.mark.parametrize("field", ["loss_mask", "input_token_loss_mask", "is_truncated"])
def test_a_mask_that_is_not_binary_is_refused(run, field):
    error = run.refusal(case(), plugin("compute", "mask_of_twos", field=field))
    assert type(error) is PluginResult and field in str(error) and "binary" in str(error)


@pytest.mark.parametrize(
    "key",
    ["input_ids", "values", "original_rewards", "attention_mask", "rewards", "advantages", "rollout_group", "new"],
)
def test_an_extra_beyond_the_allowed_ones_is_refused(run, key):
    error = run.refusal(case(), see([key]))
    assert type(error) is PluginResult and f"'{key}'" in str(error)
    assert all(extra in str(error) for extra in EXTRAS)


def test_extras_may_be_none(run):
    assert "ref_logp" not in run(case(), plugin("compute", "extras_of_kind", kind="none"))


@pytest.mark.parametrize("kind", ["list", "names", "tensor"])
def test_extras_that_are_no_mapping_are_refused(run, kind):
    error = run.refusal(case(), plugin("compute", "extras_of_kind", kind=kind))
    assert type(error) is PluginResult and "extras" in str(error)


@pytest.mark.parametrize("kind", ["tensor", "mapping", "none", "no_kl_rewards"])
def test_a_result_of_another_kind_is_refused_with_the_one_to_return(run, kind):
    error = run.refusal(case(), plugin("compute", "compute_of_kind", kind=kind))
    assert type(error) is PluginResult and "AdvantageResult" in str(error)


# ---- writing, raising ----


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("key", ["rewards", "loss_mask", "input_ids"])
def test_a_function_that_writes_to_its_data_is_named_and_the_batch_stays(run, key, way):
    batch = case()
    before = {name: x.clone() for name, x in batch.items()}
    error = run.refusal(batch, plugin("compute", "write_compute", way=way, key=key))
    assert type(error) is PluginWroteInput
    assert f"'{key}'" in str(error) and "write_compute" in str(error)
    assert all(torch.equal(batch[name], x) for name, x in before.items())


def test_a_function_that_writes_to_the_mapping_is_named(run):
    error = run.refusal(case(), plugin("compute", "write_mapping"))
    assert type(error) is PluginRaised and "write_mapping" in str(error)


def test_a_function_that_raises_is_named_with_its_own_error_chained(run):
    error = run.refusal(case(), plugin("compute", "raises"))
    assert type(error) is PluginRaised
    assert "plugins_under_test.raises" in str(error) and isinstance(error.__cause__, KeyError)
