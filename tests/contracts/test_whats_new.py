"""semantics.md, "What is new over today's behaviour": keys, dtypes, what passes through, what non-finite numbers do.

| sentence | proven elsewhere |
|---|---|
| whole or by stage, dotted paths, kwargs checked at build | tests/unit/test_resolve.py, test_plugins_*.py |
| outcome, temporal and process functions, normalization_rewards | test_plugins_outcome.py, _estimator.py, _process.py |
| AdvantageResult, extras, MOPD, prox_logp | test_plugins_compute.py |
| required keys | test_refused.py |
| loss aggregation and minibatch scheduling are untouched | nothing here computes or orders either |
"""

import itertools

import pytest
import torch

from compiled_adv import (
    AdvantageInputs,
    AdvantageResult,
    GAELambdaContext,
    GAELambdaInputs,
    OutcomeResult,
    OutcomeRewardInputs,
    ProcessAdvantageInputs,
    RolloutGroup,
    TemporalInputs,
    TemporalResult,
    TrajBatchMeta,
)
from tests.contracts.small import near, plugin, rows

NAN, INF = float("nan"), float("inf")

# ---- the contracts' fields ----

FIELDS = {
    OutcomeRewardInputs: "data config meta",
    OutcomeResult: "rewards normalization_rewards",
    TemporalInputs: "outcome_rewards kl_rewards process_rewards values bootstrap_values is_truncated loss_mask "
    "turn_ids discount config",
    TemporalResult: "advantages returns total_rewards",
    ProcessAdvantageInputs: "advantages token_rewards loss_mask config",
    AdvantageInputs: "data config meta advantage_shaping_mode gvpo_negative_scale gvpo_zero_penalty gvpo_zero_eps",
    AdvantageResult: "advantages returns loss_mask logprobs rewards tot_rewards kl_rewards extras",
    RolloutGroup: "row_counts rewards",
    TrajBatchMeta: "n_trajs traj_group_sizes traj_seqlens rollout_groups",
}


@pytest.mark.parametrize("contract", FIELDS, ids=lambda contract: contract.__name__)
def test_a_contract_has_exactly_the_documented_fields(contract):
    assert list(contract.__dataclass_fields__) == FIELDS[contract].split()


def test_the_lambda_context_is_a_typed_dict_with_the_documented_keys():
    keys = {"effective_token_lengths", "turn_counts", "timestep_lengths"}
    assert GAELambdaContext.__required_keys__ == keys


def test_lambda_inputs_are_the_lambda_context_by_another_name():
    assert GAELambdaInputs is GAELambdaContext


@pytest.mark.parametrize(
    ("result", "name", "default"),
    [
        (OutcomeResult(torch.zeros(1)), "normalization_rewards", None),
        (AdvantageResult(*[torch.zeros(1)] * 7), "extras", {}),
        (RolloutGroup((1, 1)), "rewards", ()),
        (TrajBatchMeta(1, [1], [1]), "rollout_groups", None),
    ],
    ids=["normalization_rewards", "extras", "rewards", "rollout_groups"],
)
def test_an_optional_field_may_be_left_out(result, name, default):
    assert getattr(result, name) == default


def test_logical_group_sizes_count_rollouts_where_traj_group_sizes_count_rows():
    meta = TrajBatchMeta(3, [3, 2, 2], [5, 5, 5], [RolloutGroup((2, 1)), None, RolloutGroup((2,))])
    assert meta.logical_group_sizes == [2, 2, 1]
    assert TrajBatchMeta(1, [3], [5]).logical_group_sizes == [3]


# ---- dtypes ----


def full(dtype=torch.float32):
    """Every optional channel, floating point in `dtype`; numbers that bf16 holds."""
    batch = rows("pggp.", "pgpg.", mopd_teacher_logp_sum=[1.0, 2.0])
    floats = {
        "rewards": [1.0, -0.5],
        "logprobs": [[-0.5, -1.0, -0.25, -2.0, 0.0]] * 2,
        "prox_logp": [[-1.0, -0.5, -1.5, 0.0, 0.0]] * 2,
        "ref_logp": [[-0.25, -0.5, -1.0, 0.0, 0.0]] * 2,
        "values": [[0.5, 0.25, 1.0, -0.5, 0.0]] * 2,
        "token_rewards": [[0.0, 0.25, 0.25, 0.5, 0.0]] * 2,
    }
    batch |= {key: torch.tensor(x, dtype=dtype) for key, x in floats.items()}
    return batch | {"turn_ids": torch.tensor([[-1, 0, 0, -1, -1], [-1, 0, -1, 1, -1]])}


EVERYTHING = {
    "kl_ctl": 0.5,
    "recompute_logprob": True,
    "reward_norm": {"mean_level": "batch"},
    "adv_norm": {},
    "gae_lambda": 0.5,
}
COMPUTED = {
    "advantages": torch.float32,
    "returns": torch.float32,
    "loss_mask": torch.float32,
    "logprobs": torch.float32,
    "prox_logp": torch.float32,
    "mopd_behavior_logprobs": torch.float32,
    "ref_logp": torch.float32,
    "rewards": torch.float32,
    "tot_rewards": torch.float32,
    "kl_rewards": torch.float32,
    "is_truncated": torch.bool,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_has_its_own_dtype_whatever_came_in(run, name, dtype):
    assert run(full(dtype), EVERYTHING)[name].dtype == COMPUTED[name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_numbers_do_not_depend_on_the_dtype_that_holds_them(run, dtype):
    got, want = run(full(dtype), EVERYTHING), run(full(), EVERYTHING)
    assert all(near(got[name], want[name].double()) for name in COMPUTED)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("key", ["attention_mask", "loss_mask", "is_truncated"])
def test_a_mask_may_have_any_real_dtype(run, key, dtype):
    batch = full()
    batch["is_truncated"] = torch.tensor([True, False])
    got = run(batch | {key: batch[key].to(dtype)}, EVERYTHING)
    want = run(batch, EVERYTHING)
    assert all(torch.equal(got[name], want[name]) for name in COMPUTED)


@pytest.mark.parametrize("tiny", [1e-30, -1e-45])
def test_the_smallest_nonzero_mask_is_set(run, tiny):
    batch = rows("pgg")
    loss_mask = batch["loss_mask"].double() * tiny
    assert run(batch | {"loss_mask": loss_mask})["loss_mask"].tolist() == [[1.0, 1.0, 0.0]]


def test_bool_rewards_become_float(run):
    assert run(rows("pg", "pg", rewards=torch.tensor([True, False])))["rewards"].tolist() == [1.0, 0.0]
    assert run(rows("pg", rewards=torch.tensor([True])))["rewards"].dtype == torch.float32


def test_integer_rewards_take_part_in_the_computation(run):
    actor = {"reward_norm": {"mean_level": "batch", "std_level": None}}
    out = run(rows("pg", "pg", rewards=torch.tensor([1, 4])), actor)
    assert out["tot_rewards"][:, 0].tolist() == [-1.5, 1.5]


# ---- what passes through ----


def test_keys_that_are_not_computed_pass_through_as_the_same_objects(run):
    others = {
        "original_rewards": torch.tensor([9.0]),
        "images": [object()],
        "versions": torch.zeros(3, 3),
        "note": "text",
        7: "a key that is no string",
    }
    batch = rows("pg", **{str(k): v for k, v in others.items() if k != 7 and k != "images"}) | others
    out = run(batch)
    assert all(out[key] is value for key, value in others.items())
    assert out["input_ids"] is batch["input_ids"]
    assert out["attention_mask"] is batch["attention_mask"]


def test_the_inputs_that_are_only_read_pass_through(run):
    batch = full()
    out = run(batch, EVERYTHING)
    assert all(out[key] is batch[key] for key in ("values", "token_rewards", "turn_ids", "mopd_teacher_logp_sum"))


def test_rewards_are_the_computed_channel_and_original_rewards_are_never_touched(run):
    original = torch.tensor([5.0])
    out = run(
        rows("pg", rewards=[1.0], original_rewards=original),
        plugin("outcome_reward_shaping", "see_outcome", factor=2.0),
    )
    assert out["rewards"].tolist() == [2.0]
    assert out["original_rewards"] is original and original.tolist() == [5.0]


def test_without_original_rewards_none_appear(run):
    assert "original_rewards" not in run(rows("pg"))


def test_the_default_compute_emits_no_input_token_loss_mask(run):
    assert "input_token_loss_mask" not in run(full(), EVERYTHING)


def test_the_batch_gets_no_new_keys(run):
    batch = rows("pg")
    before = list(batch)
    run(batch)
    assert list(batch) == before


def test_the_result_is_a_new_dict(run):
    batch = rows("pg")
    assert run(batch) is not batch


# ---- what is computed is new ----

MIXES = {
    "everything": (full(), EVERYTHING),
    "bare": (rows("pg", "gg", mopd_teacher_logp_sum=[0.0, 0.0]), {}),
    "decoupled": (full(), {"use_decoupled_loss": True}),
    "integers": (rows("pg", rewards=torch.tensor([1])), {}),
    "strict": (full(), {"advantage": {"rules": "strict"}}),
    "turn": (full(), {"gae_timestep_unit": "turn"}),
    "nothing active": (rows("pp"), {"adv_norm": {}}),
    "plugins": (full(), plugin("estimator", "see_estimator")),
    "outcome plugin": (rows("pg"), plugin("outcome_reward_shaping", "aliases_its_input")),
}


def storages(tensors):
    return {name: x.untyped_storage().data_ptr() for name, x in tensors.items()}


@pytest.mark.parametrize("mix", MIXES)
def test_what_is_computed_shares_storage_with_no_input_and_no_other_output(run, mix):
    batch, actor = MIXES[mix]
    out = run(batch, actor)
    new = storages({name: x for name, x in out.items() if isinstance(x, torch.Tensor) and x is not batch.get(name)})
    old = storages({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)})
    assert len({*new.values()}) == len(new), new
    assert not {*new.values()} & {*old.values()}


@pytest.mark.parametrize("mix", MIXES)
def test_what_is_computed_is_contiguous_and_requires_no_grad(run, mix):
    batch, actor = MIXES[mix]
    out = run(batch, actor)
    for name in COMPUTED.keys() & out.keys():
        if out[name] is not batch.get(name):
            assert out[name].is_contiguous() and not out[name].requires_grad, name


@pytest.mark.parametrize("mix", MIXES)
def test_a_second_call_leaves_the_first_ones_result_alone(run, mix):
    batch, actor = MIXES[mix]
    compute = run.build(actor)
    first = {k: v for k, v in compute(batch).items() if k in COMPUTED}
    kept = {k: v.clone() for k, v in first.items()}
    other = {k: torch.ones_like(v) if k in ("rewards", "logprobs") else v for k, v in batch.items()}
    compute(other)
    assert all(torch.equal(first[k], kept[k]) for k in first)


def test_inputs_that_require_grad_are_read_and_left(run):
    batch = full()
    for key in ("logprobs", "prox_logp", "ref_logp", "values", "rewards"):
        batch[key].requires_grad_()
    out = run(batch, EVERYTHING)
    assert all(not out[name].requires_grad for name in COMPUTED)
    assert all(batch[key].requires_grad and batch[key].grad is None for key in ("logprobs", "values"))


def test_inputs_of_inference_mode_are_read(run):
    with torch.inference_mode():
        batch = full()
    out = run(batch, EVERYTHING)
    assert not any(out[name].is_inference() for name in COMPUTED)


def test_a_call_inside_inference_mode_gives_ordinary_tensors(run):
    with torch.inference_mode():
        out = run(full(), EVERYTHING)
    assert not any(out[name].is_inference() for name in COMPUTED)


def test_inputs_need_not_be_contiguous(run):
    batch = full()
    strided = {
        key: x.repeat_interleave(2, 0)[::2] if x.ndim == 1 else x.t().contiguous().t() for key, x in batch.items()
    }
    got, want = run(strided, EVERYTHING), run(batch, EVERYTHING)
    assert all(torch.equal(got[name], want[name]) and got[name].is_contiguous() for name in COMPUTED)


def test_expanded_inputs_are_read(run):
    batch = rows("pg", "pg") | {
        "logprobs": torch.tensor([[-1.0, -2.0]]).expand(2, 2),
        "rewards": torch.ones(1).expand(2),
    }
    out = run(batch)
    assert out["logprobs"].tolist() == [[-2.0, 0.0]] * 2 and out["rewards"].is_contiguous()


@pytest.mark.parametrize("mix", MIXES)
def test_inputs_stay_bit_identical(run, mix):
    batch, actor = MIXES[mix]
    before = {key: x.clone() for key, x in batch.items() if isinstance(x, torch.Tensor)}
    run(batch, actor)
    assert all(torch.equal(batch[key], x) for key, x in before.items())


# ---- non-finite numbers ----

# (channel, a masked slot, an active one); the row is "pggp.", m = 1 at 0 and 1
SLOTS = {
    "logprobs": ((0, 3), (0, 1)),
    "token_rewards": ((0, 3), (0, 2)),
    "prox_logp": ((0, 2), (0, 1)),
    "ref_logp": ((0, 2), (0, 0)),
    "values": ((0, 2), (0, 1)),
}


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("channel", SLOTS)
def test_a_non_finite_number_in_a_masked_slot_reads_as_zero_everywhere(run, channel, garbage, unit):
    spoilt, clean = full(), full()
    spoilt[channel][SLOTS[channel][0]] = garbage
    clean[channel][SLOTS[channel][0]] = 0.0
    actor = EVERYTHING | {"gae_timestep_unit": unit}
    got, want = run(spoilt, actor), run(clean, actor)
    assert all(torch.equal(got[name], want[name]) for name in COMPUTED)


def test_a_non_finite_value_in_a_masked_slot_is_zero_in_returns(run):
    out = run(rows("pggp", values=[[1.0, 2.0, NAN, INF]]))
    assert out["returns"][0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("channel", SLOTS)
def test_a_non_finite_number_in_an_active_slot_names_field_and_row(run, channel, garbage):
    batch = full()
    batch[channel][SLOTS[channel][1]] = garbage
    error = run.refusal(batch, EVERYTHING)
    assert type(error).__name__ == "NonFinite"
    assert channel in str(error) and "rows [0]" in str(error)


@pytest.mark.parametrize("row", [0, 1])
def test_every_reward_is_active(run, row):
    batch = rows("pg", "pp", rewards=[0.0, 0.0])
    batch["rewards"][row] = NAN
    error = run.refusal(batch)
    assert type(error).__name__ == "NonFinite" and f"rows [{row}]" in str(error)


@pytest.mark.parametrize("actor", [{"mask_no_eos_with_zero": True}, {"reward_clip": 1.0}])
def test_a_reward_is_active_even_where_it_would_be_cleared_or_clipped(run, actor):
    batch = rows("pg", rewards=[INF], is_truncated=[True])
    assert type(run.refusal(batch, actor)).__name__ == "NonFinite"


@pytest.mark.parametrize(("truncated", "refused"), [(True, True), (False, False)])
def test_the_bootstrap_slot_is_active_on_a_truncated_row_alone(run, truncated, refused):
    batch = rows("pggp.", values=[[0.0, 0.0, 0.0, NAN, 0.0]], is_truncated=[truncated])
    if refused:
        assert "values" in str(run.refusal(batch))
    else:
        assert run(batch)["returns"][0, 3] == 0.0


def test_logprobs_are_active_at_the_generated_tokens_own_slot(run):
    # slot 0 is the prompt's: garbage there shows nowhere, though column 0 of the result is active
    out = run(rows("pg", logprobs=[[NAN, -1.0]]))
    assert out["logprobs"].tolist() == [[-1.0, 0.0]]


def test_prox_logp_is_active_where_m_is(run):
    actor = {"recompute_logprob": True}
    assert run(rows("pg", prox_logp=[[-1.0, NAN]]), actor)["prox_logp"].tolist() == [[-1.0, 0.0]]
    assert "prox_logp" in str(run.refusal(rows("pg", prox_logp=[[NAN, -1.0]]), actor))


def test_behaviour_logprobs_are_checked_even_where_prox_logp_is_used(run):
    batch = rows("pg", logprobs=[[0.0, NAN]], prox_logp=[[-1.0, 0.0]])
    assert "logprobs" in str(run.refusal(batch, {"recompute_logprob": True}))


def test_prox_logp_that_is_not_read_is_not_checked(run):
    run(rows("pg", prox_logp=[[NAN, NAN]]))
    run(rows("pg", prox_logp=[[NAN, NAN]]), {"recompute_logprob": True, "use_decoupled_loss": True})


@pytest.mark.parametrize("key", ["attention_mask", "loss_mask", "is_truncated"])
def test_a_non_finite_mask_is_named(run, key):
    batch = rows("pg", "pg")
    mask = batch[key].float()
    mask[1, ...] = NAN
    error = run.refusal(batch | {key: mask})
    assert type(error).__name__ == "BadMask" and key in str(error) and "rows [1]" in str(error)


def test_an_overflow_of_the_result_is_refused(run):
    actor = {"reward_scaling": 1e30, "reward_clip": INF}
    error = run.refusal(rows("pg", "pg", rewards=[0.0, 1e30]), actor)
    assert type(error).__name__ == "NonFinite" and "rows [1]" in str(error)


@pytest.mark.parametrize("estimator", [{}, plugin("estimator", "numbers_its_cells")], ids=["built in", "plugin"])
def test_an_overflow_of_the_kl_is_refused_whoever_estimates(run, estimator):
    batch = rows("pg.", "pg.", logprobs=[[0.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    error = run.refusal(batch, {"kl_ctl": 1e38} | estimator)
    assert type(error).__name__ == "NonFinite" and "rows [1]" in str(error)


@pytest.mark.parametrize("name", ["logprobs", "prox_logp", "ref_logp", "values", "rewards", "token_rewards"])
def test_a_float64_that_float32_cannot_hold_is_not_finite(run, name):
    batch = full(torch.float64)
    batch[name][(0, 1)[: batch[name].ndim]] = 1e300
    error = run.refusal(batch, EVERYTHING)
    assert type(error).__name__ == "NonFinite" and name in str(error) and "rows [0]" in str(error)


# ---- padding ----


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("rules", ["default", "strict"])
def test_wider_padding_changes_nothing_for_a_batch_with_is_truncated(run, unit, rules):
    narrow = full()
    pad = {"turn_ids": -1}
    wide = {
        key: torch.nn.functional.pad(x, (0, 3), value=pad.get(key, 0)) if x.ndim == 2 else x
        for key, x in narrow.items()
    }
    actor = EVERYTHING | {"gae_timestep_unit": unit, "advantage": {"rules": rules}}
    got, want = run(wide, actor), run(narrow, actor)
    for name in COMPUTED:
        cropped = got[name][:, :5] if got[name].ndim == 2 else got[name]
        assert torch.equal(cropped, want[name]), name


def test_wider_padding_moves_the_wrap(run):
    narrow, wide = (run(rows(row))["loss_mask"].tolist() for row in ("gp", "gp."))
    assert (narrow, wide) == ([[0.0, 1.0]], [[0.0, 0.0, 1.0]])


def test_wider_padding_changes_who_is_truncated_where_no_flags_are_given(run):
    narrow, wide = (run(rows(row, is_truncated=None))["is_truncated"].tolist() for row in ("pg", "pg."))
    assert (narrow, wide) == ([True], [False])


# ---- rows are apart ----


def test_rows_do_not_see_each_other_without_statistics(run):
    batch = full()
    actor = {"kl_ctl": 0.5, "gae_lambda": 0.5}
    both = run(batch, actor)
    for b, name in itertools.product(range(2), ("advantages", "returns", "tot_rewards")):
        alone = run({key: x[b : b + 1] for key, x in batch.items()}, actor)
        assert torch.equal(alone[name][0], both[name][b])
