"""The ten named warnings: which rows get each and which just do not; what default rules give there, and strict ones.

Default rules keep the harmful value on purpose, and say so; `rules: strict` repairs it (semantics.md, strict.md).
"""

import warnings
from typing import Any

import pytest
import torch

from compiled_adv import AdvantageWarning
from compiled_adv.errors import BadTurnIds, MissingKey, NonFinite
from tests.contracts.small import Runner, group, meta_of, near, rows

BACKENDS = ("reference", "eager")
RULES = ("default", "strict")

each_rules = pytest.mark.parametrize("rules", RULES)


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


def under(rules: str, **actor: Any) -> dict[str, Any]:
    return actor | {"advantage": {"rules": rules}}


def norm(mean: str | None, std: str | None = None, **more: Any) -> dict[str, Any]:
    return {"mean_level": mean, "std_level": std, **more}


def scores(run: Runner, rules: str, rewards: list[float], meta: Any = None, **actor: Any) -> torch.Tensor:
    """Normalised scores of one-token rows; they are what the total reward shows."""
    batch = rows(*["pg"] * len(rewards), rewards=rewards)
    return run(batch, under(rules, **actor), meta)["tot_rewards"][:, 0]


# ---- outcome_on_masked_token ----


@each_rules
def test_an_outcome_on_a_token_that_is_no_action_is_warned_of(run: Runner, rules: str) -> None:
    # a tool tail, an answer, no action, an empty row, a single generated token, padding behind a tool tail
    batch = rows("pggp", "pggg", "ppp.", "....", "g...", "pgp.", rewards=[1, 1, 1, 1, 1, 0])
    run(batch, under(rules))
    assert run.warnings["outcome_on_masked_token"] == [0, 2, 3, 4, 5]  # by position: a score of 0 counts too


@each_rules
def test_a_cleared_row_has_no_outcome_to_lose(run: Runner, rules: str) -> None:
    batch = rows("pgp", "pgp", rewards=[1, 1], is_truncated=[True, False])
    run(batch, under(rules, mask_no_eos_with_zero=True))
    assert run.warnings == {"outcome_on_masked_token": [1]}


@each_rules
def test_a_truncated_row_that_is_not_cleared_may_lose_its_outcome(run: Runner, rules: str) -> None:
    run(rows("pgp", "pgg", is_truncated=[True, True]), under(rules))
    assert run.warnings == {"outcome_on_masked_token": [0]}


def test_an_outcome_on_a_tool_token_reaches_the_total_but_no_advantage(run: Runner) -> None:
    out = run(rows("pggp", rewards=[1]), under("default"))
    assert near(out["tot_rewards"], [[0, 0, 1, 0]]) and near(out["advantages"], [[0, 0, 0, 0]])


def test_strict_rules_move_the_outcome_to_the_last_action(run: Runner) -> None:
    out = run(rows("pggp", rewards=[1]), under("strict"))
    assert near(out["tot_rewards"], [[0, 1, 0, 0]]) and near(out["advantages"], [[1, 1, 0, 0]])


def test_strict_rules_move_the_outcome_of_turns_too(run: Runner) -> None:
    batch = rows("pgpgp", rewards=[1], turn_ids=[[-1, 0, -1, 1, -1]])
    out = run(batch, under("strict", gae_timestep_unit="turn"))
    assert near(out["tot_rewards"], [[0, 0, 1, 0, 0]]) and near(out["advantages"], [[1, 0, 1, 0, 0]])


def test_strict_rules_place_nothing_on_a_row_without_actions(run: Runner) -> None:
    assert not run(rows("ppp", "g..", rewards=[1, 1]), under("strict"))["tot_rewards"].any()


def test_strict_rules_leave_bootstrap_and_kl_zeroing_where_they_are(run: Runner) -> None:
    batch = rows("pggp", values=[[0, 0, 0, 5]], is_truncated=[True], logprobs=[[0, -1, -1, -1]], ref_logp=[[0] * 4])
    out = run(batch, under("strict", kl_ctl=1.0))
    assert near(out["advantages"][:, :2], [[7, 6]])  # 5 from the last valid token, then 1 of KL a step
    assert near(run(rows("pp", "pg"), under("strict"))["tot_rewards"], [[0, 0], [0, 0]])


# ---- first_token_generated ----


@each_rules
def test_a_generated_first_token_is_warned_of(run: Runner, rules: str) -> None:
    run(rows("ggg", "pgg", "gp."), under(rules))
    assert run.warnings["first_token_generated"] == [0, 2]


@each_rules
def test_a_prompt_before_the_first_generated_token_is_not_warned_of(run: Runner, rules: str) -> None:
    run(rows("pgg"), under(rules))
    assert run.warnings == {}


WRAPPED = {"logprobs": [[-1, -2, -3]], "mopd_teacher_logp_sum": [0.0], "ref_logp": [[-4, -5, -6]]}


def test_the_mask_of_a_generated_first_token_wraps_into_the_last_column(run: Runner) -> None:
    out = run(rows("gpg", **WRAPPED), under("default"))
    assert near(out["loss_mask"], [[0, 1, 1]])
    assert near(out["logprobs"], [[0, -3, -1]]) and near(out["mopd_behavior_logprobs"], [[0, -3, -1]])
    assert near(out["ref_logp"], [[0, -5, -6]])


def test_strict_rules_shift_the_mask(run: Runner) -> None:
    out = run(rows("gpg", **WRAPPED), under("strict"))
    assert near(out["loss_mask"], [[0, 1, 0]])
    assert near(out["logprobs"], [[0, -3, 0]]) and near(out["mopd_behavior_logprobs"], [[0, -3, 0]])
    assert near(out["ref_logp"], [[0, -5, 0]])


@pytest.mark.parametrize(("rules", "active"), [("default", [[0, 1, 2]]), ("strict", [[0, 1, 1]])])
def test_the_wrapped_column_counts_in_adv_norm_by_default_alone(run: Runner, rules: str, active: Any) -> None:
    # advantages 3, 3 and, wrapped, 0: a mean of 2 or of 3
    out = run(rows("ggg", rewards=[3]), under(rules, adv_norm=norm("batch")))
    assert near(out["advantages"], [[1, 1, -2]] if rules == "default" else [[0, 0, 0]])


@pytest.mark.parametrize(("rules", "gae_lambda"), [("default", 1 / 2), ("strict", 0.0)])
def test_the_wrapped_column_counts_in_lengths_by_default_alone(run: Runner, rules: str, gae_lambda: float) -> None:
    vapo = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 2 / 3}}
    batch = rows("gpgg", rewards=[1])  # lengths 3 and 2: lambda 1 - 1/2 and 1 - 1/(4/3)
    out = run(batch, under(rules, **vapo))
    assert near(out["advantages"][:, 1:3], [[0.5 if rules == "default" else 0.25, 1]])


def test_turn_gae_refuses_the_wrap_by_default(run: Runner) -> None:
    batch = rows("gpg", turn_ids=[[0, -1, 1]])
    assert isinstance(run.refusal(batch, under("default", gae_timestep_unit="turn")), BadTurnIds)


def test_turn_gae_accepts_a_generated_first_token_under_strict_rules(run: Runner) -> None:
    out = run(rows("gpg", rewards=[1], turn_ids=[[0, -1, 1]]), under("strict", gae_timestep_unit="turn"))
    assert near(out["advantages"], [[0, 1, 0]])


@each_rules
def test_the_length_penalty_counts_a_generated_first_token(run: Runner, rules: str) -> None:
    penalty = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 1.0}
    assert near(run(rows("gg"), under(rules, **penalty, max_new_tokens=4))["rewards"], [-0.5])


# ---- truncated_by_width ----


def test_rows_that_fill_the_width_without_flags_are_warned_of(run: Runner) -> None:
    run(rows("pgg", "pg.", "ppp", is_truncated=None))
    assert run.warnings["truncated_by_width"] == [0, 2]


@pytest.mark.parametrize("flags", [[False, False], [True, False]])
def test_given_flags_are_never_warned_of(run: Runner, flags: list[bool]) -> None:
    run(rows("pgg", "pg.", is_truncated=flags))
    assert run.warnings == {}


def test_one_column_of_padding_is_enough_not_to_be_warned_of(run: Runner) -> None:
    batch = rows("pgg.", is_truncated=None)
    assert not run(batch)["is_truncated"].any() and run.warnings == {}


def test_rows_that_fill_the_width_bootstrap_by_default(run: Runner) -> None:
    out = run(rows("pg", is_truncated=None, values=[[0, 5]]))
    assert out["is_truncated"].tolist() == [True] and near(out["advantages"], [[5, 0]])


@pytest.mark.parametrize("row", ["pg", "pg."])
def test_strict_rules_refuse_a_batch_without_flags_whatever_its_rows(run: Runner, row: str) -> None:
    error = run.refusal(rows(row, is_truncated=None), under("strict"))
    assert isinstance(error, MissingKey) and "is_truncated" in str(error)


# ---- rows_outside_groups ----


@each_rules
@pytest.mark.parametrize(("size", "outside"), [(2, [4]), (3, [3, 4]), (4, [4]), (6, [0, 1, 2, 3, 4])])
def test_rows_beyond_the_last_full_slice_are_warned_of(run: Runner, rules: str, size: int, outside: list[int]) -> None:
    scores(run, rules, [1, 2, 3, 4, 5], reward_norm=norm("group", group_size=size))
    assert run.warnings["rows_outside_groups"] == outside


@each_rules
@pytest.mark.parametrize("block", ["reward_norm", "adv_norm"])
@pytest.mark.parametrize("levels", [("group", None), (None, "group"), ("batch", "group")])
def test_either_block_at_a_group_level_is_warned_of(run: Runner, rules: str, block: str, levels: Any) -> None:
    run(rows("pp", "pg", "pp"), under(rules, **{block: norm(*levels, group_size=2)}))  # shape alone decides
    assert run.warnings["rows_outside_groups"] == [2]


@each_rules
def test_rows_outside_the_groups_of_two_blocks_are_the_union(run: Runner, rules: str) -> None:
    blocks = {"reward_norm": norm("group", group_size=4), "adv_norm": norm("group", group_size=3)}
    run(rows(*["pg"] * 5), under(rules, **blocks))
    assert run.warnings["rows_outside_groups"] == [3, 4]


@each_rules
@pytest.mark.parametrize(
    ("size", "level", "meta"),
    [(1, "group", None), (5, "group", None), (2, "batch", None), (2, "group", meta_of(3, 2))],
    ids=["slices of one", "one slice", "batch level", "metadata"],
)
def test_rows_in_groups_are_not_warned_of(run: Runner, rules: str, size: int, level: str, meta: Any) -> None:
    scores(run, rules, [1, 2, 3, 4, 5], meta, reward_norm=norm(level, group_size=size))
    assert "rows_outside_groups" not in run.warnings


def test_a_tail_is_divided_by_eps_by_default(run: Runner) -> None:
    got = scores(run, "default", [1, 2, 3], reward_norm=norm("group", "group", group_size=2, std_unbiased=False))
    assert near(got / torch.tensor([1, 1, 1e5]), [-0.5 / 0.50001, 0.5 / 0.50001, 3])


def test_a_tail_is_one_more_group_under_strict_rules(run: Runner) -> None:
    got = scores(run, "strict", [1, 2, 3, 4, 8], reward_norm=norm("group", group_size=3))
    assert near(got, [-1, 0, 1, -2, 2])


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_tail_of_one_row_is_its_own_mean_under_strict_rules(run: Runner, leave_one_out: bool) -> None:
    block = norm("group", group_size=2, mean_leave1out=leave_one_out)
    assert near(scores(run, "strict", [1, 1, 3], reward_norm=block), [0, 0, 0])


def test_a_group_size_beyond_the_batch_makes_it_one_group_under_strict_rules(run: Runner) -> None:
    assert near(scores(run, "strict", [1, 2, 3], reward_norm=norm("group", group_size=9)), [-1, 0, 1])


@pytest.mark.parametrize(("rules", "tail"), [("default", [3, 5]), ("strict", [-1, 1])])
def test_adv_norm_has_a_tail_of_its_own(run: Runner, rules: str, tail: list[float]) -> None:
    batch = rows(*["pg"] * 5, rewards=[1, 1, 1, 3, 5])
    got = run(batch, under(rules, adv_norm=norm("group", group_size=3)))["advantages"]
    assert near(got[:, 0], [0, 0, 0, *tail])


# ---- kl_without_reference ----


@each_rules
@pytest.mark.parametrize("kl_ctl", [0.1, -0.1])
def test_kl_without_a_reference_is_warned_of_on_every_row_with_an_action(
    run: Runner, rules: str, kl_ctl: float
) -> None:
    run(rows("pg.", "pp.", "g..", "pgg"), under(rules, kl_ctl=kl_ctl))
    assert run.warnings["kl_without_reference"] == [0, 3]


@each_rules
def test_kl_switched_off_needs_no_reference(run: Runner, rules: str) -> None:
    run(rows("pg"), under(rules, kl_ctl=0.0))
    assert run.warnings == {}


@each_rules
def test_kl_with_a_reference_is_not_warned_of(run: Runner, rules: str) -> None:
    run(rows("pg", ref_logp=[[0, 0]]), under(rules, kl_ctl=0.1))
    assert run.warnings == {}


def test_without_a_reference_the_log_probability_is_the_penalty_by_default(run: Runner) -> None:
    out = run(rows("pgg", logprobs=[[0, -1, -2]]), under("default", kl_ctl=0.5))
    assert near(out["kl_rewards"], [[0.5, 1, 0]])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_without_a_reference_there_is_no_kl_under_strict_rules(run: Runner, kind: str) -> None:
    out = run(rows("pgg", logprobs=[[0, -1, -2]]), under("strict", kl_ctl=0.5, kl_estimator=kind))
    assert not out["kl_rewards"].any() and not out["advantages"].any()


# ---- zero_spread_groups ----


@each_rules
@pytest.mark.parametrize("levels", [("group", None), (None, "group"), ("batch", "group"), ("group", "batch")])
def test_groups_of_equal_scores_are_warned_of_with_all_their_rows(run: Runner, rules: str, levels: Any) -> None:
    scores(run, rules, [1, 1, 1, 2, 5], meta_of(2, 2, 1), reward_norm=norm(*levels))
    assert run.warnings["zero_spread_groups"] == [0, 1, 4]  # a group of one is equal to itself


@each_rules
def test_at_batch_level_the_batch_is_the_one_part(run: Runner, rules: str) -> None:
    scores(run, rules, [2, 2, 2], meta_of(2, 1), reward_norm=norm("batch"))
    assert run.warnings == {"zero_spread_groups": [0, 1, 2]}


@each_rules
def test_at_batch_level_one_other_score_is_spread_enough(run: Runner, rules: str) -> None:
    scores(run, rules, [2, 2, 2.0000002], meta_of(2, 1), reward_norm=norm("batch"))
    assert run.warnings == {}


@each_rules
def test_scores_are_compared_after_clipping(run: Runner, rules: str) -> None:
    scores(run, rules, [3, 7], reward_norm=norm("batch"), reward_clip=2.0)
    assert run.warnings == {"zero_spread_groups": [0, 1]}


@each_rules
@pytest.mark.parametrize("block", [None, norm(None)], ids=["no block", "no level"])
def test_without_a_level_no_spread_is_looked_at(run: Runner, rules: str, block: Any) -> None:
    scores(run, rules, [1, 1], reward_norm=block)
    assert run.warnings == {}


@each_rules
def test_rollouts_are_compared_by_their_references(run: Runner, rules: str) -> None:
    groups = [group(1, 1, rewards=(4, 4)), group(1, 1, rewards=(4, 5))]
    scores(run, rules, [1, 2, 3, 3], meta_of(2, 2, groups=groups), reward_norm=norm("group"))
    assert run.warnings == {"zero_spread_groups": [0, 1]}


@pytest.mark.parametrize(("rules", "listed"), [("default", [0, 1]), ("strict", [0, 1, 2])])
def test_the_tail_is_a_group_under_strict_rules_alone(run: Runner, rules: str, listed: list[int]) -> None:
    scores(run, rules, [1, 1, 1], reward_norm=norm("group", group_size=2))
    assert run.warnings["zero_spread_groups"] == listed


def discarding(run: Runner, rules: str, rewards: list[float], cut: list[bool], *sizes: int, **block: Any) -> Any:
    """Scores where truncated rows lose their outcome."""
    batch = rows(*["pg"] * len(rewards), rewards=rewards, is_truncated=cut)
    actor = {"mask_no_eos_with_zero": True, "reward_norm": norm("group") | block}
    return run(batch, under(rules, **actor), meta_of(*sizes) if sizes else None)["tot_rewards"][:, 0]


@pytest.mark.parametrize(("rules", "listed"), [("default", [4, 5]), ("strict", [0, 1, 2])])
def test_only_members_that_count_are_compared(run: Runner, rules: str, listed: list[int]) -> None:
    # equal but for a cleared row; spread without it; all cleared
    cut = [False, False, True, False, True, True]
    discarding(run, rules, [1, 1, 9, 1, 5, 5], cut, 3, 1, 2)
    listed = [3, *listed] if rules == "default" else [*listed, 3]  # the group of one counts under both
    assert run.warnings["zero_spread_groups"] == listed


# ---- uncapped_length_penalty ----

PENALTY = {
    "overlong_reward_penalty": True,
    "max_new_tokens": 4,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 0.5,
}


@each_rules
def test_a_penalty_beyond_its_factor_is_warned_of(run: Runner, rules: str) -> None:
    run(rows("pggg..", "pgggg.", "pggggg"), under(rules, **PENALTY))
    assert run.warnings == {"uncapped_length_penalty": [2]}  # exactly at the factor: no


@each_rules
def test_without_a_penalty_no_length_is_warned_of(run: Runner, rules: str) -> None:
    run(rows("pggggg"), under(rules, **PENALTY | {"overlong_reward_penalty": False}))
    assert run.warnings == {}


@pytest.mark.parametrize(("rules", "penalty"), [("default", -1.0), ("strict", -0.5)])
def test_the_penalty_is_capped_under_strict_rules_alone(run: Runner, rules: str, penalty: float) -> None:
    out = run(rows("pgggg..", "pgggggg", rewards=[0, 0]), under(rules, **PENALTY))
    assert near(out["rewards"], [-0.5, penalty])


# ---- loo_alone ----

LOO = norm("batch", mean_leave1out=True)


@each_rules
def test_leave_one_out_over_a_batch_of_one_is_warned_of(run: Runner, rules: str) -> None:
    scores(run, rules, [3], reward_norm=LOO)
    assert run.warnings["loo_alone"] == [0]


@each_rules
@pytest.mark.parametrize(
    ("rewards", "block"),
    [([3, 4], LOO), ([3], LOO | {"mean_level": "group"}), ([3], LOO | {"mean_leave1out": False})],
    ids=["two rows", "group level", "plain mean"],
)
def test_a_batch_with_a_peer_or_a_plain_mean_is_not_warned_of(
    run: Runner, rules: str, rewards: list[float], block: Any
) -> None:
    scores(run, rules, rewards, reward_norm=block)
    assert "loo_alone" not in run.warnings


@each_rules
def test_all_rows_of_the_only_rollout_are_warned_of(run: Runner, rules: str) -> None:
    scores(run, rules, [3, 3], meta_of(2, groups=[group(2)]), reward_norm=LOO)
    assert run.warnings["loo_alone"] == [0, 1]


@pytest.mark.parametrize(("rules", "score"), [("default", 3.0), ("strict", 0.0)])
def test_the_only_row_keeps_its_score_by_default_alone(run: Runner, rules: str, score: float) -> None:
    assert near(scores(run, rules, [3], reward_norm=LOO), [score])


def test_a_row_beside_its_reference_is_compared_with_it_under_strict_rules(run: Runner) -> None:
    meta = meta_of(1, groups=[group(1, rewards=(2,))])
    assert near(scores(run, "strict", [3], meta, reward_norm=LOO), [1])


@pytest.mark.parametrize(("rules", "alone"), [("default", None), ("strict", [1])])
def test_one_row_that_counts_is_alone_under_strict_rules_alone(run: Runner, rules: str, alone: Any) -> None:
    got = discarding(run, rules, [5, 3, 7], [True, False, True], mean_level="batch", mean_leave1out=True)
    assert run.warnings.get("loo_alone") == alone
    assert near(got[1], 0.0 if alone else 3 - 6.0)


# ---- discarded_rows_counted ----


@each_rules
@pytest.mark.parametrize("levels", [("batch", None), (None, "batch"), ("group", None)])
def test_truncated_rows_in_the_reward_statistics_are_warned_of(run: Runner, rules: str, levels: Any) -> None:
    mean, std = levels
    discarding(run, rules, [1, 2, 3], [True, False, True], 3, mean_level=mean, std_level=std)
    assert run.warnings["discarded_rows_counted"] == [0, 2]


@each_rules
@pytest.mark.parametrize(
    "change", [{"mask_no_eos_with_zero": False}, {"reward_norm": None}, {"reward_norm": norm(None)}]
)
def test_without_discarding_or_statistics_no_row_is_warned_of(run: Runner, rules: str, change: Any) -> None:
    actor = {"mask_no_eos_with_zero": True, "reward_norm": norm("batch")} | change
    run(rows("pg", "pg", rewards=[1, 2], is_truncated=[True, False]), under(rules, **actor))
    assert run.warnings == {}


@each_rules
def test_a_batch_without_truncated_rows_is_not_warned_of(run: Runner, rules: str) -> None:
    discarding(run, rules, [1, 2], [False, False], 2)
    assert run.warnings == {}


@pytest.mark.parametrize(("rules", "score"), [("default", 1 - 34.0), ("strict", -0.5)])
def test_a_discarded_row_moves_the_mean_by_default_alone(run: Runner, rules: str, score: float) -> None:
    got = discarding(run, rules, [1, 2, 99], [False, False, True], 3, eps=0.0)
    # the clip of 20 comes before the mean
    assert near(got[0], 1 - 23 / 3 if rules == "default" else score)


def test_a_group_of_discarded_rows_alone_stays_finite_under_strict_rules(run: Runner) -> None:
    got = discarding(run, "strict", [1, 2], [True, True], 2, std_level="group", eps=0.0)
    assert near(got, [0, 0])


def test_refusals_look_at_discarded_rows_under_strict_rules_too(run: Runner) -> None:
    batch = rows("pg", "pg", rewards=[float("nan"), 1], is_truncated=[True, False])
    error = run.refusal(batch, under("strict", mask_no_eos_with_zero=True, reward_norm=norm("batch")))
    assert isinstance(error, NonFinite)


# ---- weighted_flip ----


def weighted(run: Runner, rules: str, reward: float, process: float, mode: str = "process_weighted") -> Any:
    """The advantage of one token after process shaping."""
    batch = rows("ppg.", "pg..", rewards=[1, reward], token_rewards=[[0, 0, 0.5, 0], [0, process, 0, 0]])
    return run(batch, under(rules), advantage_shaping_mode=mode)["advantages"][1, 0]


@each_rules
def test_a_negative_advantage_that_turns_positive_is_warned_of(run: Runner, rules: str) -> None:
    assert near(weighted(run, rules, -1, 0.25), 0.25)  # the same value under both rule sets
    assert run.warnings == {"weighted_flip": [1]}


@each_rules
@pytest.mark.parametrize(("reward", "process"), [(0, 0.25), (-1, 0), (1, 1)])
def test_an_advantage_that_keeps_its_sign_is_not_warned_of(
    run: Runner, rules: str, reward: float, process: float
) -> None:
    weighted(run, rules, reward, process)
    assert run.warnings == {}


@each_rules
@pytest.mark.parametrize("mode", ["additive", "gvpo"])
def test_no_other_shaping_flips(run: Runner, rules: str, mode: str) -> None:
    weighted(run, rules, -1, 1, mode)
    assert run.warnings == {}


@each_rules
def test_process_weighted_without_process_rewards_flips_nothing(run: Runner, rules: str) -> None:
    run(rows("pg", rewards=[-1]), under(rules), advantage_shaping_mode="process_weighted")
    assert run.warnings == {}


@each_rules
def test_a_masked_column_flips_nothing(run: Runner, rules: str) -> None:
    # the tool token between two actions carries a negative state
    batch = rows("pgpg", rewards=[-1], token_rewards=[[0, 0, 1, 0]])
    run(batch, under(rules), advantage_shaping_mode="process_weighted")
    assert run.warnings == {}


@each_rules
def test_the_sign_is_that_after_adv_norm(run: Runner, rules: str) -> None:
    batch = rows("pg", "pg", rewards=[1, 3], token_rewards=[[0, 0.5], [0, 0.5]])
    run(batch, under(rules, adv_norm=norm("batch")), advantage_shaping_mode="process_weighted")
    assert run.warnings == {"weighted_flip": [0]}


# ---- how warnings are given ----


def caught(call: Any, *args: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args)
    return [one for one in found if issubclass(one.category, AdvantageWarning)]


LOST, FINE, WIDE = rows("pgp"), rows("pgg"), rows("pgg", is_truncated=None)


def test_a_warning_is_issued_once_per_name_and_instance(run: Runner) -> None:
    compute = run.build()
    assert [str(one.message).split(":")[0] for one in caught(compute, LOST)] == ["outcome_on_masked_token"]
    assert caught(compute, LOST) == []
    assert [str(one.message).split(":")[0] for one in caught(compute, WIDE)] == ["truncated_by_width"]
    assert len(caught(run.build(), LOST)) == 1


@pytest.mark.parametrize("line", ["compute(LOST)", "compute.compute_advantages([LOST])"])
def test_a_warning_points_at_the_line_that_called(run: Runner, line: str) -> None:
    names = {"compute": run.build(), "LOST": LOST}
    (one,) = caught(exec, compile(line, "the caller's file", "exec"), names)
    assert one.filename == "the caller's file"


@pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")
def test_last_warnings_are_those_of_the_last_call_alone(run: Runner) -> None:
    compute = run.build()
    assert compute.last_warnings == {}
    compute(LOST)
    assert compute.last_warnings == {"outcome_on_masked_token": [0]}
    compute(WIDE)
    assert compute.last_warnings == {"truncated_by_width": [0]}
    compute(WIDE)  # issued before, found again
    assert compute.last_warnings == {"truncated_by_width": [0]}
    compute(FINE)
    assert compute.last_warnings == {}


def test_a_refused_call_issues_no_warning(run: Runner) -> None:
    compute = run.build()

    def refused() -> None:
        with pytest.raises(NonFinite):
            compute(LOST | {"rewards": torch.tensor([float("nan")])})

    assert caught(refused) == []
    assert len(caught(compute, LOST)) == 1


def test_a_full_override_is_not_looked_at(run: Runner) -> None:
    path = "tests.footguns.override.as_given"
    run(rows("gpgp", is_truncated=None), {"kl_ctl": 0.1, "advantage": {"compute": {"implementation": path}}})
    assert run.warnings == {}
