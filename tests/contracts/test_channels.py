"""semantics.md, "Channel -> formula": each row of the table, by numbers worked out by hand.

| row of the table | proven elsewhere |
|---|---|
| rewards after custom shaping | test_plugins_outcome.py |
| direct and process where a plugin sees them | test_plugins_process.py |
| lambda from a user's function | test_plugins_lambda.py |
| mean and scale inside reward_norm and adv_norm | test_mean_and_scale.py |
| the wrap in every channel | test_surprising_rules.py |
"""

import math

import pytest
import torch

from tests.contracts.small import near, plugin, rows

PENALTY = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 0.5,
    "max_new_tokens": 4,
}
FOLD = {"token_rewards_as_adv": False}
TURN = {"gae_timestep_unit": "turn"}


# ---- is_truncated ----


def test_is_truncated_is_the_given_flags_where_nonzero_is_true(run):
    out = run(rows("pg", "pg", "pg", is_truncated=torch.tensor([0, 2, -1])))
    assert out["is_truncated"].tolist() == [False, True, True]


def test_given_flags_win_over_the_padded_width(run):
    assert run(rows("pgg", "pg.", is_truncated=[False, True]))["is_truncated"].tolist() == [False, True]


def test_without_flags_the_rows_that_fill_the_width_are_truncated(run):
    assert run(rows("pgg", "pg.", is_truncated=None))["is_truncated"].tolist() == [True, False]


# ---- rewards and the length penalty ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_integer_rewards_stay_integer_with_identity_and_no_penalty(run, dtype):
    out = run(rows("pg", "pg", rewards=torch.tensor([3, -1], dtype=dtype)))
    assert out["rewards"].dtype == dtype
    assert out["rewards"].tolist() == [3, -1]


def test_integer_rewards_become_float_under_a_penalty_even_where_it_is_zero(run):
    out = run(rows("pg", rewards=torch.tensor([3])), PENALTY)
    assert out["rewards"].dtype == torch.float32
    assert out["rewards"].tolist() == [3.0]


def test_rewards_are_never_biased_scaled_clipped_or_normalised(run):
    actor = {"reward_bias": 1.0, "reward_scaling": 3.0, "reward_clip": 2.0, "reward_norm": {}}
    assert run(rows("pg", "pg", rewards=[1.0, -4.0]), actor)["rewards"].tolist() == [1.0, -4.0]


def test_the_penalty_is_linear_beyond_the_budget_less_its_tail_and_never_positive(run):
    # budget 4, tail 2: -(n - 2) / 2 * 0.5
    out = run(rows("pg....", "pgg...", "pggg..", "pgggg.", rewards=[1.0] * 4), PENALTY)
    assert out["rewards"].tolist() == [1.0, 1.0, 0.75, 0.5]


def test_the_penalty_counts_generated_tokens_and_no_others(run):
    assert run(rows("pppgpgpgp", rewards=[1.0]), PENALTY)["rewards"].tolist() == [0.75]


def test_without_the_switch_there_is_no_penalty(run):
    assert run(rows("pgggggg", rewards=[1.0]), PENALTY | {"overlong_reward_penalty": False})["rewards"].tolist() == [
        1.0
    ]


# ---- score ----


@pytest.mark.parametrize(("reward", "score"), [(1.0, 3.0), (2.0, 4.0), (-4.0, -4.0)])
def test_the_score_is_biased_then_scaled_then_clipped_to_both_sides(run, reward, score):
    actor = {"reward_bias": 0.5, "reward_scaling": 2.0, "reward_clip": 4.0}
    assert run(rows("pg", rewards=[reward]), actor)["tot_rewards"].tolist() == [[score, 0.0]]


def test_the_score_contains_the_penalty(run):
    assert run(rows("pgggg.", rewards=[1.0]), PENALTY | {"reward_scaling": 4.0})["tot_rewards"][0, 3] == 2.0


def test_the_score_is_clipped_before_it_is_normalised(run):
    # clipped to [0, 1], mean 0.5
    actor = {"reward_clip": 1.0, "reward_norm": {"std_level": None}}
    assert run(rows("pg", "pg", rewards=[0.0, 9.0]), actor)["tot_rewards"][:, 0].tolist() == [-0.5, 0.5]


def test_an_infinite_clip_clips_nothing(run):
    actor = {"reward_clip": math.inf}
    assert run(rows("pg", rewards=[1e6]), actor)["tot_rewards"].tolist() == [[1e6, 0.0]]


# ---- loss mask and log probabilities ----


def test_loss_mask_is_the_generated_tokens_rolled_by_one(run):
    assert run(rows("ppgpg."))["loss_mask"].tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]


def test_any_nonzero_loss_mask_counts_as_generated(run):
    assert run(rows("pggp", loss_mask=[[0.0, 0.5, -2.0, 0.0]]))["loss_mask"].tolist() == [[1.0, 1.0, 0.0, 0.0]]


LOGPROBS = [[-1.0, -2.0, -3.0, -4.0]]
PROX = [[-5.0, -6.0, -7.0, -8.0]]


def test_logprobs_are_rolled_and_masked(run):
    assert run(rows("pggp", logprobs=LOGPROBS))["logprobs"].tolist() == [[-2.0, -3.0, 0.0, 0.0]]


def test_recomputed_logprobs_are_prox_logp_masked_but_not_rolled(run):
    batch = rows("pggp", logprobs=LOGPROBS, prox_logp=PROX)
    assert run(batch, {"recompute_logprob": True})["logprobs"].tolist() == [[-5.0, -6.0, 0.0, 0.0]]


def test_under_decoupled_loss_recomputing_changes_no_logprobs(run):
    batch = rows("pggp", logprobs=LOGPROBS, prox_logp=PROX)
    out = run(batch, {"recompute_logprob": True, "use_decoupled_loss": True})
    assert out["logprobs"].tolist() == [[-2.0, -3.0, 0.0, 0.0]]


@pytest.mark.parametrize("recompute", [False, True])
def test_prox_logp_equals_logprobs_outside_decoupled_loss(run, recompute):
    out = run(rows("pggp", logprobs=LOGPROBS, prox_logp=PROX), {"recompute_logprob": recompute})
    assert torch.equal(out["prox_logp"], out["logprobs"])


def test_prox_logp_is_produced_outside_decoupled_loss_even_if_none_was_given(run):
    assert run(rows("pggp", logprobs=LOGPROBS))["prox_logp"].tolist() == [[-2.0, -3.0, 0.0, 0.0]]


def test_under_decoupled_loss_prox_logp_stays_the_input_as_it_is(run):
    batch = rows("pggp", logprobs=LOGPROBS, prox_logp=PROX)
    assert run(batch, {"use_decoupled_loss": True})["prox_logp"] is batch["prox_logp"]


def test_under_decoupled_loss_no_prox_logp_is_produced(run):
    assert "prox_logp" not in run(rows("pggp", logprobs=LOGPROBS), {"use_decoupled_loss": True})


@pytest.mark.parametrize("actor", [{}, {"recompute_logprob": True}, {"use_decoupled_loss": True}])
def test_mopd_behavior_logprobs_are_the_rollouts_own_rolled_and_masked(run, actor):
    batch = rows("pggp", logprobs=LOGPROBS, prox_logp=PROX, mopd_teacher_logp_sum=[1.0])
    assert run(batch, actor)["mopd_behavior_logprobs"].tolist() == [[-2.0, -3.0, 0.0, 0.0]]


def test_without_a_mopd_teacher_there_are_no_mopd_behavior_logprobs(run):
    assert "mopd_behavior_logprobs" not in run(rows("pggp", logprobs=LOGPROBS))


def test_ref_logp_is_masked_but_not_rolled(run):
    assert run(rows("pggp", ref_logp=LOGPROBS))["ref_logp"].tolist() == [[-1.0, -2.0, 0.0, 0.0]]


def test_without_ref_logp_none_is_produced(run):
    assert "ref_logp" not in run(rows("pggp"), {"kl_ctl": 1.0})


def test_without_ref_logp_zeros_are_used(run):
    # d = logprobs - 0
    out = run(rows("pggp", logprobs=LOGPROBS), {"kl_ctl": 0.5})
    assert out["kl_rewards"].tolist() == [[1.0, 1.5, 0.0, 0.0]]


# ---- KL ----


def kl_at_0(run, d, kl_ctl=0.5, **actor):
    batch = rows("pgg", logprobs=[[0.0, d, 0.0]], ref_logp=[[0.0, 0.0, 0.0]])
    return run(batch, {"kl_ctl": kl_ctl} | actor)["kl_rewards"][0, 0].item()


@pytest.mark.parametrize(
    ("kind", "d", "k"),
    [
        ("k1", 2.0, 2.0),
        ("k1", -2.0, -2.0),
        ("k2", 2.0, 2.0),
        ("k2", -3.0, 4.5),
        ("k3", 1.0, math.exp(-1)),
        ("k3", -1.0, math.e - 2),
    ],
)
def test_kl_rewards_are_minus_kl_ctl_times_the_kind_of_divergence(run, kind, d, k):
    assert kl_at_0(run, d, kl_estimator=kind) == pytest.approx(-0.5 * k, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "d", "kl_reward"), [("k1", 30.0, -5.0), ("k1", -30.0, 5.0), ("k2", 30.0, -5.0), ("k3", -30.0, -5.0)]
)
def test_the_divergence_is_clamped_to_ten_on_both_sides(run, kind, d, kl_reward):
    assert kl_at_0(run, d, kl_estimator=kind) == kl_reward


def test_a_negative_kl_ctl_turns_the_penalty_around(run):
    assert kl_at_0(run, 2.0, kl_ctl=-0.5) == 1.0


def test_the_divergence_is_taken_from_the_recomputed_logprobs(run):
    batch = rows("pggp", logprobs=LOGPROBS, prox_logp=PROX, ref_logp=[[0.0] * 4])
    out = run(batch, {"kl_ctl": 1.0, "recompute_logprob": True})
    assert out["kl_rewards"].tolist() == [[5.0, 6.0, 0.0, 0.0]]


def test_kl_rewards_reach_the_total_rewards_per_token(run):
    batch = rows("pggp", logprobs=LOGPROBS, ref_logp=[[0.0] * 4], rewards=[10.0])
    assert run(batch, {"kl_ctl": 1.0})["tot_rewards"].tolist() == [[2.0, 3.0, 10.0, 0.0]]


def test_the_kl_of_the_last_valid_column_is_zero_in_the_total_and_kept_in_kl_rewards(run):
    # only the wrap can make that column active: g[0] = 1 and L = T
    out = run(rows("gg", logprobs=[[-1.0, -2.0]], ref_logp=[[0.0, 0.0]]), {"kl_ctl": 1.0})
    assert out["kl_rewards"].tolist() == [[2.0, 1.0]]
    assert out["tot_rewards"].tolist() == [[2.0, 0.0]]


# ---- outcome ----


@pytest.mark.parametrize(("row", "column"), [("pggg..", 2), ("pg....", 0), ("p.....", 0), ("......", 0), ("pggggg", 4)])
def test_the_outcome_sits_one_column_before_the_last_valid_token_and_never_before_the_first(run, row, column):
    out = run(rows(row, rewards=[3.0]))
    assert out["tot_rewards"].tolist() == [[3.0 if t == column else 0.0 for t in range(6)]]


def test_a_truncated_row_has_no_outcome_under_mask_no_eos_with_zero(run):
    batch = rows("pgg", "pgg", rewards=[1.0, 2.0], is_truncated=[True, False])
    out = run(batch, {"mask_no_eos_with_zero": True})
    assert out["tot_rewards"].tolist() == [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]


def test_a_truncated_row_keeps_its_outcome_otherwise(run):
    assert run(rows("pgg", rewards=[1.0], is_truncated=[True]))["tot_rewards"].tolist() == [[0.0, 1.0, 0.0]]


# ---- process rewards: direct ----


def test_direct_rewards_are_rolled_masked_and_on_by_default(run):
    out = run(rows("pggp", token_rewards=[[9.0, 0.25, 0.5, 9.0]]))
    assert out["advantages"].tolist() == [[0.25, 0.5, 0.0, 0.0]]


def test_direct_rewards_are_never_in_the_total(run):
    out = run(rows("pggp", token_rewards=[[9.0, 0.25, 0.5, 9.0]], turn_ids=[[-1, 0, 0, -1]]), TURN)
    assert out["tot_rewards"].tolist() == [[0.0] * 4]


def test_token_rewards_are_zero_on_truncated_rows_under_mask_no_eos_with_zero(run):
    batch = rows("pgg", "pgg", token_rewards=[[9.0, 0.25, 0.5]] * 2, is_truncated=[True, False])
    out = run(batch, {"mask_no_eos_with_zero": True})
    assert out["advantages"].tolist() == [[0.0, 0.0, 0.0], [0.25, 0.5, 0.0]]


# ---- process rewards: folded ----


def test_folded_rewards_sit_at_turn_ends_and_nowhere_else(run):
    batch = rows("pggpg.", token_rewards=[[9.0, 0.25, 0.25, 9.0, 0.5, 9.0]], turn_ids=[[-1, 0, 0, -1, 1, -1]])
    assert run(batch, FOLD)["tot_rewards"].tolist() == [[0.0, 0.25, 0.0, 0.5, 0.0, 0.0]]


def test_folded_rewards_shape_no_advantage_directly(run):
    # discount 0: an advantage is its own column's total reward
    batch = rows("pgg.", token_rewards=[[0.0, 0.25, 0.25, 0.0]])
    assert run(batch, FOLD | {"discount": 0.0})["advantages"].tolist() == [[0.0, 0.25, 0.0, 0.0]]


def test_a_turn_ends_where_the_next_active_token_has_another_id(run):
    batch = rows("pggg.", token_rewards=[[0.0, 0.25, 0.25, 0.5, 0.0]], turn_ids=[[-1, 0, 0, 1, -1]])
    assert run(batch, FOLD)["tot_rewards"].tolist() == [[0.0, 0.25, 0.5, 0.0, 0.0]]


def test_without_turn_ids_every_run_of_active_tokens_is_a_turn(run):
    batch = rows("pggpg.", token_rewards=[[0.0, 0.25, 0.25, 0.0, 0.5, 0.0]])
    assert run(batch, FOLD)["tot_rewards"].tolist() == [[0.0, 0.25, 0.0, 0.5, 0.0, 0.0]]


def test_the_last_column_has_turn_id_minus_one_and_ends_its_neighbours_turn(run):
    # the wrap makes the last column active; with ids the column before it ends a turn, without it goes on
    drawn, rewards = "ggg", [[0.5, 0.5, 0.5]]
    with_ids = run(rows(drawn, token_rewards=rewards, turn_ids=[[0, 0, 0]]), FOLD)
    without = run(rows(drawn, token_rewards=rewards), FOLD)
    assert with_ids["tot_rewards"].tolist() == [[0.0, 0.5, 0.5]]
    assert without["tot_rewards"].tolist() == [[0.0, 0.0, 0.5]]


@pytest.mark.parametrize("actor", [FOLD, FOLD | TURN], ids=["token", "turn"])
def test_total_rewards_are_outcome_plus_kl_plus_folded_in_both_units(run, actor):
    batch = rows(
        "pgg.",
        rewards=[8.0],
        logprobs=[[0.0, -1.0, -2.0, 0.0]],
        ref_logp=[[0.0] * 4],
        token_rewards=[[0.0, 0.25, 0.25, 0.0]],
        turn_ids=[[-1, 0, 0, -1]],
    )
    out = run(batch, actor | {"kl_ctl": 1.0})
    assert out["tot_rewards"].tolist() == [[1.0, 8.0 + 2.0 + 0.25, 0.0, 0.0]]


# ---- lambda ----


def first_advantages(run, gae_lambda, **actor):
    """Advantages of an outcome of 1 over three tokens: lambda^2, lambda, 1."""
    return run(rows("pggg.", rewards=[1.0]), {"gae_lambda": gae_lambda} | actor)["advantages"][0, :3]


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0, 2.0, -0.5])
def test_lambda_may_be_any_finite_number(run, gae_lambda):
    assert near(first_advantages(run, gae_lambda), [gae_lambda**2, gae_lambda, 1.0])


LAMBDA = "compiled_adv.gae."


@pytest.mark.parametrize(
    ("name", "kwargs", "by_length"),
    [
        ("vapo_length_adaptive_gae", {"alpha": 0.5}, {1: 0.0, 2: 0.0, 3: 1 / 3, 4: 0.5}),
        ("relative_position_gae_lambda", {"q": 0.25}, {1: 1.0, 2: 0.25, 3: 0.5, 5: 0.25**0.25}),
        ("constant_gae_lambda", {"value": 0.75}, {1: 0.75, 3: 0.75}),
    ],
)
def test_a_lambda_function_gets_each_rows_own_length_in_tokens(run, name, kwargs, by_length):
    drawn = ["p" + "g" * n + "p" for n in by_length]
    # the outcome sits behind the generated tokens' column, so a process reward folded into the last one carries it
    token_rewards = torch.ones(len(drawn), max(map(len, drawn)))
    actor = FOLD | {"gae_lambda": LAMBDA + name, "gae_lambda_kwargs": kwargs}
    out = run(rows(*drawn, token_rewards=token_rewards), actor)
    want = [x ** (n - 1) for n, x in by_length.items()]
    assert near(out["advantages"][:, 0], want)


@pytest.mark.parametrize("name", ["vapo_length_adaptive_gae", "relative_position_gae_lambda"])
def test_a_row_without_active_tokens_has_lambda_zero(name):
    from compiled_adv import gae

    kwargs = {"alpha": 0.5} if name.startswith("vapo") else {"q": 0.25}
    assert getattr(gae, name)({"timestep_lengths": torch.tensor([0])}, **kwargs).tolist() == [0.0]


def test_a_lambda_function_gets_distinct_active_turns_in_the_turn_unit(run):
    # three tokens, two turns: 1 - 1 / (1 * 2) = 0.5
    batch = rows("pggpg", rewards=[1.0], turn_ids=[[-1, 0, 0, -1, 2]])
    actor = TURN | {"gae_lambda": LAMBDA + "vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 1.0}}
    assert run(batch, actor)["advantages"].tolist() == [[0.5, 0.5, 0.0, 1.0, 0.0]]


# ---- token GAE ----

VALUES = [[0.5, 1.0, 0.25, 2.0, 4.0]]
HALF = {"discount": 0.5, "gae_lambda": 0.5}


def test_token_gae_steps_over_active_columns_alone(run):
    # column 2: 1 - 0.25 = 0.75; column 0: 0.5 * 0.25 - 0.5 + 0.25 * 0.75 = -0.1875
    out = run(rows("pgpg.", rewards=[1.0], values=VALUES), HALF)
    assert out["advantages"][0, [0, 2]].tolist() == [-0.1875, 0.75]


def test_token_gae_starts_from_the_value_of_the_last_valid_token_if_the_row_was_truncated(run):
    # column 2: 1 + 0.5 * 2 - 0.25 = 1.75; column 0: 0.5 * 0.25 - 0.5 + 0.25 * 1.75 = 0.0625
    out = run(rows("pgpg.", rewards=[1.0], values=VALUES, is_truncated=[True]), HALF)
    assert out["advantages"].tolist() == [[0.0625, 1.75, 1.75, 0.0, 0.0]]


def test_token_gae_returns_are_advantages_plus_values_in_every_column(run):
    out = run(rows("pgpg.", rewards=[1.0], values=VALUES, is_truncated=[True]), HALF)
    assert out["returns"].tolist() == [[0.5625, 2.75, 2.0, 2.0, 4.0]]


def test_the_last_column_has_no_advantage_in_token_gae(run):
    assert run(rows("gg", rewards=[1.0]))["advantages"].tolist() == [[1.0, 0.0]]


def test_token_gae_rewards_are_the_total_rewards(run):
    batch = rows("pgg.", rewards=[8.0], logprobs=[[0.0, -1.0, -2.0, 0.0]], ref_logp=[[0.0] * 4])
    out = run(batch, {"kl_ctl": 1.0})
    assert out["advantages"].tolist() == [[11.0, 10.0, 0.0, 0.0]]
    assert out["returns"].tolist() == [[11.0, 10.0, 0.0, 0.0]]


def test_absent_values_are_zeros_for_the_bootstrap_too(run):
    out = run(rows("pgg", rewards=[1.0], is_truncated=[True]))
    assert out["advantages"].tolist() == [[1.0, 1.0, 0.0]]
    assert torch.equal(out["returns"], out["advantages"])


# ---- turn GAE ----


def turn_case(**channels):
    """Turn 0 at columns 0 and 1, turn 2 at column 3; an outcome of 1; truncated, so value 8 is the bootstrap."""
    batch = {
        "rewards": [1.0],
        "values": [[0.5, 9.0, 9.0, 0.25, 8.0, 7.0]],
        "turn_ids": [[-1, 0, 0, -1, 2, -1]],
        "is_truncated": [True],
    }
    return rows("pggpg.", **(batch | channels))


def test_turn_gae_takes_one_step_per_distinct_active_turn_valued_at_its_first_token(run):
    # turn 2: 1 + 0.5 * 8 - 0.25 = 4.75; turn 0: 0.5 * 0.25 - 0.5 + 0.25 * 4.75 = 0.8125
    out = run(turn_case(), TURN | HALF)
    assert out["advantages"].tolist() == [[0.8125, 0.8125, 0.0, 4.75, 0.0, 0.0]]


def test_turn_gae_returns_are_the_turns_run_plus_its_value_and_values_elsewhere(run):
    assert run(turn_case(), TURN | HALF)["returns"].tolist() == [[1.3125, 1.3125, 9.0, 5.0, 8.0, 7.0]]


def test_turn_gae_without_truncation_bootstraps_nothing(run):
    # turn 2: 1 - 0.25 = 0.75; turn 0: 0.125 - 0.5 + 0.25 * 0.75 = -0.1875
    out = run(turn_case(is_truncated=[False]), TURN | HALF)
    assert out["advantages"].tolist() == [[-0.1875, -0.1875, 0.0, 0.75, 0.0, 0.0]]


def test_turn_gae_adds_kl_to_advantages_per_token_and_not_to_returns(run):
    kl = {"logprobs": [[0.0, -1.0, -2.0, 0.0, -4.0, 0.0]], "ref_logp": [[0.0] * 6]}
    out = run(turn_case(**kl), TURN | HALF | {"kl_ctl": 1.0})
    assert out["advantages"].tolist() == [[1.8125, 2.8125, 0.0, 8.75, 0.0, 0.0]]
    assert out["returns"].tolist() == [[1.3125, 1.3125, 9.0, 5.0, 8.0, 7.0]]


def test_turn_gae_adds_a_turns_folded_rewards_to_its_reward(run):
    # turn 2: 1.5 + 4 - 0.25 = 5.25; turn 0: 0.25 + 0.125 - 0.5 + 0.25 * 5.25 = 1.1875
    batch = turn_case(token_rewards=[[0.0, 0.25, 0.25, 0.0, 0.5, 0.0]])
    out = run(batch, TURN | HALF | FOLD)
    assert out["advantages"].tolist() == [[1.1875, 1.1875, 0.0, 5.25, 0.0, 0.0]]


# ---- adv_norm ----


def test_adv_norm_leaves_a_batch_without_active_tokens_unchanged(run):
    # the outcome stands in no advantage; the values show that returns are as they were, too
    actor = {"adv_norm": {}, "token_rewards_as_adv": True}
    out = run(rows("ppp", rewards=[5.0], values=[[1.0, 2.0, 3.0]]), actor)
    assert out["advantages"].tolist() == [[0.0, 0.0, 0.0]]
    assert out["returns"].tolist() == [[1.0, 2.0, 3.0]]


def test_adv_norm_leaves_a_custom_estimators_advantages_unchanged_if_no_token_is_active(run):
    actor = {"adv_norm": {}} | plugin("estimator", "numbers_its_cells")
    assert run(rows("ppp"), actor)["advantages"].tolist() == [[0.0, 1.0, 2.0]]


def test_adv_norm_centres_and_scales_over_active_tokens_and_clears_the_rest(run):
    # active advantages 1, 1, 4: mean 2, std sqrt(3)
    out = run(rows("ppgg", "pg..", rewards=[1.0, 4.0]), {"adv_norm": {"eps": 0.0}})
    third = 1 / math.sqrt(3)
    assert near(out["advantages"], [[0.0, -third, -third, 0.0], [2 * third, 0.0, 0.0, 0.0]])


def test_adv_norm_does_not_touch_returns(run):
    out = run(rows("ppgg", "pg..", rewards=[1.0, 4.0]), {"adv_norm": {}})
    assert out["returns"].tolist() == [[1.0, 1.0, 1.0, 0.0], [4.0, 0.0, 0.0, 0.0]]


# ---- process shaping ----


def test_process_shaping_acts_on_active_tokens_alone(run):
    # column 1 is inactive and shows the carried 3; mode and mask must leave it
    batch = rows("pgpg", rewards=[3.0], token_rewards=[[9.0, -1.0, 9.0, 0.5]])
    assert run(batch)["advantages"].tolist() == [[2.0, 3.0, 3.5, 0.0]]
    assert run(batch, advantage_shaping_mode="gvpo")["advantages"].tolist() == [[0.0, 3.0, 3.0, 0.0]]
    batch = rows("pgpg", rewards=[3.0], token_rewards=[[9.0, 0.25, 9.0, 0.5]])
    assert run(batch, advantage_shaping_mode="process_weighted")["advantages"].tolist() == [[0.75, 3.0, 1.5, 0.0]]


def test_process_shaping_comes_after_adv_norm(run):
    # normalised -1 and 1 (mean 1, biased std 1), then + 0.25
    actor = {"adv_norm": {"std_unbiased": False, "eps": 0.0}}
    batch = rows("pg", "pg", rewards=[0.0, 2.0], token_rewards=[[0.0, 0.25]] * 2)
    assert run(batch, actor)["advantages"][:, 0].tolist() == [-0.75, 1.25]


@pytest.mark.parametrize("mode", ["additive", "gvpo", "process_weighted"])
def test_process_shaping_does_not_touch_returns(run, mode):
    batch = rows("pg", "pg", rewards=[1.0, -1.0], token_rewards=[[0.0, 0.25]] * 2)
    out = run(batch, advantage_shaping_mode=mode)
    assert out["returns"].tolist() == [[1.0, 0.0], [-1.0, 0.0]]


@pytest.mark.parametrize("mode", ["additive", "gvpo", "process_weighted"])
def test_built_in_process_shaping_without_direct_rewards_does_nothing(run, mode):
    out = run(rows("pg", "pg", rewards=[1.0, -1.0]), advantage_shaping_mode=mode)
    assert out["advantages"].tolist() == [[1.0, 0.0], [-1.0, 0.0]]


@pytest.mark.parametrize(
    ("advantage", "direct", "shaped"),
    [
        (2.0, -1.0, 0.0),  # above eps: cleared
        (-2.0, -1.0, -2.5),  # below -eps: times 1 + 0.25
        (0.0, -1.0, -0.75),  # within eps: the penalty
        (2.0, 0.5, 2.0),  # no failure
        (-2.0, 0.5, -2.0),
        (2.0, 0.0, 2.0),
    ],
)
def test_gvpo_shapes_failed_tokens(run, advantage, direct, shaped):
    call = {"gvpo_negative_scale": 0.25, "gvpo_zero_penalty": 0.75, "gvpo_zero_eps": 0.5}
    batch = rows("pg", rewards=[advantage], token_rewards=[[0.0, direct]])
    assert run(batch, advantage_shaping_mode="gvpo", **call)["advantages"].tolist() == [[shaped, 0.0]]


@pytest.mark.parametrize(
    ("advantage", "direct", "shaped"),
    [(2.0, 0.25, 0.5), (2.0, 0.0, 0.0), (0.0, 1.0, 0.0), (-2.0, 0.25, 0.25), (-2.0, 0.0, -2.0)],
)
def test_process_weighted_weighs_advantages_that_are_not_negative_and_replaces_others(run, advantage, direct, shaped):
    batch = rows("pg", rewards=[advantage], token_rewards=[[0.0, direct]])
    assert run(batch, advantage_shaping_mode="process_weighted")["advantages"].tolist() == [[shaped, 0.0]]


def test_the_modes_default_numbers_are_those_of_the_table(run):
    batch = rows("pg", "pg", rewards=[-2.0, 1e-7], token_rewards=[[0.0, -1.0]] * 2)
    out = run(batch, advantage_shaping_mode="gvpo")
    assert near(out["advantages"][:, 0], [-2.0 * 1.2, -0.4])


def test_advantages_are_the_output_of_process_shaping(run):
    out = run(rows("pg", rewards=[3.0]), plugin("process_adv_shaping", "constant", value=7.0))
    assert out["advantages"].tolist() == [[7.0, 7.0]]
