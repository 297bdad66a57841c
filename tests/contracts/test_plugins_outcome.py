"""Outcome functions: what they get, what they may return, and shaped references for reward normalisation."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from compiled_adv import TrajBatchMeta, build
from compiled_adv.errors import PluginRaised, PluginResult, PluginWroteInput
from tests.contracts.plugins_under_test import WRITES, WRONGS
from tests.contracts.small import group, meta_of, plugin, rows

SLOT = "outcome_reward_shaping"
PATH = "tests.contracts.plugins_under_test."
PENALTY = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 1.0,
    "max_new_tokens": 3,
}
BY_GROUP = {"reward_norm": {"mean_level": "group", "std_level": None}}
BATCH = rows("pgg", "pg.", rewards=[1.0, 3.0], original_rewards=[7.0, 7.0], note="text")


# ---- inputs ----


def test_data_is_the_batch(run, seen):
    run(BATCH, plugin(SLOT, "see_outcome"))
    data = seen[0].data
    assert set(data) == set(BATCH)
    assert all(torch.equal(data[key], x) for key, x in BATCH.items() if isinstance(x, torch.Tensor))
    assert data["note"] == "text"


def test_data_holds_rewards_after_the_length_penalty(run, seen):
    # two generated tokens of a budget of 1 before the tail: -0.5
    run(BATCH, PENALTY | plugin(SLOT, "see_outcome"))
    assert seen[0].data["rewards"].tolist() == [0.5, 3.0]


def test_data_holds_rewards_as_they_came_without_a_penalty(run, seen):
    run(BATCH | {"rewards": torch.tensor([1, 3])}, plugin(SLOT, "see_outcome"))
    assert seen[0].data["rewards"].dtype == torch.int64


def test_config_is_the_spec_where_a_mapping_was_given(run, seen):
    compute = run.build(plugin(SLOT, "see_outcome") | {"discount": 0.5, "temperature": 0.7})
    compute(BATCH)
    assert seen[0].config is compute.spec
    assert seen[0].config.discount == 0.5 and seen[0].config.temperature == 0.7


def test_config_is_the_trainers_own_object(run, seen):
    @dataclass
    class Actor:
        advantage: Any
        kl_ctl: float = 0.0

    actor = Actor(plugin(SLOT, "see_outcome")["advantage"] | {"backend": run.backend})
    build(actor)(BATCH)
    assert seen[0].config is actor


def test_meta_is_none_where_none_was_given(run, seen):
    run(BATCH, plugin(SLOT, "see_outcome"))
    assert seen[0].meta is None


def test_meta_is_our_class_whatever_was_given(run, seen):
    run(BATCH, plugin(SLOT, "see_outcome"), meta_of(2, groups=[group(1, 1, rewards=(5.0, None))]))
    meta = seen[0].meta
    assert isinstance(meta, TrajBatchMeta)
    assert (meta.traj_group_sizes, meta.logical_group_sizes) == ([2], [2])
    assert meta.rollout_groups[0].rewards == (5.0, None)


def test_kwargs_are_given(run):
    assert run(BATCH, plugin(SLOT, "see_outcome", factor=0.5))["rewards"].tolist() == [0.5, 1.5]


# ---- what it does ----


def test_its_rewards_are_the_rewards_channel_and_the_score(run):
    out = run(BATCH, plugin(SLOT, "see_outcome", factor=2.0) | {"reward_bias": 1.0, "reward_clip": 4.0})
    assert out["rewards"].tolist() == [2.0, 6.0]
    assert out["tot_rewards"].tolist() == [[0.0, 3.0, 0.0], [4.0, 0.0, 0.0]]


def test_a_result_of_another_floating_dtype_becomes_float32(run):
    out = run(BATCH | {"rewards": BATCH["rewards"].double()}, plugin(SLOT, "aliases_its_input"))
    assert out["rewards"].dtype == torch.float32


def test_an_object_that_looks_like_the_result_is_taken(run):
    assert run(BATCH, plugin(SLOT, "outcome_of_kind", kind="look_alike"))["rewards"].tolist() == [1.0, 3.0]


def test_inputs_of_an_actor_that_requires_grad_give_results_without(run):
    batch = BATCH | {"rewards": torch.tensor([1.0, 3.0], requires_grad=True)}
    assert not run(batch, plugin(SLOT, "aliases_its_input"))["rewards"].requires_grad


# ---- results that are refused ----


@pytest.mark.parametrize("wrong", [name for name in WRONGS if name != "extra_dim"])
def test_wrong_rewards_are_refused_by_field_and_function(run, wrong):
    error = run.refusal(BATCH, plugin(SLOT, "wrong_outcome", wrong=wrong))
    assert type(error) is PluginResult
    assert "'rewards'" in str(error) and "plugins_under_test.wrong_outcome" in str(error)


@pytest.mark.parametrize("kind", ["tensor", "mapping", "tuple", "none", "no_rewards"])
def test_a_result_of_another_kind_is_refused_with_the_one_to_return(run, kind):
    error = run.refusal(BATCH, plugin(SLOT, "outcome_of_kind", kind=kind))
    assert type(error) is PluginResult
    assert "OutcomeResult" in str(error) and "rewards" in str(error)


# ---- normalization_rewards ----

TWO_OF_THREE = rows("pg", "pg", "pg", rewards=[1.0, 5.0, 3.0])
SPLIT = meta_of(3, groups=[group(2, 1, rewards=(2.0, 4.0))])


def test_shaped_references_take_the_place_of_the_raw_ones(run):
    # references 0 and 10: mean 5
    out = run(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "references", values=[0.0, 10.0]), SPLIT)
    assert out["tot_rewards"][:, 0].tolist() == [-4.0, 0.0, -2.0]


def test_shaped_references_come_before_bias_scaling_and_clipping(run):
    # (0 + 1) * 2 = 2 and min(22, 12) = 12: mean 7; rows 4, 12, 8
    actor = BY_GROUP | {"reward_bias": 1.0, "reward_scaling": 2.0, "reward_clip": 12.0}
    out = run(TWO_OF_THREE, actor | plugin(SLOT, "references", values=[0.0, 10.0]), SPLIT)
    assert out["tot_rewards"][:, 0].tolist() == [-3.0, 5.0, 1.0]


def test_shaped_references_are_demanded_beside_explicit_references_and_a_norm_level(run):
    error = run.refusal(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "see_outcome"), SPLIT)
    assert type(error).__name__ == "MissingReferences"
    assert "normalization_rewards" in str(error) and "[2]" in str(error) and "see_outcome" in str(error)


def test_one_explicit_reference_among_several_is_enough_to_demand_them(run):
    meta = meta_of(1, 2, groups=[None, group(1, 1, rewards=(None, 4.0))])
    error = run.refusal(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "see_outcome"), meta)
    assert type(error).__name__ == "MissingReferences"


@pytest.mark.parametrize(
    ("actor", "meta"),
    [
        ({}, SPLIT),
        ({"reward_norm": {"mean_level": None, "std_level": None}}, SPLIT),
        (BY_GROUP, meta_of(3)),
        (BY_GROUP, meta_of(3, groups=[None])),
        (BY_GROUP, meta_of(3, groups=[group(1, 1, 1)])),
        (BY_GROUP, meta_of(3, groups=[group(1, 1, 1, rewards=(None, None, None))])),
        ({"adv_norm": {"mean_level": "group"}}, SPLIT),
    ],
    ids=["no norm", "no level", "no rollouts", "null rollout", "no references", "null references", "adv_norm"],
)
def test_shaped_references_are_not_demanded_otherwise(run, actor, meta):
    run(TWO_OF_THREE, actor | plugin(SLOT, "see_outcome"), meta)


def test_equal_shaped_rows_of_a_rollout_allow_to_infer_its_reference(run):
    # shaped 2, 2, 6: references 2 and 6, mean 4
    batch = rows("pg", "pg", "pg", rewards=[1.0, 1.0, 3.0])
    actor = BY_GROUP | plugin(SLOT, "see_outcome", factor=2.0)
    out = run(batch, actor, meta_of(3, groups=[group(2, 1)]))
    assert out["tot_rewards"][:, 0].tolist() == [-2.0, -2.0, 2.0]


def test_shaped_rows_of_a_rollout_that_differ_need_shaped_references(run):
    meta = meta_of(3, groups=[group(2, 1)])
    assert type(run.refusal(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "see_outcome"), meta)).__name__ == "RowsDiffer"
    run(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "references", values=[0.0, 1.0]), meta)


def test_shaped_references_settle_rows_that_a_penalty_leaves_different(run):
    # penalties -0.5 and 0 beside equal raw rewards
    batch, meta = rows("pgg", "pg.", rewards=[1.0, 1.0]), meta_of(2, groups=[group(2)])
    out = run(batch, PENALTY | BY_GROUP | plugin(SLOT, "references", values=[0.5]), meta)
    assert [out["tot_rewards"][0, 1], out["tot_rewards"][1, 0]] == [0.0, 0.5]


def test_shaping_that_makes_the_rows_of_a_rollout_differ_is_refused(run):
    # equal raw rows times the penalty's own difference: 0.5 and 1
    batch, meta = rows("pgg", "pg.", rewards=[1.0, 1.0]), meta_of(2, groups=[group(2)])
    error = run.refusal(batch, PENALTY | BY_GROUP | plugin(SLOT, "see_outcome"), meta)
    assert type(error).__name__ == "RowsDiffer"


@pytest.mark.parametrize(
    "wrong", ["too_long", "too_short", "scalar", "extra_dim", "int", "complex", "nan", "inf", "list", "meta"]
)
def test_wrong_shaped_references_are_refused_by_field_and_function(run, wrong):
    error = run.refusal(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "wrong_references", wrong=wrong, n=2), SPLIT)
    assert type(error) is PluginResult
    assert "'normalization_rewards'" in str(error) and "wrong_references" in str(error)


def test_shaped_references_are_one_per_rollout_and_not_one_per_row(run):
    error = run.refusal(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "wrong_references", wrong=None, n=3), SPLIT)
    assert type(error) is PluginResult and "[3], not [2]" in str(error)


@pytest.mark.parametrize(
    ("actor", "meta"),
    [(BY_GROUP, None), (BY_GROUP, meta_of(3)), ({}, None), ({}, meta_of(3)), ({}, meta_of(2, groups=[None]))],
    ids=["none", "sizes", "none, no norm", "sizes, no norm", "one row short"],
)
def test_shaped_references_need_complete_metadata(run, actor, meta):
    error = run.refusal(TWO_OF_THREE, actor | plugin(SLOT, "references", values=[0.0, 0.0]), meta)
    assert type(error) is PluginResult and "metadata" in str(error)


def test_shaped_references_are_validated_where_nothing_normalises(run):
    error = run.refusal(TWO_OF_THREE, plugin(SLOT, "wrong_references", wrong="nan", n=2), SPLIT)
    assert type(error) is PluginResult


def test_shaped_references_for_null_rollouts_are_one_per_row(run):
    # references 0, 0, 3: mean 1
    meta = meta_of(3, groups=[None])
    out = run(TWO_OF_THREE, BY_GROUP | plugin(SLOT, "references", values=[0.0, 0.0, 3.0]), meta)
    assert out["tot_rewards"][:, 0].tolist() == [0.0, 4.0, 2.0]


# ---- writing ----


@pytest.mark.parametrize("way", WRITES)
def test_a_function_that_writes_to_its_data_is_named_and_the_batch_stays(run, way):
    batch = rows("pgg", "pg.", rewards=[1.0, 3.0])
    before = {key: x.clone() for key, x in batch.items()}
    error = run.refusal(batch, plugin(SLOT, "write_outcome", way=way))
    assert type(error) is PluginWroteInput
    assert "'rewards'" in str(error) and "write_outcome" in str(error)
    assert all(torch.equal(batch[key], x) for key, x in before.items())


@pytest.mark.parametrize("key", ["attention_mask", "loss_mask", "input_ids", "logprobs", "is_truncated"])
def test_any_tensor_of_the_data_is_watched(run, key):
    batch = rows("pgg", "pg.")
    before = batch[key].clone()
    error = run.refusal(batch, plugin(SLOT, "write_outcome", way="setitem", key=key))
    assert type(error) is PluginWroteInput and f"'{key}'" in str(error)
    assert torch.equal(batch[key], before)


@pytest.mark.parametrize("name", ["write_mapping", "write_field"])
def test_the_mapping_and_the_fields_cannot_be_written(run, name):
    error = run.refusal(BATCH, plugin(SLOT, name))
    assert type(error) is PluginRaised and name in str(error)
    assert error.__cause__ is not None


def test_the_metadata_cannot_be_written(run):
    given = TrajBatchMeta(1, [2], [3], [None])
    error = run.refusal(BATCH, plugin(SLOT, "write_meta"), given)
    assert type(error) is PluginWroteInput and "'meta'" in str(error)
    assert given == TrajBatchMeta(1, [2], [3], [None])


# ---- raising ----


def test_a_function_that_raises_is_named_with_its_own_error_chained(run):
    error = run.refusal(BATCH, plugin(SLOT, "raises"))
    assert type(error) is PluginRaised
    assert "plugins_under_test.raises" in str(error) and "the function's own words" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_the_next_call_works_after_a_function_raised(run):
    compute = run.build(plugin(SLOT, "outcome_of_kind", kind="none"))
    for _ in range(2):
        with pytest.raises(PluginResult):
            compute(BATCH)
    assert run(BATCH, plugin(SLOT, "see_outcome"))["rewards"].tolist() == [1.0, 3.0]
