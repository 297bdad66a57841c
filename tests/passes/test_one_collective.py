"""one_collective: batch moments that do not wait for each other are taken over all ranks at one point."""

import pytest
import torch
from compiled_adv.passes.one_collective import one_collective
from hypothesis import given
from hypothesis import strategies as st

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.program import lower
from compiled_adv.stages.statistics import AcrossRanks
from tests.passes.rewriting import SETTINGS, assert_settled, ran, run_on


def moments(i: int, reads: tuple[str, str, str]) -> Node:
    return Node(f"AcrossRanks.{i}", AcrossRanks((f"block.{i}",)), reads, (f"n.{i}", f"mean.{i}", f"m2.{i}"))


def independent(count: int) -> Pipeline:
    """As many sets of moments, which nothing orders."""
    inputs = [(f"batch_n.{i}", f"batch_mean.{i}", f"batch_m2.{i}") for i in range(count)]
    nodes = tuple(moments(i, reads) for i, reads in enumerate(inputs))
    writes = [version for node in nodes for version in node.writes]
    return Pipeline(nodes, sum(inputs, ()), tuple((version, version) for version in writes))


def collectives(pipeline: Pipeline) -> list[Node]:
    return [node for node in pipeline.nodes if isinstance(node.stage, AcrossRanks)]


class Doubling:
    """A meeting at which everybody else has the same."""

    def merged(self, blocks, own):
        return own * 2


class Call:
    meeting = Doubling()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_fires_on_moments_that_are_due_at_one_point(count):
    found = ran(independent(count), one_collective)
    assert len(collectives(found.before)) == count and len(collectives(found.after)) == 1
    assert len(lower(found.after).segments) == 1


def test_holds_back_from_moments_that_wait_for_others_and_says_so():
    first = moments(0, ("batch_n", "batch_mean", "batch_m2"))
    second = moments(1, ("n.0", "mean.0", "m2.0"))
    pipeline = Pipeline(
        (first, second), ("batch_n", "batch_mean", "batch_m2"), (("n", "n.1"), ("m", "mean.1"), ("s", "m2.1"))
    )
    found = ran(pipeline, one_collective)
    assert found.after == pipeline
    assert found.held["AcrossRanks.1"] == "it waits for AcrossRanks.0"


def test_advantages_wait_for_the_rewards_that_they_are_made_of():
    norm = {"mean_level": "batch", "std_level": "batch"}
    found = run_on({"reward_norm": norm, "adv_norm": norm}, one_collective, across_ranks=True)
    assert [node.name for node in collectives(found.after)] == ["AcrossRanks.reward_norm", "AcrossRanks.adv_norm"]
    assert list(found.held.values()) == ["it waits for AcrossRanks.reward_norm"]


def test_one_set_of_moments_is_nothing_to_say():
    found = run_on({"adv_norm": {"mean_level": "batch"}}, one_collective, across_ranks=True)
    assert found.after == found.before and not found.held


def test_one_process_has_no_collective():
    norm = {"mean_level": "batch", "std_level": "batch"}
    assert not collectives(run_on({"reward_norm": norm, "adv_norm": norm}, one_collective).after)


@SETTINGS
@given(st.integers(2, 4), st.integers(0, 2**31))
def test_same_numbers(count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    found = ran(independent(count), one_collective)
    assert found.fired
    known = {v: torch.rand((), generator=generator, dtype=torch.float64) for v in found.before.inputs}
    results = []
    for pipeline in (found.before, found.after):
        result = {}
        for node in collectives(pipeline):
            assert isinstance(node.stage, AcrossRanks)
            numbers = node.stage.call(Call(), [known[version] for version in node.reads if version is not None])
            result |= dict(zip(node.writes, numbers, strict=True))
        results.append(result)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(x, results[1][version]) for version, x in results[0].items())


def test_settles():
    assert_settled(ran(independent(3), one_collective), one_collective)
