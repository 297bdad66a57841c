"""semantics.md, "Warnings by name" and strict.md: who is warned of, and what strict rules do in each place.

Numbers of the strict column are proven further by tests/golden/strict, rule by rule.
"""

import warnings

import pytest

from compiled_adv import AdvantageWarning
from tests.contracts.small import group, meta_of, plugin, rows

RAW = {"mean_level": None, "mean_leave1out": False, "std_level": None, "std_unbiased": True, "eps": 0.0}
BY_BATCH = {"reward_norm": RAW | {"mean_level": "batch"}}
BY_GROUP = {"reward_norm": RAW | {"mean_level": "group", "group_size": 2}}
MASK_NO_EOS = {"mask_no_eos_with_zero": True}
PENALTY = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 1.0,
    "max_new_tokens": 3,
}
RULES = ["default", "strict"]


def under(rules, actor=None):
    return (actor or {}) | {"advantage": {"rules": rules}}


def warned(run, batch, actor=None, meta=None, rules="default", **call):
    run(batch, under(rules, actor), meta, **call)
    return run.warnings


# ---- what is kept, and when Python is told ----


def test_last_warnings_belong_to_the_last_call(run):
    compute = run.build({})
    with pytest.warns(AdvantageWarning):
        compute(rows("gp"))
    compute(rows("pg"))
    assert compute.last_warnings == {}


def test_a_name_without_rows_is_absent(run):
    assert warned(run, rows("pg")) == {}


def test_python_is_warned_once_per_name_and_instance(run):
    compute = run.build({})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compute(rows("gp"))
        compute(rows("gp"))
        compute(rows("pgp"))
        run.build({})(rows("gp"))
    names = [str(w.message).split(":")[0] for w in caught if w.category is AdvantageWarning]
    wrap, lost = "first_token_generated", "outcome_on_masked_token"
    assert sorted(names) == [wrap, wrap, lost, lost]


def test_a_python_warning_points_at_the_callers_line(run):
    with pytest.warns(AdvantageWarning) as caught:
        run.build({})(rows("gp"))
    assert {w.filename for w in caught} == {__file__}


def test_rows_are_ascending(run):
    assert warned(run, rows("gg", "pg", "gg", "gg"))["first_token_generated"] == [0, 2, 3]


def test_a_warning_turned_into_an_error_reaches_the_caller(run):
    compute = run.build({})
    with warnings.catch_warnings(), pytest.raises(AdvantageWarning):
        warnings.simplefilter("error")
        compute(rows("gp"))


# ---- outcome_on_masked_token ----

NAME = "outcome_on_masked_token"


@pytest.mark.parametrize("rules", RULES)
def test_an_outcome_on_a_token_that_is_no_action_is_warned_of(run, rules):
    batch = rows("pgg", "ggp", "ppp", "pg.", rewards=[1.0, 1.0, 1.0, 0.0])
    assert warned(run, batch, rules=rules)[NAME] == [1, 2]


def test_an_outcome_that_is_lost_counts_by_position_even_if_it_is_zero(run):
    assert warned(run, rows("pgp", rewards=[0.0]))[NAME] == [0]


def test_an_outcome_at_the_last_column_is_no_action_though_it_is_active(run):
    # T = 1: the wrap makes the only column active, and no advantage sees it
    assert warned(run, rows("g"))[NAME] == [0]


def test_a_cleared_rows_outcome_is_not_warned_of(run):
    batch = rows("pgp", "pgp", is_truncated=[True, False])
    assert warned(run, batch, MASK_NO_EOS)[NAME] == [1]


def test_strict_moves_the_outcome_to_the_rows_last_action(run):
    out = run(rows("pggpp", rewards=[5.0]), under("strict"))
    assert out["tot_rewards"].tolist() == [[0.0, 5.0, 0.0, 0.0, 0.0]]
    assert out["advantages"].tolist() == [[5.0, 5.0, 0.0, 0.0, 0.0]]


def test_strict_places_nothing_on_a_row_without_actions(run):
    assert run(rows("ppp", "gpp", rewards=[5.0, 5.0]), under("strict"))["tot_rewards"].tolist() == [[0.0] * 3] * 2


# ---- first_token_generated ----


@pytest.mark.parametrize("rules", RULES)
def test_a_generated_first_token_is_warned_of(run, rules):
    assert warned(run, rows("ggg", "pgg"), rules=rules) == {"first_token_generated": [0]}


def test_strict_shifts_and_leaves_the_last_column_zero(run):
    batch = rows(
        "ggp",
        logprobs=[[-1.0, -2.0, -3.0]],
        ref_logp=[[-1.0, -2.0, -3.0]],
        token_rewards=[[0.5, 0.5, 0.0]],
        mopd_teacher_logp_sum=[0.0],
    )
    out = run(batch, under("strict", {"kl_ctl": 1.0}))
    for name in (
        "loss_mask",
        "logprobs",
        "prox_logp",
        "ref_logp",
        "mopd_behavior_logprobs",
        "kl_rewards",
        "advantages",
    ):
        assert out[name][0, 2] == 0.0, name


def test_strict_turn_gae_accepts_a_generated_first_token(run):
    actor = under("strict", {"gae_timestep_unit": "turn"})
    out = run(rows("ggg", rewards=[1.0], turn_ids=[[0, 0, 0]]), actor)
    assert out["advantages"].tolist() == [[1.0, 1.0, 0.0]]


def test_strict_lengths_of_lambda_functions_leave_the_first_token_out(run, seen):
    run(rows("ggg.", "pgg."), under("strict", {"gae_lambda": "tests.contracts.plugins_under_test.see_lambda"}))
    assert seen[-1]["effective_token_lengths"].tolist() == [2, 2]


def test_strict_built_in_lambda_functions_leave_the_first_token_out(run):
    # two tokens: 1 - 1 / 2
    built_in = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 1.0}}
    assert run(rows("ggg.", rewards=[1.0]), under("strict", built_in))["advantages"].tolist() == [[0.5, 1.0, 0.0, 0.0]]


def test_the_length_penalty_counts_the_first_token_under_strict_rules_too(run):
    # three generated of a budget of 1 before the tail: -(3 - 1) / 2
    assert run(rows("ggg"), under("strict", PENALTY))["rewards"].tolist() == [-1.0]


def test_folded_rewards_compare_the_first_token_with_its_neighbour_under_strict_rules_too(run):
    batch = rows("gg.", token_rewards=[[0.25, 0.5, 0.0]])
    assert type(run.refusal(batch, under("strict", {"token_rewards_as_adv": False}))).__name__ == "RowsDiffer"


# ---- truncated_by_width ----


def test_a_row_that_fills_the_width_without_flags_is_warned_of(run):
    assert warned(run, rows("pg.", "pgg", is_truncated=None)) == {"truncated_by_width": [1]}


def test_given_flags_are_not_warned_of(run):
    assert warned(run, rows("pgg", is_truncated=[False])) == {}


@pytest.mark.parametrize("drawn", ["pgg", "pg."])
def test_strict_refuses_a_batch_without_flags(run, drawn):
    error = run.refusal(rows(drawn, "pg.", is_truncated=None), under("strict"))
    assert type(error).__name__ == "MissingKey" and "is_truncated" in str(error)


# ---- rows_outside_groups ----

FIVE = ["pg"] * 5


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("norm", ["reward_norm", "adv_norm"])
@pytest.mark.parametrize("level", ["mean_level", "std_level"])
def test_rows_beyond_the_last_full_group_are_warned_of(run, rules, norm, level):
    actor = {norm: RAW | {level: "group", "group_size": 2, "eps": 1.0}}
    assert warned(run, rows(*FIVE), actor, rules=rules)["rows_outside_groups"] == [4]


def test_the_rows_of_both_norms_are_one_list(run):
    actor = {
        "reward_norm": RAW | {"mean_level": "group", "group_size": 2},
        "adv_norm": RAW | {"mean_level": "group", "group_size": 3},
    }
    assert warned(run, rows(*FIVE), actor)["rows_outside_groups"] == [3, 4]


def test_with_metadata_no_row_is_outside(run):
    assert "rows_outside_groups" not in warned(run, rows(*FIVE), BY_GROUP, meta_of(5))


def test_a_batch_level_has_no_rows_outside(run):
    actor = {"reward_norm": RAW | {"mean_level": "batch", "group_size": 2}}
    assert "rows_outside_groups" not in warned(run, rows(*FIVE), actor)


def test_strict_makes_the_tail_a_group(run):
    out = run(
        rows(*FIVE[:4], rewards=[0.0, 2.0, 4.0, 7.0]),
        under("strict", {"reward_norm": RAW | {"mean_level": "group", "group_size": 3}}),
    )
    assert out["tot_rewards"][:, 0].tolist() == [-2.0, 0.0, 2.0, 0.0]


def test_strict_makes_a_batch_smaller_than_its_group_size_one_group(run):
    actor = under("strict", {"reward_norm": RAW | {"mean_level": "group", "group_size": 9}})
    assert run(rows("pg", "pg", rewards=[0.0, 2.0]), actor)["tot_rewards"][:, 0].tolist() == [-1.0, 1.0]


# ---- kl_without_reference ----


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kl_ctl", [0.1, -0.1])
def test_kl_without_a_reference_is_warned_of_on_rows_with_an_action(run, rules, kl_ctl):
    # a generated first token alone is no action
    batch = rows("pg", "pp", "gp", "pg")
    assert warned(run, batch, {"kl_ctl": kl_ctl}, rules=rules)["kl_without_reference"] == [0, 3]


@pytest.mark.parametrize(("kl_ctl", "channels"), [(0.0, {}), (0.1, {"ref_logp": [[0.0, 0.0]]})])
def test_kl_that_is_off_or_has_its_reference_is_not_warned_of(run, kl_ctl, channels):
    assert warned(run, rows("pg", **channels), {"kl_ctl": kl_ctl}) == {}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_strict_kl_without_a_reference_is_zero(run, kind):
    batch = rows("pg", logprobs=[[0.0, -2.0]])
    assert run(batch, under("strict", {"kl_ctl": 1.0, "kl_estimator": kind}))["kl_rewards"].tolist() == [[0.0, 0.0]]


# ---- zero_spread_groups ----


@pytest.mark.parametrize("rules", RULES)
def test_groups_with_equal_scores_are_warned_of_with_all_their_rows(run, rules):
    batch = rows(*FIVE, rewards=[1.0, 1.0, 1.0, 2.0, 3.0])
    assert warned(run, batch, BY_GROUP, meta_of(2, 2, 1), rules)["zero_spread_groups"] == [0, 1, 4]


def test_scores_are_compared_after_clipping(run):
    actor = BY_GROUP | {"reward_clip": 1.0}
    assert warned(run, rows("pg", "pg", rewards=[5.0, 9.0]), actor)["zero_spread_groups"] == [0, 1]


def test_a_batch_level_compares_the_whole_batch(run):
    assert "zero_spread_groups" not in warned(run, rows(*FIVE[:3], rewards=[1.0, 1.0, 2.0]), BY_BATCH)
    assert warned(run, rows(*FIVE[:3], rewards=[1.0] * 3), BY_BATCH)["zero_spread_groups"] == [0, 1, 2]


@pytest.mark.parametrize(("rules", "listed"), [("default", [0, 1]), ("strict", [0, 1, 2])])
def test_the_tail_is_in_no_group_by_default_and_a_group_under_strict_rules(run, rules, listed):
    batch = rows(*FIVE[:3], rewards=[1.0, 1.0, 5.0])
    assert warned(run, batch, BY_GROUP, rules=rules)["zero_spread_groups"] == listed


def test_rollouts_are_compared_by_their_references(run):
    meta = meta_of(2, groups=[group(1, 1, rewards=(3.0, 3.0))])
    assert warned(run, rows("pg", "pg", rewards=[1.0, 2.0]), BY_BATCH, meta)["zero_spread_groups"] == [0, 1]


def test_under_strict_rules_only_members_that_count_are_compared(run):
    # the first prompt: a cleared row beside one that counts; the second: nothing but cleared rows
    batch = rows("pg", "pg", "pg", "pg", rewards=[1.0, 2.0, 3.0, 3.0], is_truncated=[True, False, True, True])
    found = {rules: warned(run, batch, MASK_NO_EOS | BY_GROUP, rules=rules) for rules in RULES}
    assert found["default"]["zero_spread_groups"] == [2, 3]
    assert found["strict"]["zero_spread_groups"] == [0, 1]


@pytest.mark.parametrize("actor", [{}, {"reward_norm": RAW}])
def test_without_a_level_no_spread_is_looked_for(run, actor):
    assert warned(run, rows("pg", "pg"), actor) == {}


def test_equal_scores_stay_zero_under_both_rules(run):
    batch = rows("pg", "pg", rewards=[1.0, 1.0])
    for rules in RULES:
        assert run(batch, under(rules, BY_BATCH))["tot_rewards"][:, 0].tolist() == [0.0, 0.0]


# ---- uncapped_length_penalty ----


@pytest.mark.parametrize("rules", RULES)
def test_a_penalty_beyond_its_factor_is_warned_of_and_one_exactly_at_it_is_not(run, rules):
    # exactly max_new_tokens generated tokens reach the factor
    batch = rows("pgg..", "pggg.", "pgggg")
    assert warned(run, batch, PENALTY, rules=rules)["uncapped_length_penalty"] == [2]


@pytest.mark.parametrize(("rules", "reward"), [("default", -1.5), ("strict", -1.0)])
def test_strict_caps_the_penalty_at_its_factor(run, rules, reward):
    assert run(rows("pgggg"), under(rules, PENALTY))["rewards"].tolist() == [reward]


def test_strict_caps_before_outcome_shaping(run):
    shaping = plugin("outcome_reward_shaping", "see_outcome", factor=2.0)["advantage"]
    out = run(rows("pgggg"), PENALTY | {"advantage": shaping | {"rules": "strict"}})
    assert out["rewards"].tolist() == [-2.0]


def test_strict_may_accept_a_split_rollout_that_default_refuses(run):
    batch, meta = rows("pggg.", "pgggg"), meta_of(2, groups=[group(2)])
    assert type(run.refusal(batch, under("default", PENALTY | BY_BATCH), meta)).__name__ == "RowsDiffer"
    run(batch, under("strict", PENALTY | BY_BATCH), meta)


# ---- loo_alone ----

LOO = {"reward_norm": RAW | {"mean_level": "batch", "mean_leave1out": True}}


@pytest.mark.parametrize("rules", RULES)
def test_leave_one_out_over_a_batch_of_one_is_warned_of(run, rules):
    assert warned(run, rows("pg"), LOO, rules=rules)["loo_alone"] == [0]


def test_all_rows_of_the_only_rollout_are_listed(run):
    assert warned(run, rows("pg", "pg"), LOO, meta_of(2, groups=[group(2)]))["loo_alone"] == [0, 1]


def test_only_the_member_that_counts_is_alone(run):
    batch = rows("pg", "pg", rewards=[1.0, 2.0], is_truncated=[True, False])
    assert "loo_alone" not in warned(run, batch, MASK_NO_EOS | LOO)
    assert warned(run, batch, MASK_NO_EOS | LOO, rules="strict")["loo_alone"] == [1]


@pytest.mark.parametrize(("rules", "score"), [("default", 3.0), ("strict", 0.0)])
def test_strict_leave_one_out_over_a_batch_of_one_is_zero(run, rules, score):
    assert run(rows("pg", rewards=[3.0]), under(rules, LOO))["tot_rewards"][0, 0] == score


def test_strict_compares_the_only_rollouts_rows_with_its_reference(run):
    meta = meta_of(2, groups=[group(2, rewards=(1.0,))])
    out = run(rows("pg", "pg", rewards=[0.0, 5.0]), under("strict", LOO), meta)
    assert out["tot_rewards"][:, 0].tolist() == [-1.0, 4.0]


@pytest.mark.parametrize("actor", [BY_BATCH, {"reward_norm": RAW | {"mean_level": "group", "mean_leave1out": True}}])
def test_a_plain_mean_or_a_group_level_is_not_alone(run, actor):
    assert "loo_alone" not in warned(run, rows("pg"), actor)


def test_adv_norm_is_never_alone(run):
    norm = RAW | {"mean_level": "batch", "mean_leave1out": True}
    for rules in RULES:
        out = run(rows("pg", rewards=[3.0]), under(rules, {"adv_norm": norm}))
        assert out["advantages"].tolist() == [[3.0, 0.0]]
        assert run.warnings == {}


# ---- discarded_rows_counted ----


@pytest.mark.parametrize("rules", RULES)
def test_truncated_rows_in_the_reward_statistics_are_warned_of(run, rules):
    batch = rows("pg", "pg", rewards=[1.0, 2.0], is_truncated=[True, False])
    assert warned(run, batch, MASK_NO_EOS | BY_BATCH, rules=rules)["discarded_rows_counted"] == [0]


@pytest.mark.parametrize("actor", [BY_BATCH, MASK_NO_EOS, MASK_NO_EOS | {"reward_norm": RAW}])
def test_without_clearing_or_a_level_no_row_is_discarded(run, actor):
    batch = rows("pg", "pg", rewards=[1.0, 2.0], is_truncated=[True, False])
    assert "discarded_rows_counted" not in warned(run, batch, actor)


@pytest.mark.parametrize(("rules", "want"), [("default", [1.0, 3.0]), ("strict", [-1.0, 1.0])])
def test_strict_leaves_truncated_rows_out_of_the_statistics(run, rules, want):
    # rewards 0 (cleared), 3, 5... default mean 8/3 of all, strict mean 4 of the rest
    batch = rows("pg", "pg", "pg", rewards=[-2.0, 3.0, 5.0], is_truncated=[True, False, False])
    out = run(batch, under(rules, MASK_NO_EOS | BY_BATCH))
    assert out["tot_rewards"][:, 0].tolist() == [0.0, *want]


def test_strict_gives_no_nan_where_every_row_is_cleared(run):
    batch = rows("pg", "pg", rewards=[1.0, 2.0], is_truncated=[True, True])
    actor = MASK_NO_EOS | {"reward_norm": RAW | {"mean_level": "group", "std_level": "group", "group_size": 2}}
    assert run(batch, under("strict", actor))["tot_rewards"].tolist() == [[0.0, 0.0]] * 2


def test_adv_norm_counts_the_tokens_of_cleared_rows_under_both_rules(run):
    # active advantages 0 (cleared) and 4: mean 2
    batch = rows("pg", "pg", rewards=[9.0, 4.0], is_truncated=[True, False])
    actor = MASK_NO_EOS | {"adv_norm": RAW | {"mean_level": "batch"}}
    for rules in RULES:
        assert run(batch, under(rules, actor))["advantages"][:, 0].tolist() == [-2.0, 2.0]


# ---- weighted_flip ----


@pytest.mark.parametrize("rules", RULES)
def test_negative_advantages_turned_positive_are_warned_of(run, rules):
    batch = rows("pg", "pg", "pg", rewards=[-1.0, -1.0, 1.0], token_rewards=[[0.0, 0.5], [0.0, 0.0], [0.0, 0.5]])
    found = warned(run, batch, rules=rules, advantage_shaping_mode="process_weighted")
    assert found == {"weighted_flip": [0]}


def test_a_flip_is_counted_after_adv_norm(run):
    batch = rows("pg", "pg", rewards=[1.0, 3.0], token_rewards=[[0.0, 0.5]] * 2)
    actor = {"adv_norm": RAW | {"mean_level": "batch"}}
    assert warned(run, batch, actor, advantage_shaping_mode="process_weighted")["weighted_flip"] == [0]


@pytest.mark.parametrize("mode", ["additive", "gvpo"])
def test_other_modes_flip_nothing(run, mode):
    batch = rows("pg", rewards=[-1.0], token_rewards=[[0.0, 0.5]])
    assert warned(run, batch, advantage_shaping_mode=mode) == {}
