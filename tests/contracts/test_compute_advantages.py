"""The list API: one dict per prompt in, one per prompt out, computed as one batch."""

import warnings

import pytest
import torch

from compiled_adv import AdvantageWarning, RolloutGroup, concat_batch
from compiled_adv.errors import EmptyBatch, MissingKey, WrongShape, WrongType
from tests.contracts.small import near, plugin, rows

BY_GROUP = {"reward_norm": {"mean_level": "group", "std_level": None}}


def prompts():
    """Three prompts of two, one and three rows, and of widths 3, 5 and 4."""
    return [
        rows("pgg", "pg.", rewards=[1.0, 3.0]),
        rows("pgggg", rewards=[5.0]),
        rows("pg..", "ppgg", "pgg.", rewards=[0.0, 2.0, 7.0]),
    ]


@pytest.fixture
def call(run):
    def go(rollouts, actor=None, **per_call):
        compute = run.build(actor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AdvantageWarning)
            outs = compute.compute_advantages(rollouts, **per_call)
        run.warnings = compute.last_warnings
        return outs

    return go


def outcomes(outs):
    """Each row's score, wherever it sits."""
    return [out["tot_rewards"].sum(1).tolist() for out in outs]


def test_each_prompt_comes_back_in_its_own_shape_and_order(call):
    outs = call(prompts())
    assert [out["advantages"].shape for out in outs] == [(2, 3), (1, 5), (3, 4)]
    assert outcomes(outs) == [[1.0, 3.0], [5.0], [0.0, 2.0, 7.0]]


def test_each_prompt_is_one_group_however_many_rows_it_has(call):
    # means 2, 5 and 3
    assert outcomes(call(prompts(), BY_GROUP)) == [[-1.0, 1.0], [0.0], [-3.0, -1.0, 4.0]]


def test_a_group_size_in_the_config_does_not_matter(call):
    actor = {"reward_norm": BY_GROUP["reward_norm"] | {"group_size": 4}}
    assert outcomes(call(prompts(), actor)) == [[-1.0, 1.0], [0.0], [-3.0, -1.0, 4.0]]


def test_batch_statistics_span_all_prompts(call):
    assert outcomes(call(prompts(), {"reward_norm": {"std_level": None}})) == [[-2.0, 0.0], [2.0], [-3.0, -1.0, 4.0]]


def test_it_is_the_padded_batch_computed_and_cropped(run, call):
    actor = {"kl_ctl": 0.5, "gae_lambda": 0.5, "reward_norm": {}, "adv_norm": {}}
    rollouts = prompts()
    for i, rollout in enumerate(rollouts):
        rollout["logprobs"] = -torch.rand(rollout["logprobs"].shape, generator=torch.Generator().manual_seed(i))
    batch, meta = concat_batch(rollouts)
    whole, outs = run(batch, actor, meta), call(rollouts, actor)
    start = 0
    for rollout, out in zip(rollouts, outs, strict=True):
        n, width = rollout["loss_mask"].shape
        for name in ("advantages", "returns", "logprobs", "kl_rewards", "tot_rewards"):
            assert torch.equal(out[name], whole[name][start : start + n, :width]), name
        start += n


def test_a_prompts_own_result_does_not_depend_on_the_others_under_group_statistics(call):
    actor = {"reward_norm": {"mean_level": "group", "std_level": "group"}, "gae_lambda": 0.5}
    together, alone = call(prompts(), actor), [call([rollout], actor)[0] for rollout in prompts()]
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a["advantages"], b["advantages"])


def test_the_order_of_prompts_is_the_order_of_results(call):
    forward, backward = call(prompts(), BY_GROUP), call(prompts()[::-1], BY_GROUP)
    assert outcomes(forward) == outcomes(backward)[::-1]


# ---- logical rollouts ----


def with_group(**fields):
    rollouts = prompts()
    rollouts[2]["rollout_group"] = RolloutGroup(**fields)
    return rollouts


def test_a_rollout_group_decides_who_counts(call):
    # references 1 and 7: mean 4
    rollouts = with_group(row_counts=(2, 1), rewards=(1.0, None))
    assert outcomes(call(rollouts, BY_GROUP))[2] == [-4.0, -2.0, 3.0]


def test_a_rollout_group_is_put_back(call):
    rollouts = with_group(row_counts=(2, 1), rewards=(1.0, None))
    outs = call(rollouts)
    assert "rollout_group" not in outs[0]
    assert outs[2]["rollout_group"] == RolloutGroup((2, 1), (1.0, None))


def test_a_rollout_group_may_be_a_plain_mapping(call):
    rollouts = prompts()
    rollouts[2]["rollout_group"] = {"row_counts": [2, 1], "rewards": [1.0, None]}
    assert outcomes(call(rollouts, BY_GROUP))[2] == [-4.0, -2.0, 3.0]


def test_rows_of_a_split_rollout_without_reference_must_agree(run, call):
    with pytest.raises(ValueError, match=r"RowsDiffer.*\n.*\n.*rows \[4\]"):
        call(with_group(row_counts=(2, 1)), BY_GROUP)


def test_shaped_references_are_one_per_rollout_of_all_prompts(call):
    # two rows, one row, and two rollouts of the third prompt: 5 references
    actor = BY_GROUP | plugin("outcome_reward_shaping", "references", values=[0.0, 2.0, 0.0, 10.0, 20.0])
    rollouts = with_group(row_counts=(2, 1), rewards=(1.0, None))
    assert outcomes(call(rollouts, actor)) == [[0.0, 2.0], [5.0], [-15.0, -13.0, -8.0]]


def test_a_concatenated_batch_knows_the_2_eps_rule(call):
    # the same row twice: a scale of eps alone becomes 1
    actor = {"reward_norm": {"mean_level": None, "std_level": "group", "std_unbiased": False, "eps": 2.0}}
    assert outcomes(call([rows("pg", "pg", rewards=[2.0, 2.0])], actor)) == [[2.0, 2.0]]


# ---- what else a prompt carries ----


def test_what_is_no_tensor_comes_back_to_its_prompt(call):
    rollouts = prompts()
    values = ["text", {"a": 1}, [1, 2, 3, 4, 5, 6]]
    for rollout, value in zip(rollouts, values, strict=True):
        rollout["note"] = value
    assert all(out["note"] is value for out, value in zip(call(rollouts), values, strict=True))


def test_other_tensors_come_back_to_their_rows(call):
    rollouts = prompts()
    for i, rollout in enumerate(rollouts):
        rollout["version"] = torch.full((len(rollout["rewards"]),), i)
        rollout["original_rewards"] = rollout["rewards"] + 10
    outs = call(rollouts)
    assert [out["version"].tolist() for out in outs] == [[0, 0], [1], [2, 2, 2]]
    assert [out["original_rewards"].tolist() for out in outs] == [[11.0, 13.0], [15.0], [10.0, 12.0, 17.0]]


def test_turn_ids_of_padding_name_no_turn(call):
    rollouts = [rows("pg", turn_ids=[[-1, 0]], rewards=[1.0]), rows("pggg", turn_ids=[[-1, 0, 1, 1]], rewards=[1.0])]
    outs = call(rollouts, {"gae_timestep_unit": "turn", "gae_lambda": 0.5})
    assert outs[0]["turn_ids"].tolist() == [[-1, 0]]
    assert outs[0]["advantages"].tolist() == [[1.0, 0.0]]
    assert outs[1]["advantages"].tolist() == [[0.5, 1.0, 1.0, 0.0]]


def test_per_call_values_reach_every_prompt(call):
    rollouts = [rows("pg", rewards=[-2.0], token_rewards=[[0.0, -1.0]]) for _ in range(2)]
    outs = call(rollouts, advantage_shaping_mode="gvpo", gvpo_negative_scale=0.5)
    assert [out["advantages"][0, 0].item() for out in outs] == [-3.0, -3.0]


def test_warnings_count_rows_of_the_whole_batch(run, call):
    call([rows("pg", "pg"), rows("pg"), rows("gg", "pg")])
    assert run.warnings["first_token_generated"] == [3]


def test_without_flags_only_rows_of_the_widest_prompts_fill_the_width(call):
    outs = call([rows("pg", is_truncated=None), rows("pggg", "pg..", is_truncated=None)])
    assert [out["is_truncated"].tolist() for out in outs] == [[False], [True, False]]


def test_one_prompt_is_enough(call):
    assert near(call([rows("pg", rewards=[2.0])])[0]["advantages"], [[2.0, 0.0]])


# ---- inputs and results are apart ----


def test_prompts_are_not_written_to(call):
    rollouts = prompts()
    before = [{key: x.clone() for key, x in rollout.items()} for rollout in rollouts]
    call(rollouts, BY_GROUP)
    for rollout, old in zip(rollouts, before, strict=True):
        assert rollout.keys() == old.keys()
        assert all(torch.equal(rollout[key], old[key]) for key in old)


def test_results_share_no_storage_with_each_other_or_the_prompts(call):
    rollouts = prompts()
    outs = call(rollouts)
    tensors = [x for d in (*rollouts, *outs) for x in d.values() if isinstance(x, torch.Tensor)]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)


# ---- refused ----


def test_an_empty_list_is_refused(run):
    with pytest.raises(EmptyBatch):
        run.build().compute_advantages([])


@pytest.mark.parametrize("rollouts", [None, {"a": 1}, rows("pg"), "text"])
def test_what_is_no_list_is_refused(run, rollouts):
    with pytest.raises(WrongType):
        run.build().compute_advantages(rollouts)


@pytest.mark.parametrize("holder", [0, 1])
def test_a_key_that_some_prompts_lack_is_refused_by_name(run, holder):
    rollouts = prompts()
    rollouts[holder]["values"] = torch.zeros(rollouts[holder]["loss_mask"].shape)
    with pytest.raises(MissingKey, match="'values'"):
        run.build().compute_advantages(rollouts)


def test_a_required_key_that_all_prompts_lack_is_refused_by_name(run):
    with pytest.raises(MissingKey, match="'logprobs'"):
        run.build().compute_advantages([rows("pg", logprobs=None)] * 2)


def test_a_tensor_that_is_not_one_entry_per_row_is_refused_by_name(run):
    rollouts = prompts()
    for rollout in rollouts:
        rollout["odd"] = torch.zeros(7)
    with pytest.raises(WrongShape, match="'odd'"):
        run.build().compute_advantages(rollouts)


def test_the_next_list_works_after_a_refusal(run):
    compute = run.build()
    with pytest.raises(EmptyBatch):
        compute.compute_advantages([])
    assert len(compute.compute_advantages(prompts())) == 3
