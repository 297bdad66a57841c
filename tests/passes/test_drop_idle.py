"""drop_idle: a KL penalty of 0 and a norm block without levels leave the graph."""

import pytest
from compiled_adv.passes.drop_idle import drop_idle
from hypothesis import given

from compiled_adv.rewrite import readers
from compiled_adv.stages.adv_norm import ActiveAdvantages, AdvantageMoments, AdvantageScale, AdvNorm
from compiled_adv.stages.kl_rewards import KLInAdvantage, KLRewards, NoKLRewards
from tests.passes.rewriting import SETTINGS, assert_same_numbers, assert_settled, of_case, ran, run_on
from tests.random_cases import Case, Template, cases
from tests.unit.wiring import kinds, plugin

NO_LEVELS = {"mean_level": None, "std_level": None}
IDLE = (
    Template({"kl_ctl": 0.0}, frozenset({"ref_logp", "values"})),
    Template({"kl_ctl": 0.0, "gae_timestep_unit": "turn", "adv_norm": NO_LEVELS}, frozenset({"turn_ids", "values"})),
    Template({"adv_norm": NO_LEVELS}, frozenset({"ref_logp", "is_truncated"})),
    Template({"adv_norm": NO_LEVELS, "kl_ctl": 0.0, "advantage": {"rules": "strict"}}, frozenset({"is_truncated"})),
)


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_fires_where_the_penalty_is_zero(unit):
    found = run_on({"kl_ctl": 0.0, "gae_timestep_unit": unit}, drop_idle)
    assert KLRewards in kinds(found.before) and KLInAdvantage in kinds(found.before)
    assert kinds(found.after) & {KLRewards, KLInAdvantage, NoKLRewards} == {NoKLRewards}
    assert readers(found.before, "kl") and not readers(found.after, "kl")


def test_fires_on_a_norm_block_without_levels():
    found = run_on({"adv_norm": NO_LEVELS}, drop_idle)
    assert {AdvantageMoments, AdvantageScale, AdvNorm} <= kinds(found.before)
    assert kinds(found.after) & {AdvantageMoments, AdvantageScale, AdvNorm, ActiveAdvantages} == {ActiveAdvantages}


def test_holds_back_from_a_penalty():
    found = run_on({"kl_ctl": 0.1}, drop_idle)
    assert found.after == found.before


@pytest.mark.parametrize("level", ["mean_level", "std_level"])
def test_holds_back_from_a_norm_block_with_a_level(level):
    found = run_on({"adv_norm": NO_LEVELS | {level: "batch"}}, drop_idle)
    assert found.after == found.before


def test_holds_back_where_a_users_estimator_reads_the_penalty():
    found = run_on({"kl_ctl": 0.0, "advantage": plugin("estimator", "see_estimator")}, drop_idle)
    assert KLInAdvantage in kinds(found.after)
    assert list(found.held.values()) == ["a user's estimator is owed its kl_rewards"]


@SETTINGS
@given(cases(fixed=IDLE))
def test_same_numbers(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, drop_idle)
    assert found.fired
    assert_same_numbers(found, admitted)


def test_settles():
    assert_settled(run_on({"kl_ctl": 0.0, "adv_norm": NO_LEVELS}, drop_idle), drop_idle)
