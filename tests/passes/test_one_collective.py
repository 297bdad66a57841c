"""one_collective: batch moments that do not wait for each other are taken at one point."""

import pytest
import torch
from compiled_adv.passes.one_collective import one_collective
from hypothesis import given
from hypothesis import strategies as st

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.program import lower
from compiled_adv.stages.fused import Fused
from compiled_adv.stages.statistics import BatchMoments
from tests.passes.rewriting import SETTINGS, assert_settled, ran, run_on


def moments(i: int, reads: tuple[str, str, str]) -> Node:
    return Node(f"BatchMoments.{i}", BatchMoments(), reads, (f"n.{i}", f"mean.{i}", f"m2.{i}"))


def independent(count: int) -> Pipeline:
    """Moments of as many sets of units, which nothing orders."""
    inputs = [(f"unit_n.{i}", f"unit_mean.{i}", f"unit_m2.{i}") for i in range(count)]
    nodes = tuple(moments(i, reads) for i, reads in enumerate(inputs))
    writes = [version for node in nodes for version in node.writes]
    return Pipeline(nodes, sum(inputs, ()), tuple((version, version) for version in writes))


def meeting_points(pipeline: Pipeline) -> list[Node]:
    """Nodes that take batch moments."""
    steps = [
        (node, node.stage.steps if isinstance(node.stage, Fused) else [(node.stage, ())]) for node in pipeline.nodes
    ]
    return [node for node, inside in steps if any(isinstance(stage, BatchMoments) for stage, _ in inside)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_fires_on_moments_that_are_due_at_one_point(count):
    found = ran(independent(count), one_collective)
    assert len(meeting_points(found.before)) == count and len(meeting_points(found.after)) == 1


def test_holds_back_from_moments_that_wait_for_others_and_says_so():
    first = moments(0, ("unit_n", "unit_mean", "unit_m2"))
    second = moments(1, ("n.0", "mean.0", "m2.0"))
    pipeline = Pipeline(
        (first, second), ("unit_n", "unit_mean", "unit_m2"), (("n", "n.1"), ("m", "mean.1"), ("s", "m2.1"))
    )
    found = ran(pipeline, one_collective)
    assert found.after == pipeline
    assert found.held["BatchMoments.1"] == "it waits for BatchMoments.0"


def test_advantages_wait_for_the_rewards_that_they_are_made_of():
    norm = {"mean_level": "batch", "std_level": "batch"}
    found = run_on({"reward_norm": norm, "adv_norm": norm}, one_collective)
    assert len(meeting_points(found.after)) == 2
    assert list(found.held.values()) == ["it waits for BatchMoments"]


def test_one_set_of_moments_is_nothing_to_say():
    found = run_on({"adv_norm": {"mean_level": "batch"}}, one_collective)
    assert found.after == found.before and not found.held


@SETTINGS
@given(st.integers(2, 4), st.integers(1, 5), st.integers(0, 2**31))
def test_same_numbers(count: int, units: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    found = ran(independent(count), one_collective)
    assert found.fired
    given_U = {v: torch.rand(units, generator=generator, dtype=torch.float64) for v in found.before.inputs}
    results = []
    for pipeline in (found.before, found.after):
        (segment,) = lower(pipeline).segments
        *numbers, _ = segment.module(*(given_U[version] for version in segment.inputs))
        results.append(dict(zip(segment.outputs, numbers, strict=True)))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(x, results[1][version]) for version, x in results[0].items())


def test_settles():
    assert_settled(ran(independent(3), one_collective), one_collective)
