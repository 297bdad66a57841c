"""share: what two equal stages compute from equal channels is computed once."""

import pytest
from compiled_adv.passes.share import share
from hypothesis import given

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.stage import Stage
from compiled_adv.stages.reward_norm import RowGroups
from tests.passes.rewriting import SETTINGS, assert_same_numbers, assert_settled, of_case, ran, run_on
from tests.random_cases import Case, Template, cases
from tests.unit.wiring import DOUBLE, WATCH, Double, Split


def by_groups_of(reward_size: int, adv_size: int) -> dict:
    group = {"mean_level": "group", "std_level": "group"}
    return {"reward_norm": group | {"group_size": reward_size}, "adv_norm": group | {"group_size": adv_size}}


TWICE = (
    Template(by_groups_of(2, 2), frozenset({"values", "is_truncated"})),
    Template(by_groups_of(3, 3) | {"advantage": {"rules": "strict"}}, frozenset({"is_truncated", "ref_logp"})),
)


def row_groups(pipeline: Pipeline) -> list[Node]:
    return [node for node in pipeline.nodes if isinstance(node.stage, RowGroups)]


def test_fires_where_both_norm_blocks_find_the_same_groups():
    found = run_on(by_groups_of(2, 2), share)
    assert len(row_groups(found.before)) == 2 and len(row_groups(found.after)) == 1


def test_the_flag_of_the_first_stands_for_that_of_the_second():
    found = run_on(by_groups_of(2, 2), share)
    assert "flag:rows_outside_groups.1" in found.before.flags
    assert [flag for flag in found.after.flags if "rows_outside" in flag] == ["flag:rows_outside_groups"]


def test_holds_back_from_stages_with_other_numbers():
    found = run_on(by_groups_of(2, 3), share)
    assert len(row_groups(found.after)) == 2


def test_holds_back_from_stages_that_read_other_versions():
    again = Node("Again", Double(), ("b",), ("f",))
    split = Node("Split", Split(), ("f", None), ("d", "e"))
    pipeline = Pipeline((DOUBLE, again, split, WATCH), ("a",), (("d", "d"), ("e", "e")))
    assert ran(pipeline, share).after == pipeline


class Users(Stage):
    """A user's function, which may answer differently each time."""

    opaque = True
    reads = ("a",)
    writes = ("b",)


@pytest.mark.parametrize("stage, left", [(Double(), 1), (Users(), 2)])
def test_holds_back_from_users_functions(stage: Stage, left: int):
    twins = (Node("One", stage, ("a",), ("b",)), Node("Two", stage, ("a",), ("c",)))
    split = Node("Split", Split(), ("b", "c"), ("d", "e"))
    found = ran(Pipeline((*twins, split), ("a",), (("d", "d"), ("e", "e"))), share)
    assert sum(node.stage == stage for node in found.after.nodes) == left


@SETTINGS
@given(cases(fixed=TWICE))
def test_same_numbers(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, share)
    assert found.fired
    assert_same_numbers(found, admitted)


def test_settles():
    assert_settled(run_on(by_groups_of(2, 2), share), share)
