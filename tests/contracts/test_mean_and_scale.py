"""semantics.md, "Mean and scale": both norms, both levels, leave-one-out, and logical rollouts, worked out by hand.

| sentence | proven elsewhere |
|---|---|
| a level is batch, group or null: other words are refused | tests/unit/test_spec.py |
| leave-one-out alone, the tail, 2*eps, one rollout of many rows | test_surprising_rules.py |
| a leave-one-out mean of s/n on inactive cells | not visible: adv_norm clears them (test_channels.py) |
"""

import math

import pytest

from tests.contracts.small import group, meta_of, near, rows

RAW = {"mean_level": None, "mean_leave1out": False, "std_level": None, "std_unbiased": True, "eps": 0.0}


def scores(run, rewards, meta=None, actor=None, channels=None, **norm):
    """Normalised scores of one-token rows: what stands in their outcome column."""
    batch = rows(*["pg."] * len(rewards), rewards=rewards, **(channels or {}))
    return run(batch, {"reward_norm": RAW | norm} | (actor or {}), meta)["tot_rewards"][:, 0]


def advantages(run, drawn, rewards, meta=None, **norm):
    """Normalised advantages of the active tokens of each row; before the norm each is its row's reward."""
    out = run(rows(*drawn, rewards=rewards), {"adv_norm": RAW | norm}, meta)
    return out["advantages"][out["loss_mask"] > 0]


# ---- parts ----


def test_the_batch_level_spans_all_rows(run):
    assert near(scores(run, [0.0, 2.0, 7.0], meta_of(2, 1), mean_level="batch"), [-3.0, -1.0, 4.0])


def test_the_group_level_spans_consecutive_prompts_of_the_metadata(run):
    assert near(scores(run, [0.0, 2.0, 1.0, 6.0], meta_of(1, 3), mean_level="group"), [0.0, -1.0, -2.0, 3.0])


def test_without_metadata_the_group_level_spans_slices_of_group_size(run):
    assert near(scores(run, [0.0, 2.0, 1.0, 5.0], mean_level="group", group_size=2), [-1.0, 1.0, -2.0, 2.0])


def test_metadata_wins_over_group_size(run):
    got = scores(run, [0.0, 2.0, 1.0, 6.0], meta_of(1, 3), mean_level="group", group_size=2)
    assert near(got, [0.0, -1.0, -2.0, 3.0])


def test_adv_norm_takes_statistics_over_active_tokens(run):
    # 1, 1, 4: mean 2
    assert near(advantages(run, ["pgg", "pg."], [1.0, 4.0], mean_level="batch"), [-1.0, -1.0, 2.0])


def test_adv_norm_takes_groups_of_rows(run):
    got = advantages(run, ["pgg", "pg.", "pg."], [1.0, 4.0, 9.0], meta_of(2, 1), mean_level="group")
    assert near(got, [-1.0, -1.0, 2.0, 0.0])


# ---- mean ----


def test_a_null_mean_level_centres_on_zero(run):
    assert near(scores(run, [1.0, 3.0]), [1.0, 3.0])


def test_a_leave_one_out_mean_leaves_the_own_score_out(run):
    assert near(scores(run, [0.0, 3.0, 6.0], mean_level="batch", mean_leave1out=True), [-4.5, 0.0, 4.5])


def test_a_leave_one_out_mean_of_advantages_leaves_out_the_one_token(run):
    # sum 6 over 3 tokens: 1 - 5/2 and 4 - 2/2
    got = advantages(run, ["pgg", "pg."], [1.0, 4.0], mean_level="batch", mean_leave1out=True)
    assert near(got, [-1.5, -1.5, 3.0])


def test_a_leave_one_out_mean_in_groups_stays_inside_the_group(run):
    got = scores(run, [0.0, 3.0, 1.0, 2.0], mean_level="group", mean_leave1out=True, group_size=2)
    assert near(got, [-3.0, 3.0, -1.0, 1.0])


def test_a_group_with_one_member_is_centred_on_itself_under_leave_one_out(run):
    got = scores(run, [5.0, 1.0, 3.0], meta_of(1, 2), mean_level="group", mean_leave1out=True)
    assert near(got, [0.0, -2.0, 2.0])


def test_an_empty_part_has_mean_zero(run):
    # a group without active tokens: nothing to see, and no NaN
    got = run(rows("ppp", "pgg", rewards=[5.0, 3.0]), {"adv_norm": RAW | {"mean_level": "group"}}, meta_of(1, 1))
    assert got["advantages"].tolist() == [[0.0] * 3] * 2


# ---- scale ----


def test_the_unbiased_std_divides_by_one_less(run):
    assert near(scores(run, [0.0, 2.0], mean_level="batch", std_level="batch"), [-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_the_biased_std_divides_by_the_count(run):
    assert near(scores(run, [0.0, 4.0], mean_level="batch", std_level="batch", std_unbiased=False), [-1.0, 1.0])


def test_eps_is_added_to_the_std(run):
    got = scores(run, [0.0, 2.0], mean_level="batch", std_level="batch", std_unbiased=False, eps=0.5)
    assert near(got, [-1 / 1.5, 1 / 1.5])


def test_a_null_std_level_scales_by_one_without_eps(run):
    assert near(scores(run, [0.0, 2.0], mean_level="batch", eps=0.5), [-1.0, 1.0])


def test_the_unbiased_std_of_one_is_one(run):
    assert near(scores(run, [3.0], std_level="batch", eps=0.5), [2.0])


def test_the_biased_std_of_one_is_its_distance_from_the_mean(run):
    assert near(scores(run, [3.0], std_level="batch", std_unbiased=False, eps=1.0), [0.75])


def test_the_unbiased_std_of_a_group_with_one_member_is_one(run):
    # the other group: root of (0 + 4) / 1 = 2
    assert near(scores(run, [5.0, 0.0, 2.0], meta_of(1, 2), std_level="group", eps=1.0), [2.5, 0.0, 2 / 3])


def test_the_unbiased_std_of_one_row_of_several_tokens_is_one_in_a_group(run):
    # without the rule it would be the spread of its tokens around 0: root of (16 + 16) / 1
    assert near(advantages(run, ["pgg"], [4.0], std_level="group", eps=1.0), [2.0, 2.0])


def test_the_unbiased_std_of_one_row_of_several_tokens_is_their_spread_over_the_batch(run):
    assert near(advantages(run, ["pgg"], [4.0], std_level="batch"), [1 / math.sqrt(2)] * 2)


def test_the_biased_std_of_a_group_with_one_member_is_the_plain_formula(run):
    got = scores(run, [3.0, 0.0, 2.0], meta_of(1, 2), std_level="group", std_unbiased=False, eps=1.0)
    assert near(got, [0.75, 0.0, 2 / (1 + math.sqrt(2))])


def test_an_empty_part_has_std_one(run):
    # eps 0: a std of 0 would divide 0 by 0
    norm = RAW | {"std_level": "group", "std_unbiased": False}
    got = run(rows("ppp", "pgg", rewards=[5.0, 3.0]), {"adv_norm": norm}, meta_of(1, 1))
    assert got["advantages"].tolist() == [[0.0] * 3, [1.0, 1.0, 0.0]]


# ---- mixed levels: the std is around the means that were asked for, over the part that was asked for ----

# rewards 0, 2 and 1, 7 in two groups; distance of each from its mean
DISTANCES = {
    ("group", False): [-1.0, 1.0, -3.0, 3.0],
    ("group", True): [-2.0, 2.0, -6.0, 6.0],
    ("batch", False): [-2.5, -0.5, -1.5, 4.5],
    ("batch", True): [-10 / 3, -2 / 3, -2.0, 6.0],
    (None, False): [0.0, 2.0, 1.0, 7.0],
}


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("std_level", ["group", "batch"])
@pytest.mark.parametrize(("mean_level", "leave1out"), DISTANCES)
@pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
def test_levels_may_be_mixed(run, norm, mean_level, leave1out, std_level, unbiased):
    away = DISTANCES[mean_level, leave1out]
    parts = [away[:2], away[2:]] if std_level == "group" else [away]
    stds = [math.sqrt(sum(x * x for x in part) / (len(part) - unbiased)) for part in parts for _ in part]
    block = RAW | {
        "mean_level": mean_level,
        "mean_leave1out": leave1out,
        "std_level": std_level,
        "std_unbiased": unbiased,
    }
    out = run(rows(*["pg"] * 4, rewards=[0.0, 2.0, 1.0, 7.0]), {norm: block}, meta_of(2, 2))
    assert near(out["advantages"][:, 0], [x / std for x, std in zip(away, stds, strict=True)])


# ---- both levels null ----


def test_with_both_levels_null_rewards_are_just_the_scores(run):
    assert near(scores(run, [1.0, 4.0], actor={"reward_scaling": 2.0}, eps=0.5), [2.0, 8.0])


def test_with_both_levels_null_adv_norm_still_masks(run):
    out = run(rows("ppgg", rewards=[3.0]), {"adv_norm": RAW | {"eps": 0.5}})
    assert out["advantages"].tolist() == [[0.0, 3.0, 3.0, 0.0]]


def test_with_both_levels_null_rows_of_a_split_rollout_may_differ(run):
    assert near(scores(run, [1.0, 4.0], meta_of(2, groups=[group(2)])), [1.0, 4.0])


# ---- logical rollouts ----


def test_a_null_entry_makes_each_row_its_own_rollout(run):
    assert near(scores(run, [1.0, 1.0, 4.0], meta_of(3, groups=[None]), mean_level="group"), [-1.0, -1.0, 2.0])


def test_a_rollout_counts_once_by_its_rows_common_reward(run):
    # references 1 and 4, not rows 1, 1, 4
    got = scores(run, [1.0, 1.0, 4.0], meta_of(3, groups=[group(2, 1)]), mean_level="group")
    assert near(got, [-1.5, -1.5, 1.5])


def test_row_counts_follow_the_order_of_rows(run):
    got = scores(run, [4.0, 1.0, 1.0], meta_of(3, groups=[group(1, 2)]), mean_level="group")
    assert near(got, [1.5, -1.5, -1.5])


def test_an_explicit_reference_takes_the_rows_place_in_the_statistics(run):
    # references 2 and 4 (inferred): mean 3
    got = scores(run, [1.0, 0.0, 4.0], meta_of(3, groups=[group(2, 1, rewards=(2.0, None))]), mean_level="group")
    assert near(got, [-2.0, -3.0, 1.0])


def test_references_are_biased_scaled_and_clipped_like_rows(run):
    # references (2 + 1) * 2 = 6 and min((4 + 1) * 2, 7) = 7: mean 6.5; rows 4, 2, 7
    actor = {"reward_bias": 1.0, "reward_scaling": 2.0, "reward_clip": 7.0}
    meta = meta_of(3, groups=[group(2, 1, rewards=(2.0, None))])
    assert near(scores(run, [1.0, 0.0, 4.0], meta, actor, mean_level="group"), [-2.5, -4.5, 0.5])


def test_the_scale_comes_from_the_references(run):
    # references 2 and 4: std sqrt(2)
    meta = meta_of(3, groups=[group(2, 1, rewards=(2.0, None))])
    got = scores(run, [1.0, 0.0, 4.0], meta, mean_level="group", std_level="group")
    assert near(got, [-2 / math.sqrt(2), -3 / math.sqrt(2), 1 / math.sqrt(2)])


def test_the_batch_level_spans_the_references_of_all_prompts(run):
    # references 1, 4 and 10: mean 5
    meta = meta_of(2, 2, groups=[group(2), group(1, 1)])
    assert near(scores(run, [1.0, 1.0, 4.0, 10.0], meta, mean_level="batch"), [-4.0, -4.0, -1.0, 5.0])


def test_a_group_of_one_rollout_is_one_member_however_many_rows(run):
    # leave-one-out around itself, unbiased std 1: (row - reference) / 1.5
    meta = meta_of(2, groups=[group(2, rewards=(0.0,))])
    got = scores(run, [1.0, 3.0], meta, mean_level="group", std_level="group", mean_leave1out=True, eps=0.5)
    assert near(got, [1 / 1.5, 2.0])


def test_leave_one_out_leaves_out_the_whole_rollout(run):
    # references 1, 4, 10: means 7, 5.5, 2.5
    meta = meta_of(4, groups=[group(2, 1, 1)])
    got = scores(run, [1.0, 1.0, 4.0, 10.0], meta, mean_level="group", mean_leave1out=True)
    assert near(got, [-6.0, -6.0, -1.5, 7.5])


def test_a_scale_of_at_most_twice_eps_becomes_one(run):
    # root mean square 2, eps 2: a scale of exactly 4
    meta = meta_of(2, groups=[None])
    assert near(scores(run, [2.0, 2.0], meta, std_level="group", std_unbiased=False, eps=2.0), [2.0, 2.0])


def test_a_scale_of_at_most_twice_eps_stays_without_rollout_metadata(run):
    got = scores(run, [2.0, 2.0], meta_of(2), std_level="group", std_unbiased=False, eps=2.0)
    assert near(got, [0.5, 0.5])


def test_a_scale_above_twice_eps_stays(run):
    meta = meta_of(2, groups=[None])
    got = scores(run, [2.0, 2.0], meta, std_level="group", std_unbiased=False, eps=1.0)
    assert near(got, [2 / 3, 2 / 3])


def test_rows_keep_their_own_scores_around_their_rollouts_mean(run):
    meta = meta_of(2, groups=[group(2, rewards=(1.0,))])
    assert near(scores(run, [0.0, 5.0], meta, mean_level="group"), [-1.0, 4.0])


def test_truncated_rows_count_in_the_statistics(run):
    actor, channels = {"mask_no_eos_with_zero": True}, {"is_truncated": [True, False]}
    got = scores(run, [0.0, 4.0], None, actor, channels, mean_level="batch")
    assert near(got, [0.0, 2.0])


def test_equal_scores_have_exactly_no_spread(run):
    # 0.1 is no dyadic number: a mean that rounds would leave noise over eps
    assert scores(run, [0.1] * 1000, mean_level="batch", std_level="batch", eps=1e-12).tolist() == [0.0] * 1000
