"""semantics.md, "Surprising rules": each by the numbers that it gives, beside those that one might expect.

| rule | proven elsewhere as well |
|---|---|
| 9 tail, 10 2eps | tests/golden: reward_norm_fixed_groups_tail, rollout_small_scale_is_one |
| 7 loo_std, group std with batch mean | tests/golden: reward_norm_leave_one_out, reward_norm_mixed_levels |
| what warns of a rule, and what strict rules do instead | test_warnings.py |
"""

import math

import pytest
import torch

from tests.contracts import plugins_under_test
from tests.contracts.small import group, meta_of, near, plugin, rows

TURN = {"gae_timestep_unit": "turn"}
FOLD = {"token_rewards_as_adv": False}
MASK_NO_EOS = {"mask_no_eos_with_zero": True}
RAW = {"mean_level": None, "mean_leave1out": False, "std_level": None, "std_unbiased": True, "eps": 0.0}


def scores(run, rewards, meta=None, actor=None, **norm):
    batch = rows(*["pg."] * len(rewards), rewards=rewards)
    return run(batch, {"reward_norm": RAW | norm} | (actor or {}), meta)["tot_rewards"][:, 0]


# ---- 1 masked_state ----


def test_1_token_gae_shows_the_carried_state_on_prompt_tool_and_earlier_positions(run):
    # active columns 2 and 4; the prompt (0, 1) and the tool token between (3) show what is carried past them
    out = run(rows("pppgpg..", rewards=[1.0]), {"gae_lambda": 0.5})
    assert out["advantages"].tolist() == [[0.5, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0]]


def test_1_adv_norm_alone_zeroes_the_carried_state(run):
    out = run(rows("pppgpg..", rewards=[1.0]), {"gae_lambda": 0.5, "adv_norm": RAW})
    assert out["advantages"].tolist() == [[0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0]]


def test_1_nothing_is_carried_behind_the_last_active_token(run):
    batch = rows("pgg.....", rewards=[1.0], values=[[0.0] * 3 + [9.0] * 5], is_truncated=[True])
    assert run(batch)["advantages"][0, 2:].tolist() == [0.0] * 6


# ---- 2 lost_outcome ----


def test_2_the_outcome_on_a_token_that_was_not_generated_reaches_the_total_and_no_advantage(run):
    out = run(rows("pggpp", rewards=[5.0]))
    assert out["tot_rewards"].tolist() == [[0.0, 0.0, 0.0, 5.0, 0.0]]
    assert out["advantages"].tolist() == [[0.0] * 5]


# ---- 3 wrap ----


def test_3_a_generated_first_token_makes_the_last_column_active(run):
    assert run(rows("ggp"))["loss_mask"].tolist() == [[1.0, 0.0, 1.0]]


def test_3_the_last_column_gets_the_first_tokens_log_probability(run):
    out = run(rows("ggp", logprobs=[[-1.0, -2.0, -3.0]], mopd_teacher_logp_sum=[0.0]))
    assert out["logprobs"].tolist() == [[-2.0, 0.0, -1.0]]
    assert out["mopd_behavior_logprobs"].tolist() == [[-2.0, 0.0, -1.0]]


def test_3_its_advantage_is_zero_in_token_gae(run):
    out = run(rows("ggg.", rewards=[1.0], values=[[0.0, 0.0, 0.0, 7.0]]))
    assert out["advantages"][0, 3] == 0.0


@pytest.mark.parametrize(("row", "in_total"), [("gg.", 1.0), ("ggg", 0.0)])
def test_3_its_kl_reaches_no_advantage_and_not_the_total_either_if_the_row_is_full(run, row, in_total):
    batch = rows(row, logprobs=[[-1.0, 0.0, 0.0]], ref_logp=[[0.0] * 3])
    out = run(batch, {"kl_ctl": 1.0})
    assert out["kl_rewards"][0, 2] == 1.0
    assert out["tot_rewards"][0, 2] == in_total
    assert out["advantages"].tolist() == [[0.0] * 3]


def test_3_its_folded_reward_reaches_the_total_and_no_advantage(run):
    out = run(rows("gpg.", token_rewards=[[0.5, 0.0, 0.25, 0.0]]), FOLD)
    assert out["tot_rewards"].tolist() == [[0.0, 0.25, 0.0, 0.5]]
    assert out["advantages"].tolist() == [[0.25, 0.25, 0.0, 0.0]]


def test_3_it_counts_in_adv_norm(run):
    # active advantages 3 and 0: mean 1.5
    out = run(rows("gg", rewards=[3.0]), {"adv_norm": RAW | {"mean_level": "batch"}})
    assert out["advantages"].tolist() == [[1.5, -1.5]]


def test_3_it_counts_in_the_lengths_of_lambda_functions(run):
    run(rows("ggg."), {"gae_lambda": "tests.contracts.plugins_under_test.see_lambda"})
    assert plugins_under_test.SEEN[-1]["effective_token_lengths"].tolist() == [3]


def test_3_turn_gae_refuses_it(run):
    error = run.refusal(rows("ggp", turn_ids=[[0, 0, -1]]), TURN)
    assert type(error).__name__ == "BadTurnIds" and "first token" in str(error)


# ---- 4 width ----


def test_4_without_flags_a_row_that_fills_the_width_bootstraps_though_it_may_have_ended(run):
    out = run(rows("pgg", "pg.", values=[[0.0, 0.0, 2.0]] * 2, is_truncated=None))
    assert out["is_truncated"].tolist() == [True, False]
    assert out["advantages"].tolist() == [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


# ---- 5 mask_no_eos_with_zero ----


def test_5_kl_and_bootstrap_of_a_truncated_row_stay(run):
    batch = rows(
        "pgg",
        rewards=[5.0],
        logprobs=[[0.0, -1.0, 0.0]],
        ref_logp=[[0.0] * 3],
        values=[[0.0, 0.0, 2.0]],
        is_truncated=[True],
    )
    out = run(batch, MASK_NO_EOS | {"kl_ctl": 1.0})
    assert out["advantages"].tolist() == [[3.0, 2.0, 0.0]]


def test_5_a_truncated_row_counts_in_the_reward_statistics(run):
    batch = rows("pg", "pg", rewards=[0.0, 4.0], is_truncated=[True, False])
    out = run(batch, MASK_NO_EOS | {"reward_norm": RAW | {"mean_level": "batch"}})
    assert out["tot_rewards"].tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_5_a_row_that_was_not_truncated_loses_nothing(run):
    assert run(rows("pg", rewards=[4.0]), MASK_NO_EOS)["tot_rewards"].tolist() == [[4.0, 0.0]]


# ---- 6 no floor ----


def test_6_the_length_penalty_has_no_floor(run):
    # 9 generated, budget 2, tail 1: -(9 - 1) / 1 * 0.5
    actor = {
        "overlong_reward_penalty": True,
        "overlong_tokens": 1,
        "overlong_penalty_factor": 0.5,
        "max_new_tokens": 2,
    }
    assert run(rows("p" + "g" * 9), actor)["rewards"].tolist() == [-4.0]


# ---- 7 loo_std, rms ----


def test_7_with_leave_one_out_the_std_is_around_the_leave_one_out_means(run):
    # 0, 3, 6 lie -4.5, 0, 4.5 from the means of the others: std sqrt(40.5 / 2) = 4.5
    got = scores(run, [0.0, 3.0, 6.0], mean_level="batch", mean_leave1out=True, std_level="batch")
    assert near(got, [-1.0, 0.0, 1.0])


def test_7_std_without_a_mean_level_is_the_root_mean_square_around_zero(run):
    assert near(scores(run, [3.0, 4.0], std_level="batch"), [0.6, 0.8])


def test_7_group_std_with_batch_mean_is_around_the_batch_mean(run):
    # mean 3; groups (0, 2) and (4, 6) lie (-3, -1) and (1, 3) from it: biased std sqrt(5)
    got = scores(run, [0.0, 2.0, 4.0, 6.0], mean_level="batch", std_level="group", std_unbiased=False, group_size=2)
    assert near(got, [x / math.sqrt(5) for x in (-3, -1, 1, 3)])


# ---- 8 loo_alone ----


def test_8_leave_one_out_over_a_batch_of_one_row_leaves_the_raw_score(run):
    assert scores(run, [3.0], mean_level="batch", mean_leave1out=True).tolist() == [3.0]


def test_8_leave_one_out_over_a_group_of_one_row_gives_zero(run):
    assert scores(run, [3.0], mean_level="group", mean_leave1out=True).tolist() == [0.0]


# ---- 9 tail ----


def test_9_rows_beyond_the_last_full_slice_have_mean_zero_and_are_divided_by_eps(run):
    got = scores(run, [0.0, 2.0, 3.0], mean_level="group", std_level="group", group_size=2, eps=0.5)
    assert got[2] == 6.0


def test_9_a_group_larger_than_the_batch_leaves_every_row_outside(run):
    got = scores(run, [1.0, 3.0], mean_level="group", std_level="group", group_size=4, eps=0.5)
    assert got.tolist() == [2.0, 6.0]


def test_9_in_adv_norm_too(run):
    norm = RAW | {"mean_level": "group", "std_level": "group", "group_size": 2, "eps": 0.5}
    out = run(rows("pg", "pg", "pg", rewards=[0.0, 2.0, 3.0]), {"adv_norm": norm})
    assert out["advantages"][2].tolist() == [6.0, 0.0]


def test_9_with_metadata_there_is_no_tail(run):
    got = scores(run, [0.0, 2.0, 3.0], meta_of(2, 1), mean_level="group", group_size=2)
    assert got.tolist() == [-1.0, 1.0, 0.0]


# ---- 10 2eps ----


def test_10_null_rollouts_and_no_rollouts_differ_by_the_2_eps_rule(run):
    # equal scores 2: biased std around a null mean is 2, eps 2: scale 4 = 2 * eps
    norm = {"std_level": "batch", "std_unbiased": False, "eps": 2.0}
    assert scores(run, [2.0, 2.0], meta_of(2, groups=[None]), **norm).tolist() == [2.0, 2.0]
    assert scores(run, [2.0, 2.0], meta_of(2, groups=None), **norm).tolist() == [0.5, 0.5]


def test_10_the_2_eps_rule_needs_a_std_level(run):
    # scale 1 <= 2 * eps either way; were the rule applied nothing would change, so look at a mean alone
    got = scores(run, [2.0, 4.0], meta_of(2, groups=[None]), mean_level="batch", eps=4.0)
    assert got.tolist() == [-1.0, 1.0]


# ---- 11 one rollout of many rows ----


def test_11_leave_one_out_gives_zero_on_all_tokens_of_a_prompt_that_is_one_rollout(run):
    norm = RAW | {"mean_level": "group", "mean_leave1out": True}
    out = run(rows("pgg", "pg.", rewards=[1.0, 1.0]), {"adv_norm": norm}, meta_of(2, groups=[group(2)]))
    assert out["advantages"].tolist() == [[0.0] * 3] * 2


def test_11_two_rollouts_of_one_row_each_are_two_members(run):
    norm = RAW | {"mean_level": "group", "mean_leave1out": True}
    out = run(rows("pg.", "pg.", rewards=[1.0, 3.0]), {"adv_norm": norm}, meta_of(2, groups=[group(1, 1)]))
    assert out["advantages"][:, 0].tolist() == [-2.0, 2.0]


def test_11_the_unbiased_std_of_a_prompt_that_is_one_rollout_is_one(run):
    norm = RAW | {"mean_level": "group", "std_level": "group", "eps": 1.0}
    out = run(rows("pg", "pg", rewards=[1.0, 5.0]), {"adv_norm": norm}, meta_of(2, groups=[group(2)]))
    assert out["advantages"][:, 0].tolist() == [-1.0, 1.0]


# ---- 12 references and penalty ----

PENALTY = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 1.0,
    "max_new_tokens": 3,
}


def test_12_explicit_references_skip_the_penalty_and_their_rows_do_not(run):
    # two tokens: penalty -0.5; references 1 and 3: mean 2
    meta = meta_of(2, groups=[group(1, 1, rewards=(1.0, 3.0))])
    batch = rows("pgg", "pgg", rewards=[1.0, 3.0])
    out = run(batch, PENALTY | {"reward_norm": RAW | {"mean_level": "group"}}, meta)
    assert out["tot_rewards"][:, 1].tolist() == [-1.5, 0.5]


def test_12_inferred_references_contain_the_penalty(run):
    meta = meta_of(2, groups=[group(1, 1)])
    batch = rows("pgg", "pg.", rewards=[1.0, 3.0])
    out = run(batch, PENALTY | {"reward_norm": RAW | {"mean_level": "group"}}, meta)
    # scores 0.5 and 3: mean 1.75
    assert [out["tot_rewards"][0, 1], out["tot_rewards"][1, 0]] == [-1.25, 1.25]


def test_12_a_reference_is_needed_only_when_reward_norm_has_a_level(run):
    batch, meta = rows("pg", "pg", rewards=[1.0, 3.0]), meta_of(2, groups=[group(2)])
    run(batch, {"reward_norm": RAW}, meta)
    run(batch, {}, meta)
    run.refusal(batch, {"reward_norm": RAW | {"std_level": "batch"}}, meta)


# ---- 13 fold_twice ----


def test_13_a_turn_with_a_gap_inside_is_folded_once_per_run(run):
    batch = rows("pgpg.", token_rewards=[[0.0, 0.5, 0.0, 0.5, 0.0]], turn_ids=[[-1, 0, -1, 0, -1]])
    assert run(batch, FOLD)["tot_rewards"].tolist() == [[0.5, 0.0, 0.5, 0.0, 0.0]]


# ---- 14 process shaping ----


def weighted(run, advantage, direct):
    batch = rows("pg", rewards=[advantage], token_rewards=[[0.0, direct]])
    return run(batch, advantage_shaping_mode="process_weighted")["advantages"][0, 0].item()


def test_14_process_weighted_turns_a_negative_advantage_positive(run):
    assert weighted(run, -3.0, 0.5) == 0.5


def test_14_process_weighted_leaves_an_advantage_of_exactly_zero(run):
    assert weighted(run, 0.0, 0.5) == 0.0


@pytest.mark.parametrize("advantage", [0.25, -0.25])
def test_14_gvpo_takes_an_advantage_of_exactly_eps_for_zero(run, advantage):
    batch = rows("pg", rewards=[advantage], token_rewards=[[0.0, -1.0]])
    out = run(batch, advantage_shaping_mode="gvpo", gvpo_zero_eps=0.25)
    assert near(out["advantages"][:, 0], [-0.4])


def test_14_gvpo_takes_a_process_reward_of_zero_for_no_failure(run):
    batch = rows("pg", rewards=[2.0], token_rewards=[[0.0, 0.0]])
    assert run(batch, advantage_shaping_mode="gvpo")["advantages"].tolist() == [[2.0, 0.0]]


# ---- 15 turns ----


def test_15_turn_returns_are_constant_over_a_turn_and_its_kl_is_per_token(run):
    batch = rows(
        "pgg.",
        rewards=[1.0],
        turn_ids=[[-1, 0, 0, -1]],
        values=[[0.5, 0.25, 0.0, 0.0]],
        logprobs=[[0.0, -1.0, -2.0, 0.0]],
        ref_logp=[[0.0] * 4],
    )
    out = run(batch, TURN | {"kl_ctl": 1.0})
    assert out["returns"][0, :2].tolist() == [1.0, 1.0]
    assert out["advantages"][0, :2].tolist() == [1.5, 2.5]
    assert out["tot_rewards"][0, :2].tolist() == [1.0, 3.0]


# ---- 16 unchecked ----


@pytest.mark.parametrize("turn_ids", [torch.tensor([[7.5]]), torch.tensor([[-1, 5, 0, 9]]), "no tensor at all"])
def test_16_token_unit_with_a_number_lambda_never_looks_at_turn_ids(run, turn_ids):
    run(rows("pggp", turn_ids=turn_ids))


@pytest.mark.parametrize("sizes", [(), (7,), (0, -1)])
def test_16_group_sizes_are_not_validated_unless_a_group_level_is_used(run, sizes):
    run(rows("pg", "pg"), {"reward_norm": {}, "adv_norm": {}}, meta_of(*sizes))


# ---- 17 seqlen0 ----


def test_17_an_all_padding_row_places_its_outcome_at_column_zero(run):
    assert run(rows("...", rewards=[4.0]))["tot_rewards"].tolist() == [[4.0, 0.0, 0.0]]


def test_17_an_all_padding_row_bootstraps_at_the_last_column(run):
    batch = rows("...", values=[[1.0, 2.0, 3.0]], is_truncated=[True])
    run(batch, plugin("estimator", "see_estimator"))
    assert plugins_under_test.SEEN[-1].bootstrap_values.tolist() == [3.0]


def test_17_the_last_column_is_the_bootstrap_slot_of_a_truncated_all_padding_row(run):
    batch = rows("...", values=[[1.0, 2.0, math.nan]], is_truncated=[True])
    assert type(run.refusal(batch)).__name__ == "NonFinite"


# ---- 18 accepted ----


def test_18_the_kl_of_k1_can_be_a_bonus(run):
    batch = rows("pg", logprobs=[[0.0, -3.0]], ref_logp=[[-1.0, -1.0]])
    assert run(batch, {"kl_ctl": 0.5})["kl_rewards"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("gae_lambda", [1.5, -1.0])
def test_18_lambda_above_one_and_below_zero_are_accepted(run, gae_lambda):
    assert run(rows("pgg", rewards=[1.0]), {"gae_lambda": gae_lambda})["advantages"][0, 0] == gae_lambda
