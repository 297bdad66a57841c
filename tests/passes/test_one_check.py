"""one_check: the checks of a batch are read in one pass; that one failed is known, which one the eager path says."""

import random
from typing import Any

import networkx as nx
import pytest
import torch
from compiled_adv.passes.broadcast_outcome import broadcast_outcome
from compiled_adv.passes.drop_idle import drop_idle
from compiled_adv.passes.one_check import one_check
from hypothesis import given
from hypothesis import strategies as st

from compiled_adv.pipeline import Pipeline
from compiled_adv.rewrite import readers
from compiled_adv.stages.checks import Check, FiniteLogprobs, FiniteResult, OneCheck
from tests.passes.rewriting import SETTINGS, assert_same_numbers, assert_settled, numbers, of_case, ran, run_on
from tests.random_cases import FIXED, Case, cases
from tests.unit.wiring import EVERYTHING, a_batch, kinds, plugin, wired

TURNS = EVERYTHING | {"advantage": {"estimator": {"implementation": "turn_gae"}}}
GRPO: dict[str, Any] = {"kl_ctl": 0.0, "discount": 1.0, "gae_lambda": 1.0}
BAD = (float("nan"), float("inf"), -float("inf"), -7.0, 1e38)


def checks(pipeline: Pipeline) -> list[str]:
    return [node.name for node in pipeline.nodes if isinstance(node.stage, (Check, OneCheck))]


def test_fires_on_checks_that_can_be_read_together():
    found = run_on(EVERYTHING, one_check)
    assert len(checks(found.before)) > 4
    assert len(checks(found.after)) == 2 and not any(isinstance(node.stage, Check) for node in found.after.nodes)


def test_every_check_is_in_one_of_the_lots():
    found = run_on(EVERYTHING, one_check)
    lots = [node.stage for node in found.after.nodes if isinstance(node.stage, OneCheck)]
    inside = [type(check) for lot in lots for check, _ in lot.checks]
    assert sorted(map(str, inside)) == sorted(str(k) for k in kinds(found.before) if issubclass(k, Check))


def test_the_result_is_checked_in_the_late_lot():
    late = [node for node in run_on(EVERYTHING, one_check).after.nodes if node.flags == ("flag:invalid.late",)]
    assert FiniteResult in [type(check) for check, _ in late[0].stage.checks]


def test_the_recurrence_waits_for_the_early_lot():
    found = run_on(EVERYTHING, one_check)
    (early,) = [node for node in found.after.nodes if node.flags == ("flag:invalid",)]
    assert readers(found.after, early.writes[0])
    assert "gae_lambda" in early.reads[-1]


def test_turn_gae_waits_for_no_check():
    found = run_on(TURNS, one_check)
    (early,) = [node for node in found.after.nodes if isinstance(node.stage, OneCheck)]
    assert early.writes == () and early.flags == ("flag:invalid",)


def test_turn_gae_leaves_the_result_a_check_of_its_own():
    assert [k for k in kinds(run_on(TURNS, one_check).after) if issubclass(k, Check)] == [FiniteResult]


def test_where_the_outcome_is_the_advantage_all_checks_are_one_lot():
    found = run_on(GRPO, drop_idle, broadcast_outcome, one_check, batch=a_batch("values", "token_rewards"))
    (lot,) = [node for node in found.after.nodes if isinstance(node.stage, (Check, OneCheck))]
    assert {FiniteLogprobs, FiniteResult} <= {type(check) for check, _ in lot.stage.checks}


@pytest.mark.parametrize(
    ("slot", "name"),
    [("outcome_reward_shaping", "see_outcome"), ("estimator", "see_estimator"), ("process_adv_shaping", "see_process")],
)
def test_before_a_users_function_every_check_has_run_that_can(slot, name):
    found = run_on(EVERYTHING | {"advantage": plugin(slot, name)}, one_check)
    (early,) = [node for node in found.after.nodes if isinstance(node.stage, OneCheck)]
    graph, (users,) = found.after.graph, [node.name for node in found.after.nodes if node.stage.opaque]
    assert early.flags == ("flag:invalid",)
    assert {k for k in kinds(found.after) if issubclass(k, Check)} == {FiniteResult}
    assert early.name not in nx.descendants(graph, users)


def test_holds_back_from_a_check_that_is_alone():
    pipeline, _ = wired({}, a_batch())
    alone = next(node for node in pipeline.nodes if isinstance(node.stage, Check))
    others = tuple(node for node in pipeline.nodes if node is alone or not isinstance(node.stage, Check))
    single = Pipeline(others, pipeline.inputs, pipeline.outputs)
    assert ran(single, one_check).after == single


@SETTINGS
@given(cases())
def test_same_numbers(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, one_check)
    assert found.fired
    assert_same_numbers(found, admitted)


@SETTINGS
@given(cases(fixed=FIXED), st.data())
def test_a_broken_batch_is_refused_by_both(case: Case, data: st.DataObject):
    """Whatever the checks one by one refuse, the one check refuses, and nothing else."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    keys = [key for key, x in case.batch.items() if x.ndim == 2 and key not in ("input_ids", "attention_mask")]
    key = data.draw(st.sampled_from(keys))
    x_BT = case.batch[key].clone()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(x_BT.shape[0]), rng.randrange(x_BT.shape[1])
        x_BT[at] = rng.choice(BAD) if x_BT.is_floating_point() else rng.choice([1, -7, 0])
    pipeline, admitted = of_case(case.with_batch(case.batch | {key: x_BT}))
    assert_same_numbers(ran(pipeline, one_check), admitted)


def test_broken_batches_are_drawn():
    """The property above would be empty if nothing it draws were refused."""
    pipeline, admitted = wired(EVERYTHING)
    admitted.channels["values"] = admitted.channels["values"].masked_fill(torch.ones(4, 6, dtype=torch.bool), torch.nan)
    found = ran(pipeline, one_check)
    assert numbers(found.before, admitted) is None and numbers(found.after, admitted) is None


def test_settles():
    assert_settled(run_on(EVERYTHING, one_check), one_check)
