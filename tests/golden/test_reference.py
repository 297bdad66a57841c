"""The oracle's own edges: each error flag on its rows, and rules that no golden file reaches."""

import math
from types import SimpleNamespace

import pytest
import torch

from compiled_adv import reference
from compiled_adv.advantage import OutcomeResult
from compiled_adv.advantage_algorithms import TemporalResult
from compiled_adv.batch import as_meta
from compiled_adv.resolve import resolve_spec
from compiled_adv.spec import load_config

NAN, INF = math.nan, math.inf
NORM = {"mean_level": "group", "std_level": None, "group_size": 1}


def a_call(**values):
    defaults = dict(
        advantage_shaping_mode="additive", gvpo_negative_scale=0.2, gvpo_zero_penalty=0.4, gvpo_zero_eps=1e-6
    )
    return SimpleNamespace(**(defaults | values))


def a_batch(**channels):
    """Two rows: prompt, two generated tokens, padding; the second row is one token longer."""
    batch = {
        "input_ids": torch.zeros(2, 5, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]),
        "logprobs": torch.zeros(2, 5),
        "rewards": torch.tensor([1.0, 2.0]),
        "is_truncated": torch.tensor([False, False]),
    }
    return batch | {key: torch.as_tensor(value) for key, value in channels.items() if value is not None}


def run(batch, actor=None, meta=None, call=None):
    spec = load_config({"actor": {"kl_ctl": 0.0} | (actor or {})})
    return reference.run(spec, resolve_spec(spec), batch, as_meta(meta), call or a_call())


def with_cell(b, t, x, fill=0.0):
    grid = torch.full((2, 5), fill)
    grid[b, t] = x
    return grid


TURN_IDS = [[-1, 0, 0, -1, -1], [-1, 0, 0, 1, -1]]
SPLIT = {"n_trajs": 1, "traj_group_sizes": [2], "traj_seqlens": [5], "rollout_groups": [{"row_counts": [2]}]}
TURNS = {"gae_timestep_unit": "turn"}
FOLD = {"token_rewards_as_adv": False}
RECOMPUTE = {"recompute_logprob": True}
WEIGHTED = a_call(advantage_shaping_mode="process_weighted")
LENGTH = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 1.0,
    "max_new_tokens": 3,
    "reward_norm": NORM,
}

REFUSALS = {
    "nonfinite_attention_mask": dict(batch={"attention_mask": with_cell(1, 0, NAN)}),
    "nonfinite_loss_mask": dict(batch={"loss_mask": with_cell(1, 4, INF)}),
    "attention_not_prefix": dict(batch={"attention_mask": [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]]}),
    "loss_mask_outside_attention": dict(batch={"loss_mask": [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]}),
    "nonfinite_rewards": dict(batch={"rewards": [1.0, NAN]}),
    "nonfinite_logprobs": dict(batch={"logprobs": with_cell(1, 3, -INF)}),
    "nonfinite_prox_logp": dict(batch={"prox_logp": with_cell(1, 2, NAN)}, actor=RECOMPUTE),
    "nonfinite_ref_logp": dict(batch={"ref_logp": with_cell(1, 2, NAN)}),
    "nonfinite_values": dict(batch={"values": with_cell(1, 2, NAN)}),
    "nonfinite_token_rewards": dict(batch={"token_rewards": with_cell(1, 3, NAN)}),
    "turn_id_out_of_range": dict(batch={"turn_ids": [TURN_IDS[0], [-1, 0, 0, 5, -1]]}, actor=TURNS),
    "turn_ids_decrease": dict(batch={"turn_ids": [TURN_IDS[0], [-1, 1, 0, 0, -1]]}, actor=TURNS),
    "nonuniform_folded_rewards": dict(batch={"token_rewards": with_cell(1, 1, 0.5)}, actor=FOLD),
    "process_reward_out_of_range": dict(batch={"token_rewards": with_cell(1, 1, 1.5)}, call=WEIGHTED),
    "split_rows_differ": dict(batch={}, actor={"reward_norm": NORM}, meta=SPLIT),
    "nonfinite_result": dict(batch={"rewards": [0.0, 1e30]}, actor={"reward_scaling": 1e30, "reward_clip": INF}),
}


@pytest.mark.parametrize("flag", REFUSALS)
def test_each_error_flag_names_its_rows_and_gives_no_tensors(flag):
    case = dict(REFUSALS[flag])
    out, flags = run(a_batch(**case.pop("batch")), **case)
    assert (out, flags) == ({}, {flag: [1]})


@pytest.mark.parametrize(
    "channel, column", [("logprobs", 0), ("ref_logp", 3), ("values", 4), ("token_rewards", 4), ("prox_logp", 3)]
)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_a_nonfinite_number_in_a_masked_slot_reads_as_zero(channel, column, garbage):
    actor = {"kl_ctl": 0.5} | RECOMPUTE
    base = {"prox_logp": with_cell(0, 0, 0.0), channel: with_cell(1, column, 0.0, fill=-0.25)}
    dirty = base | {channel: with_cell(1, column, garbage, fill=-0.25)}
    clean_out, clean_flags = run(a_batch(**base), actor)
    dirty_out, dirty_flags = run(a_batch(**dirty), actor)
    assert dirty_flags == clean_flags
    for name, x in clean_out.items():
        assert torch.equal(x, dirty_out[name]), name


def test_the_bootstrap_slot_of_a_truncated_row_is_active():
    values = with_cell(1, 3, NAN)  # column L-1 of row 1: masked, read only for the bootstrap
    assert run(a_batch(values=values))[1] == {}
    assert run(a_batch(values=values, is_truncated=[False, True]))[1] == {"nonfinite_values": [1]}


def test_an_all_padding_row_places_its_outcome_at_column_0_and_bootstraps_at_the_last():
    batch = a_batch(
        attention_mask=[[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
        loss_mask=[[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
        is_truncated=[False, True],
        values=with_cell(1, 4, NAN),
    )
    assert run(batch)[1] == {"nonfinite_values": [1]}
    out, flags = run(batch | {"values": torch.zeros(2, 5)})
    assert out["tot_rewards"][1].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert flags == {"outcome_on_masked_token": [1]}


def test_one_column_has_no_advantage_at_all():
    batch = {key: x[:, :1] if x.ndim == 2 else x for key, x in a_batch().items()}
    batch["loss_mask"] = torch.ones(2, 1)
    out, _ = run(batch)
    assert out["advantages"].tolist() == [[0.0], [0.0]]
    assert out["loss_mask"].tolist() == [[1.0], [1.0]]  # the mask wraps onto itself
    assert run(batch, {"advantage": {"rules": "strict"}})[0]["loss_mask"].tolist() == [[0.0], [0.0]]


def test_a_scale_of_zero_is_refused():
    norm = {"mean_level": "batch", "std_level": "batch", "eps": 0.0}
    assert run(a_batch(rewards=[1.0, 1.0]), {"reward_norm": norm})[1] == {"nonfinite_result": [0, 1]}


@pytest.mark.parametrize("n", [3, 7, 49])
def test_equal_scores_have_exactly_themselves_as_mean(n):
    rows = {key: x[:1].expand(n, *x.shape[1:]) for key, x in a_batch().items()}
    rows["rewards"] = torch.full((n,), 0.1)
    out, flags = run(rows, {"reward_bias": 0.7, "reward_norm": {"mean_level": "batch", "std_level": None}})
    assert not out["advantages"].any()
    assert flags == {"zero_spread_groups": list(range(n))}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_rewards_keep_their_dtype_without_a_penalty(dtype):
    assert run(a_batch(rewards=torch.tensor([1, 2], dtype=dtype)))[0]["rewards"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_other_rewards_become_float32(dtype):
    assert run(a_batch(rewards=torch.tensor([0, 1], dtype=dtype)))[0]["rewards"].dtype == torch.float32


def test_a_penalty_turns_integer_rewards_into_floats_even_where_it_is_zero():
    out, _ = run(a_batch(rewards=torch.tensor([1, 2])), LENGTH | {"max_new_tokens": 100})
    assert out["rewards"].dtype == torch.float32


def test_rows_that_a_penalty_makes_equal_still_differ():
    # 2 and 3 tokens, penalties -0.5 and -1: both end at 0.5
    assert run(a_batch(rewards=[1.0, 1.5]), LENGTH, SPLIT)[1] == {"split_rows_differ": [1]}


def test_rows_of_a_split_rollout_may_differ_without_a_level():
    assert run(a_batch(), {"reward_norm": {"mean_level": None, "std_level": None}}, SPLIT)[1] == {}


def test_an_explicit_reference_settles_rows_that_differ():
    meta = SPLIT | {"rollout_groups": [{"row_counts": [2], "rewards": [1.0]}]}
    assert run(a_batch(), {"reward_norm": NORM}, meta)[0]["tot_rewards"].sum(1).tolist() == [0.0, 1.0]


def test_unvalidated_turn_ids_pass_where_nothing_reads_them():
    assert run(a_batch(turn_ids=[[9, -7, 9, 9, 9]] * 2))[1] == {}


def test_a_lambda_function_validates_turn_ids_under_token_gae_too():
    actor = {"gae_lambda": "compiled_adv.gae.constant_gae_lambda", "gae_lambda_kwargs": {"value": 0.5}}
    assert run(a_batch(turn_ids=[[9, -7, 9, 9, 9]] * 2), actor)[1] == {"turn_id_out_of_range": [0, 1]}


def test_gvpo_compares_as_float32():
    # the advantage is float32(0.1), which is above the float64 0.1
    call = a_call(advantage_shaping_mode="gvpo", gvpo_zero_eps=0.1, gvpo_zero_penalty=0.25)
    out, _ = run(a_batch(rewards=[0.1, 0.1], token_rewards=with_cell(0, 1, -1.0)), call=call)
    assert out["advantages"][0, 0].item() == -0.25


def test_without_turn_ids_runs_on_both_sides_of_a_gap_may_carry_different_rewards():
    batch = a_batch(loss_mask=[[0, 1, 1, 0, 0], [0, 1, 0, 1, 0]], token_rewards=with_cell(1, 3, 0.5))
    out, flags = run(batch, FOLD)
    assert flags == {} and out["tot_rewards"][1].tolist() == [0.0, 0.0, 2.5, 0.0, 0.0]


# -- plugins ----------------------------------------------------------------------------------------------------------

SEEN = []


def keeps_rewards(inputs):
    SEEN.append(inputs)
    return OutcomeResult(inputs.data["rewards"].float())


def equal_references(inputs):
    rewards = inputs.data["rewards"]
    return OutcomeResult(rewards, rewards.new_tensor([0.5]))


def sums_channels(inputs):
    SEEN.append(inputs)
    total = inputs.outcome_rewards + inputs.kl_rewards + inputs.process_rewards
    return TemporalResult(total + 1, total + 2, total + 3)


def minus_one(inputs):
    SEEN.append(inputs)
    return torch.full_like(inputs.advantages, -1.0)


def plugin(slot, fn):
    return {"advantage": {slot: {"implementation": f"{__name__}.{fn.__name__}"}}}


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def test_outcome_shaping_sees_rewards_after_the_penalty():
    actor = LENGTH | {"reward_norm": None} | plugin("outcome_reward_shaping", keeps_rewards)
    run(a_batch(rewards=torch.tensor([1, 2])), actor)
    assert SEEN[0].data["rewards"].tolist() == [0.5, 1.0]


def test_outcome_shaping_sees_rewards_as_they_came_without_a_penalty():
    run(a_batch(rewards=torch.tensor([1, 2])), plugin("outcome_reward_shaping", keeps_rewards))
    assert SEEN[0].data["rewards"].dtype == torch.int64


def test_a_batch_that_is_refused_reaches_no_plugin():
    actor = TURNS | plugin("outcome_reward_shaping", keeps_rewards)
    run(a_batch(turn_ids=[[-1, 1, 0, -1, -1]] * 2), actor)
    assert SEEN == []


@pytest.mark.parametrize("penalty", [{}, LENGTH])
def test_shaped_references_settle_rows_that_differ(penalty):
    actor = penalty | {"reward_norm": NORM} | plugin("outcome_reward_shaping", equal_references)
    out, flags = run(a_batch(), actor, SPLIT)
    assert out["tot_rewards"].sum(1).tolist() == (out["rewards"] - 0.5).tolist()
    assert flags == {"zero_spread_groups": [0, 1]}


def test_a_custom_estimators_totals_are_reported_as_they_are():
    actor = {"kl_ctl": 0.5} | plugin("estimator", sums_channels)
    out, _ = run(a_batch(ref_logp=with_cell(0, 0, 1.0)), actor)
    assert out["tot_rewards"].tolist() == (out["advantages"] + 2).tolist()
    assert out["tot_rewards"][0, 0].item() == 0.5 + 3


def test_a_custom_estimator_gets_bootstrap_values_of_every_row_and_aligned_turn_ids():
    values = torch.arange(10.0).reshape(2, 5)
    run(a_batch(values=values, turn_ids=TURN_IDS), plugin("estimator", sums_channels))
    assert SEEN[0].bootstrap_values.tolist() == [2.0, 8.0]
    assert SEEN[0].turn_ids.tolist() == [[0, 0, -1, -1, -1], [0, 0, 1, -1, -1]]
    assert SEEN[0].turn_ids.dtype == torch.int64


def test_a_custom_process_function_runs_without_token_rewards_and_everywhere():
    out, _ = run(a_batch(), plugin("process_adv_shaping", minus_one))
    assert SEEN[0].token_rewards is None
    assert out["advantages"].unique().tolist() == [-1.0]


def test_a_custom_process_function_gets_no_folded_rewards():
    run(a_batch(token_rewards=torch.zeros(2, 5)), FOLD | plugin("process_adv_shaping", minus_one))
    assert SEEN[0].token_rewards is None
