"""broadcast_outcome: where every advantage up to the outcome is the outcome, there is no recurrence."""

import pytest
from compiled_adv.passes.broadcast_outcome import broadcast_outcome
from compiled_adv.passes.drop_idle import drop_idle
from hypothesis import given

from compiled_adv.stages.estimator import OutcomeEverywhere, TokenGAE
from tests.passes.rewriting import SETTINGS, Ran, assert_same_numbers, assert_settled, of_case, ran, run_on
from tests.random_cases import Case, Template, cases
from tests.unit.wiring import a_batch, kinds, plugin

# drop_idle takes the KL away first.
PASSES = (drop_idle, broadcast_outcome)
GRPO = {"kl_ctl": 0.0}
NORM = {"mean_level": "group", "std_level": "group", "group_size": 2}
PLAIN = (
    Template(GRPO, frozenset({"is_truncated"})),
    Template(GRPO | {"reward_norm": NORM}, frozenset({"token_rewards"}), "gvpo"),
    Template(GRPO | {"mask_no_eos_with_zero": True}, frozenset({"is_truncated"})),
    Template(
        GRPO
        | {"mask_no_eos_with_zero": True, "advantage": {"rules": "strict"}, "adv_norm": NORM | {"mean_level": "batch"}},
        frozenset({"is_truncated", "ref_logp"}),
    ),
)


def without_critic(**actor: object) -> Ran:
    return run_on(GRPO | actor, *PASSES, batch=a_batch("values"))


def test_fires_without_critic_kl_and_folded_rewards_at_discount_and_lambda_one():
    found = without_critic(reward_norm=NORM)
    assert kinds(found.before) & {TokenGAE, OutcomeEverywhere} == {TokenGAE}
    assert kinds(found.after) & {TokenGAE, OutcomeEverywhere} == {OutcomeEverywhere}


@pytest.mark.parametrize(
    "actor, without, why",
    [
        ({"kl_ctl": 0.1}, ("values",), "KL is in the recurrence"),
        (GRPO, (), "a critic is in the recurrence"),
        (GRPO | {"token_rewards_as_adv": False}, ("values",), "folded process rewards are in the recurrence"),
        (GRPO | {"discount": 0.99}, ("values",), "discount is 0.99, not 1"),
        (GRPO | {"gae_lambda": 0.95}, ("values",), "lambda is ConstantLambda(value=0.95), not 1"),
    ],
)
def test_holds_back_and_says_why(actor, without, why):
    found = run_on(actor, *PASSES, batch=a_batch(*without))
    assert TokenGAE in kinds(found.after)
    assert list(found.held.values()) == [why]


def test_holds_back_from_a_lambda_function():
    found = without_critic(gae_lambda="compiled_adv.gae.vapo_length_adaptive_gae", gae_lambda_kwargs={"alpha": 0.5})
    assert TokenGAE in kinds(found.after)
    (why,) = found.held.values()
    assert why.startswith("lambda is LambdaByLength") and why.endswith("not 1")


@pytest.mark.parametrize("other", [{"gae_timestep_unit": "turn"}, {"advantage": plugin("estimator", "see_estimator")}])
def test_holds_back_from_other_estimators(other):
    found = without_critic(**other)
    assert OutcomeEverywhere not in kinds(found.after)


@SETTINGS
@given(cases(fixed=PLAIN))
def test_same_numbers(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, *PASSES)
    assert_same_numbers(found, admitted)
    assert OutcomeEverywhere in kinds(found.after)


def test_settles():
    assert_settled(without_critic(), *PASSES)
