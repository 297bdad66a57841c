"""Custom estimators: aligned inputs with their channels apart, three results, and nothing added to them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from compiled_adv import build
from compiled_adv.errors import PluginRaised, PluginResult, PluginWroteInput
from tests.contracts.plugins_under_test import WRITES, WRONGS
from tests.contracts.small import near, plugin, rows

SLOT = "estimator"
SEE = plugin(SLOT, "see_estimator")
LAMBDA = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 1.0}}
FIELDS = ["advantages", "returns", "total_rewards"]


def case(**channels):
    """Two rows of five columns; m is 1 at 0, 1 and at 0, 2."""
    return rows("pggp.", "pgpg.", **({"rewards": [1.0, 3.0], "is_truncated": [True, False]} | channels))


VALUES = [[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]]


def given(run, seen, actor=None, meta=None, **channels):
    run(case(**channels), SEE | (actor or {}), meta)
    return seen[-1]


# ---- inputs ----


def test_outcome_rewards_are_placed_scaled_and_normalised(run, seen):
    # scores 2 and 6, mean 4
    actor = {"reward_scaling": 2.0, "reward_norm": {"std_level": None}}
    inputs = given(run, seen, actor)
    assert inputs.outcome_rewards.tolist() == [[0.0, 0.0, -2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]]


def test_outcome_rewards_are_cleared_under_mask_no_eos_with_zero(run, seen):
    inputs = given(run, seen, {"mask_no_eos_with_zero": True})
    assert inputs.outcome_rewards[0].tolist() == [0.0] * 5


def test_kl_rewards_are_a_channel_of_their_own(run, seen):
    inputs = given(run, seen, {"kl_ctl": 1.0}, logprobs=[[0.0, -1.0, -2.0, 0.0, 0.0]] * 2, ref_logp=[[0.0] * 5] * 2)
    assert inputs.kl_rewards.tolist() == [[1.0, 2.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
    assert inputs.outcome_rewards[0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_kl_rewards_are_zero_at_the_last_valid_column(run, seen):
    # the wrap makes it active; kl_rewards of the result keep it
    batch = rows("gg", logprobs=[[-1.0, -2.0]], ref_logp=[[0.0, 0.0]])
    out = run(batch, SEE | {"kl_ctl": 1.0})
    assert seen[-1].kl_rewards.tolist() == [[2.0, 0.0]]
    assert out["kl_rewards"].tolist() == [[2.0, 1.0]]


def test_process_rewards_are_the_folded_ones(run, seen):
    inputs = given(run, seen, {"token_rewards_as_adv": False}, token_rewards=[[0.0, 0.5, 0.5, 0.0, 0.0]] * 2)
    assert inputs.process_rewards.tolist() == [[0.0, 0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("channels", [{}, {"token_rewards": [[0.0, 0.5, 0.5, 0.0, 0.0]] * 2}], ids=["none", "direct"])
def test_process_rewards_are_zeros_where_nothing_is_folded(run, seen, channels):
    assert given(run, seen, **channels).process_rewards.tolist() == [[0.0] * 5] * 2


def test_values_are_the_batchs_and_zeros_without(run, seen):
    assert given(run, seen, values=VALUES).values.tolist() == VALUES
    assert given(run, seen).values.tolist() == [[0.0] * 5] * 2


def test_bootstrap_values_are_those_of_the_last_valid_tokens_not_gated_by_truncation(run, seen):
    assert given(run, seen, values=VALUES, is_truncated=[True, False]).bootstrap_values.tolist() == [4.0, 9.0]


def test_bootstrap_values_are_zeros_without_values(run, seen):
    assert given(run, seen).bootstrap_values.tolist() == [0.0, 0.0]


def test_is_truncated_is_bool_per_row(run, seen):
    inputs = given(run, seen)
    assert inputs.is_truncated.dtype == torch.bool and inputs.is_truncated.tolist() == [True, False]


def test_loss_mask_is_aligned(run, seen):
    assert given(run, seen).loss_mask.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0, 0.0]]


def test_turn_ids_are_none_without_any(run, seen):
    assert given(run, seen).turn_ids is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_turn_ids_are_aligned_int64_and_as_they_are(run, seen, dtype):
    # not checked: a custom estimator answers for its unit
    ids = torch.tensor([[9, 7, 5, -3, 4]] * 2, dtype=dtype)
    inputs = given(run, seen, turn_ids=ids)
    assert inputs.turn_ids.dtype == torch.int64
    assert inputs.turn_ids.tolist() == [[7, 5, -3, 4, -1]] * 2


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_the_timestep_unit_demands_no_turn_ids(run, seen, unit):
    assert given(run, seen, {"gae_timestep_unit": unit}).turn_ids is None


def test_discount_and_config_are_given(run, seen):
    compute = run.build(SEE | {"discount": 0.5})
    compute(case())
    assert seen[-1].discount == 0.5 and seen[-1].config is compute.spec


def test_config_is_the_trainers_own_object(run, seen):
    @dataclass
    class Actor:
        advantage: Any
        kl_ctl: float = 0.0

    actor = Actor(SEE["advantage"] | {"backend": run.backend})
    build(actor)(case())
    assert seen[-1].config is actor


@pytest.mark.parametrize("name", ["outcome_rewards", "kl_rewards", "process_rewards", "values", "loss_mask"])
def test_channels_are_float32_of_the_batchs_shape(run, seen, name):
    x = getattr(given(run, seen, values=torch.tensor(VALUES, dtype=torch.float64)), name)
    assert x.dtype == torch.float32 and x.shape == (2, 5)


def test_it_sees_the_callers_own_width(run, seen):
    run(rows("pg"), SEE)
    assert seen[-1].outcome_rewards.shape == (1, 2)


# ---- results ----


def test_its_three_results_are_the_channels_and_nothing_is_added(run):
    # total + 2 with a KL of 1: were KL added again, it would be counted twice
    channels = {"logprobs": [[0.0, -1.0, 0.0, 0.0, 0.0]] * 2, "ref_logp": [[0.0] * 5] * 2}
    out = run(case(**channels), SEE | {"kl_ctl": 1.0})
    total = [[1.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 3.0, 0.0, 0.0]]
    assert out["advantages"].tolist() == total
    assert out["returns"].tolist() == [[x + 1 for x in row] for row in total]
    assert out["tot_rewards"].tolist() == [[x + 2 for x in row] for row in total]


def test_its_advantages_are_normalised_and_shaped_by_what_follows(run):
    # active cells 0, 1, 0, 2: mean 0.75; then + 0.25
    token_rewards = [[0.0, 0.25, 0.25, 0.25, 0.0]] * 2
    norm = {"adv_norm": {"std_level": None}}
    out = run(case(token_rewards=token_rewards), plugin(SLOT, "numbers_its_cells") | norm)
    assert near(out["advantages"], [[-0.5, 0.5, 0.0, 0.0, 0.0], [-0.5, 0.0, 1.5, 0.0, 0.0]])


def test_its_returns_and_totals_are_not_normalised(run):
    out = run(case(), plugin(SLOT, "numbers_its_cells") | {"adv_norm": {}})
    assert out["returns"].tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0, 0.0]]


@pytest.mark.parametrize("wrong", WRONGS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_result_is_refused_by_field_and_function(run, field, wrong):
    error = run.refusal(case(), plugin(SLOT, "wrong_estimator", field=field, wrong=wrong))
    assert type(error) is PluginResult
    assert f"'{field}'" in str(error) and "wrong_estimator" in str(error)


@pytest.mark.parametrize("kind", ["tensor", "mapping", "tuple", "none", "no_total"])
def test_a_result_of_another_kind_is_refused_with_the_one_to_return(run, kind):
    error = run.refusal(case(), plugin(SLOT, "estimator_of_kind", kind=kind))
    assert type(error) is PluginResult and "TemporalResult" in str(error)


# ---- writing, raising ----


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("field", ["outcome_rewards", "values", "loss_mask", "turn_ids", "bootstrap_values"])
def test_a_function_that_writes_to_its_inputs_is_named_and_the_batch_stays(run, field, way):
    batch = case(values=VALUES, turn_ids=[[-1, 0, 0, -1, -1]] * 2)
    before = {key: x.clone() for key, x in batch.items()}
    error = run.refusal(batch, plugin(SLOT, "write_estimator", way=way, field=field))
    assert type(error) is PluginWroteInput
    assert f"'{field}'" in str(error) and "write_estimator" in str(error)
    assert all(torch.equal(batch[key], x) for key, x in before.items())


def test_a_function_that_raises_is_named_with_its_own_error_chained(run):
    error = run.refusal(case(), plugin(SLOT, "raises"))
    assert type(error) is PluginRaised
    assert "plugins_under_test.raises" in str(error) and isinstance(error.__cause__, KeyError)


# ---- compute_gae_lambda ----


def test_a_number_lambda_is_that_number(run, seen):
    run(case(), plugin(SLOT, "lambda_as_advantage", unit="token") | {"gae_lambda": 0.25})
    assert seen[-1] == 0.25


@pytest.mark.parametrize(("unit", "want"), [("token", [2 / 3, 0.5]), ("turn", [0.5, 0.5])])
@pytest.mark.parametrize("configured", ["token", "turn"])
def test_a_lambda_function_gets_lengths_in_the_estimators_own_unit(run, unit, want, configured):
    # tokens 3 and 2, turns 2 and 2: 1 - 1/n
    batch = rows("pgggp", "pgpg.", turn_ids=[[-1, 0, 0, 1, -1], [-1, 0, -1, 1, -1]])
    actor = LAMBDA | {"gae_timestep_unit": configured}
    out = run(batch, plugin(SLOT, "lambda_as_advantage", unit=unit) | actor)
    assert near(out["advantages"][:, 0], want)


def test_a_lambda_function_is_read_from_a_trainers_own_object(run):
    @dataclass
    class Actor:
        advantage: Any
        gae_lambda: str = LAMBDA["gae_lambda"]
        gae_lambda_kwargs: Any = None
        kl_ctl: float = 0.0

    block = plugin(SLOT, "lambda_as_advantage", unit="token")["advantage"] | {"backend": run.backend}
    out = build(Actor(block, gae_lambda_kwargs={"alpha": 1.0}))(rows("pgggp"))
    assert near(out["advantages"][:, 0], [2 / 3])


def test_the_turn_unit_without_turn_ids_is_refused_by_what_needs_them(run):
    error = run.refusal(case(), plugin(SLOT, "lambda_as_advantage", unit="turn") | LAMBDA)
    assert "turn_ids" in str(error)


def test_a_users_lambda_function_that_returns_something_wrong_is_named(run):
    actor = {"gae_lambda": "tests.contracts.plugins_under_test.wrong_lambda", "gae_lambda_kwargs": {"wrong": "int"}}
    error = run.refusal(case(), plugin(SLOT, "lambda_as_advantage", unit="token") | actor)
    assert type(error) is PluginResult and "wrong_lambda" in str(error)
