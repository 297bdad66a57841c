"""A user's lambda function: the lengths that it gets in each unit, and what it must return."""

import pytest
import torch

from compiled_adv.errors import PluginRaised, PluginResult, PluginWroteInput
from compiled_adv.gae import vapo_length_adaptive_gae
from tests.contracts.plugins_under_test import WRITES, WRONGS
from tests.contracts.small import near, rows

TURN = {"gae_timestep_unit": "turn"}
IDS = {"turn_ids": [[-1, 0, 0, -1, 2], [-1, 1, -1, -1, -1]]}


def case(**channels):
    """Tokens 3 and 1, turns 2 and 1."""
    return rows("pggpg", "pg...", **({"rewards": [1.0, 1.0]} | channels))


def named(name, **kwargs):
    return {"gae_lambda": f"tests.contracts.plugins_under_test.{name}", "gae_lambda_kwargs": kwargs}


def lengths(context):
    return [context[key].tolist() for key in ("effective_token_lengths", "turn_counts", "timestep_lengths")]


def test_it_gets_token_lengths_in_the_token_unit(run, seen):
    run(case(**IDS), named("see_lambda"))
    assert lengths(seen[-1]) == [[3, 1], [2, 1], [3, 1]]


def test_it_gets_turn_counts_in_the_turn_unit(run, seen):
    run(case(**IDS), named("see_lambda") | TURN)
    assert lengths(seen[-1]) == [[3, 1], [2, 1], [2, 1]]


def test_turn_counts_are_zero_without_turn_ids(run, seen):
    run(case(), named("see_lambda"))
    assert lengths(seen[-1]) == [[3, 1], [0, 0], [3, 1]]


def test_lengths_are_int64_per_row(run, seen):
    run(case(**IDS), named("see_lambda"))
    assert all(x.dtype == torch.int64 and x.shape == (2,) for x in seen[-1].values())


def test_its_result_is_each_rows_lambda(run):
    out = run(case(), named("see_lambda", value=0.25))
    assert out["advantages"][:, 0].tolist() == [0.0625, 1.0]


@pytest.mark.parametrize("wrong", [name for name in WRONGS])
def test_a_wrong_result_is_refused_by_function(run, wrong):
    error = run.refusal(case(), named("wrong_lambda", wrong=wrong))
    assert type(error) is PluginResult and "gae_lambda" in str(error)


@pytest.mark.parametrize("way", WRITES)
def test_a_function_that_writes_to_its_context_is_refused(run, way):
    error = run.refusal(case(), named("write_lambda", way=way))
    assert type(error) is PluginWroteInput and "gae_lambda" in str(error)


def test_a_function_that_replaces_an_entry_of_its_context_is_refused(run):
    assert type(run.refusal(case(), named("write_lambda_context"))) is PluginWroteInput


def test_a_function_that_raises_is_named_with_its_own_error_chained(run):
    error = run.refusal(case(), named("raises"))
    assert type(error) is PluginRaised
    assert "gae_lambda" in str(error) and isinstance(error.__cause__, KeyError)


def test_a_built_in_one_serves_a_context_of_timestep_lengths_alone():
    assert near(vapo_length_adaptive_gae({"timestep_lengths": torch.tensor([4])}, alpha=0.5), [0.5])
