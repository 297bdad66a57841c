"""fuse_reward_norm: score, units, their moments and the normalisation of rewards are one node."""

import pytest
from compiled_adv.passes.fuse_reward_norm import PARTS, fuse_reward_norm
from compiled_adv.passes.share import share
from hypothesis import given

from compiled_adv.stages.fused import Fused
from compiled_adv.stages.reward_norm import RewardNorm, RowGroups, Score
from tests.passes.rewriting import SETTINGS, Ran, assert_same_numbers, assert_settled, of_case, ran, run_on
from tests.random_cases import LEVELS, Case, Template, cases
from tests.unit.wiring import find, kinds, plugin


def norm(mean: str | None, std: str | None, **more: object) -> dict:
    return {"mean_level": mean, "std_level": std, "group_size": 2, **more}


PAIRS = [(mean, std) for mean in LEVELS for std in LEVELS if mean or std]
NORMED = tuple(
    Template(
        {"reward_norm": norm(*pair, mean_leave1out=loo), "mask_no_eos_with_zero": loo, "advantage": {"rules": rules}},
        frozenset({"is_truncated"}),
    )
    for pair in PAIRS
    for loo in (False, True)
    for rules in ("default", "strict")
)


def fused(found: Ran) -> Fused:
    stage = find(found.after, Fused).stage
    assert isinstance(stage, Fused)
    return stage


def inside(found: Ran) -> set[type]:
    """Classes of the stages in the fused node."""
    return {type(step) for step, _ in fused(found).steps}


@pytest.mark.parametrize("mean, std", PAIRS)
def test_fires_at_every_level(mean, std):
    found = run_on({"reward_norm": norm(mean, std)}, fuse_reward_norm)
    assert {Score, RewardNorm} <= inside(found)
    assert not kinds(found.after) & {*PARTS, RewardNorm}


def test_what_others_read_stays_outside():
    """Both norm blocks read the groups of rows."""
    found = run_on({"reward_norm": norm("group", "group"), "adv_norm": norm("group", "group")}, share, fuse_reward_norm)
    assert RowGroups in kinds(found.after) and RowGroups not in inside(found)


def test_moments_of_the_advantages_stay_outside():
    found = run_on({"reward_norm": norm("batch", "batch"), "adv_norm": norm("batch", "batch")}, fuse_reward_norm)
    assert len(fused(found).steps) == 4
    assert [node.name for node in found.after.nodes if node.name.startswith("BatchMoments")] == ["BatchMoments.1"]


@pytest.mark.parametrize("block", [None, norm(None, None)])
def test_holds_back_without_a_normalisation(block):
    found = run_on({"reward_norm": block}, fuse_reward_norm)
    assert found.after == found.before and Score in kinds(found.after)


def test_holds_back_where_ranks_meet_in_between():
    actor = {"reward_norm": norm("batch", "batch"), "adv_norm": norm("batch", "batch")}
    found = run_on(actor, fuse_reward_norm, across_ranks=True)
    assert found.after == found.before and list(found.held.values()) == ["ranks meet in between"]


def test_a_users_outcome_function_stays_outside():
    found = run_on(
        {"reward_norm": norm("group", None), "advantage": plugin("outcome_reward_shaping", "see_outcome")},
        fuse_reward_norm,
    )
    opaque = [node for node in found.after.nodes if node.stage.opaque]
    assert len(opaque) == 1 and not any(step.opaque for step, _ in fused(found).steps)


@SETTINGS
@given(cases(fixed=NORMED))
def test_same_numbers(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, fuse_reward_norm)
    assert found.fired
    assert_same_numbers(found, admitted)


def test_settles():
    assert_settled(run_on({"reward_norm": norm("group", "batch")}, fuse_reward_norm), fuse_reward_norm)
