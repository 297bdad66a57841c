"""Custom process functions: normalised advantages in, advantages out, always run, returns out of reach."""

import pytest
import torch

from compiled_adv.errors import PluginRaised, PluginResult, PluginWroteInput
from tests.contracts.plugins_under_test import WRITES, WRONGS
from tests.contracts.small import near, plugin, rows

SLOT = "process_adv_shaping"
SEE = plugin(SLOT, "see_process")
TOKEN_REWARDS = [[9.0, 0.25, -0.5, 9.0, 9.0]] * 2


def case(**channels):
    """m is 1 at 0, 1 and at 0, 2."""
    return rows("pggp.", "pgpg.", **({"rewards": [1.0, 3.0]} | channels))


# ---- inputs ----


def test_advantages_are_normalised(run, seen):
    # token GAE: row 0 lost its outcome (0, 0), row 1 has 3 and 3: mean 1.5
    run(case(), SEE | {"adv_norm": {"std_level": None}})
    assert seen[-1].advantages.tolist() == [[-1.5, -1.5, 0.0, 0.0, 0.0], [1.5, 0.0, 1.5, 0.0, 0.0]]


def test_advantages_of_inactive_slots_are_given_as_they_are(run, seen):
    run(case(), SEE)
    assert seen[-1].advantages[1].tolist() == [3.0, 3.0, 3.0, 0.0, 0.0]


def test_token_rewards_are_aligned_and_masked(run, seen):
    run(case(token_rewards=TOKEN_REWARDS), SEE)
    assert seen[-1].token_rewards.tolist() == [[0.25, -0.5, 0.0, 0.0, 0.0], [0.25, 0.0, 9.0, 0.0, 0.0]]


def test_token_rewards_are_none_without_any(run, seen):
    run(case(), SEE)
    assert seen[-1].token_rewards is None


def test_token_rewards_are_none_where_they_are_folded(run, seen):
    run(case(token_rewards=[[0.0, 0.5, 0.5, 0.5, 0.0]] * 2), SEE | {"token_rewards_as_adv": False})
    assert seen[-1].token_rewards is None


def test_token_rewards_are_zero_on_cleared_rows(run, seen):
    batch = case(token_rewards=TOKEN_REWARDS, is_truncated=[True, False])
    run(batch, SEE | {"mask_no_eos_with_zero": True})
    assert seen[-1].token_rewards[0].tolist() == [0.0] * 5


def test_loss_mask_and_config_are_given(run, seen):
    compute = run.build(SEE)
    compute(case())
    assert seen[-1].loss_mask.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0, 0.0]]
    assert seen[-1].config is compute.spec


@pytest.mark.parametrize("mode", ["additive", "gvpo", "process_weighted"])
def test_it_runs_instead_of_the_calls_mode(run, seen, mode):
    # rewards out of process_weighted's range are the function's own business
    out = run(case(token_rewards=TOKEN_REWARDS), SEE, advantage_shaping_mode=mode)
    assert len(seen) == 1 and torch.equal(out["advantages"], seen[0].advantages)


# ---- results ----


def test_a_constant_function_without_token_rewards_changes_the_output(run):
    plain, shaped = run(case()), run(case(), plugin(SLOT, "constant", value=-1.0))
    assert not torch.equal(plain["advantages"], shaped["advantages"])
    assert shaped["advantages"].tolist() == [[-1.0] * 5] * 2


def test_its_result_is_taken_as_it_is_inactive_slots_included(run):
    assert run(case(), plugin(SLOT, "constant", value=7.0) | {"adv_norm": {}})["advantages"].tolist() == [[7.0] * 5] * 2


def test_returns_are_out_of_its_reach(run):
    out = run(case(), plugin(SLOT, "constant", value=7.0))
    assert torch.equal(out["returns"], run(case())["returns"])


def test_its_warning_of_flipped_signs_is_no_concern_of_ours(run):
    run(case(token_rewards=[[0.0, 0.5, 0.5, 0.5, 0.0]] * 2, rewards=[-1.0, -1.0]), plugin(SLOT, "constant", value=1.0))
    assert "weighted_flip" not in run.warnings


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_wrong_result_is_refused_by_function(run, wrong):
    error = run.refusal(case(), plugin(SLOT, "wrong_process", wrong=wrong))
    assert type(error) is PluginResult and "wrong_process" in str(error)


@pytest.mark.parametrize("column", [0, 4])
def test_its_result_must_be_finite_everywhere(run, column):
    error = run.refusal(case(), plugin(SLOT, "process_bad_cell", column=column))
    assert type(error) is PluginResult and "rows [0]" in str(error)


# ---- writing, raising, kwargs ----


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("field", ["advantages", "token_rewards", "loss_mask"])
def test_a_function_that_writes_to_its_inputs_is_named_and_the_batch_stays(run, field, way):
    batch = case(token_rewards=TOKEN_REWARDS)
    before = {key: x.clone() for key, x in batch.items()}
    error = run.refusal(batch, plugin(SLOT, "write_process", way=way, field=field))
    assert type(error) is PluginWroteInput
    assert f"'{field}'" in str(error) and "write_process" in str(error)
    assert all(torch.equal(batch[key], x) for key, x in before.items())


def test_a_function_that_raises_is_named_with_its_own_error_chained(run):
    error = run.refusal(case(), plugin(SLOT, "raises"))
    assert type(error) is PluginRaised
    assert "plugins_under_test.raises" in str(error) and isinstance(error.__cause__, KeyError)


def test_kwargs_are_the_same_in_every_call_whatever_the_function_does_to_them(run):
    compute = run.build(plugin(SLOT, "empties_its_list", steps=[1.0, 10.0]))
    first, second = (compute(rows("pg"))["advantages"][0, 0].item() for _ in range(2))
    assert (first, second) == (1.0, 1.0)
    assert compute.spec.advantage.process_adv_shaping.kwargs == {"steps": [1.0, 10.0]}


def test_a_function_is_resolved_once_per_build(run, monkeypatch):
    from tests.contracts import plugins_under_test

    compute = run.build(plugin(SLOT, "constant", value=1.0))
    monkeypatch.setattr(plugins_under_test, "constant", lambda inputs, *, value: inputs.advantages * 0)
    assert compute(rows("pg"))["advantages"].tolist() == [[1.0, 1.0]]


def test_two_builds_do_not_share_kwargs(run):
    one, two = (run.build(plugin(SLOT, "constant", value=value)) for value in (1.0, 2.0))
    assert [compute(rows("pg"))["advantages"][0, 0].item() for compute in (one, two)] == [1.0, 2.0]


def test_what_the_caller_does_to_kwargs_after_build_changes_nothing(run):
    actor = plugin(SLOT, "empties_its_list", steps=[1.0])
    compute = run.build(actor)
    actor["advantage"][SLOT]["kwargs"]["steps"][0] = 5.0
    assert near(compute(rows("pg"))["advantages"][:, 0], [1.0])
