"""fuse_advantages: normalising advantages and shaping them by process rewards is one node."""

from dataclasses import replace

import pytest
from compiled_adv.passes.fuse_advantages import fuse_advantages
from hypothesis import given

from compiled_adv.pipeline import Node
from compiled_adv.stages.adv_norm import AdvNorm
from compiled_adv.stages.checks import WeightRange
from compiled_adv.stages.fused import Fused
from compiled_adv.stages.process_adv_shaping import GVPO, Additive, ProcessWeighted
from tests.passes.rewriting import SETTINGS, assert_same_numbers, assert_settled, of_case, ran, run_on
from tests.random_cases import EPS, Case, Template, cases
from tests.unit.wiring import a_batch, find, kinds, plugin, wired

NORM = {"mean_level": "batch", "std_level": "batch", "eps": EPS}
SHAPINGS = {"additive": Additive, "gvpo": GVPO, "process_weighted": ProcessWeighted}
SHAPED = tuple(
    Template({"adv_norm": NORM | {"mean_level": mean}}, frozenset({"token_rewards", "values"}), mode)
    for mode in SHAPINGS
    for mean in ("batch", "group", None)
)


@pytest.mark.parametrize("mode, shaping", SHAPINGS.items())
def test_fires_where_shaping_follows_normalisation(mode, shaping):
    found = run_on({"adv_norm": NORM}, fuse_advantages, mode=mode)
    assert {AdvNorm, shaping} <= kinds(found.before)
    assert not {AdvNorm, shaping} & kinds(found.after)
    stage = find(found.after, Fused).stage
    assert [type(step) for step, _ in stage.steps] == [AdvNorm, shaping]


def test_the_normalised_advantages_are_never_written():
    found = run_on({"adv_norm": NORM}, fuse_advantages)
    between = find(found.before, AdvNorm).writes[0]
    assert between not in {version for node in found.after.nodes for version in node.produced}


def test_holds_back_where_something_else_reads_the_normalised_advantages():
    pipeline, _ = wired({"adv_norm": NORM})
    between = find(pipeline, AdvNorm).writes[0]
    watch = Node("Watch", WeightRange(), (between,), (), ("flag:watched",))
    found = ran(replace(pipeline, nodes=(*pipeline.nodes, watch)).in_order(), fuse_advantages)
    assert found.after == found.before
    assert list(found.held.values()) == ["Watch reads the normalised advantages too"]


@pytest.mark.parametrize(
    "actor, batch",
    [
        ({"adv_norm": NORM}, a_batch("token_rewards")),
        ({}, a_batch()),
        ({"adv_norm": NORM, "advantage": plugin("process_adv_shaping", "see_process")}, a_batch()),
    ],
    ids=["no process rewards", "no normalisation", "a user's function"],
)
def test_holds_back_without_both(actor, batch):
    found = run_on(actor, fuse_advantages, batch=batch)
    assert found.after == found.before and not found.held


@SETTINGS
@given(cases(fixed=SHAPED))
def test_same_numbers(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, fuse_advantages)
    assert found.fired
    assert_same_numbers(found, admitted)


def test_settles():
    assert_settled(run_on({"adv_norm": NORM}, fuse_advantages), fuse_advantages)
