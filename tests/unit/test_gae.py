"""GAE lambdas: the built-in functions, the lengths they see, and what any lambda function may return."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_adv import gae
from compiled_adv.advantage_algorithms import TemporalInputs
from compiled_adv.errors import InvalidValue, MissingKey, PluginRaised, PluginResult, PluginWroteInput, UnknownName
from compiled_adv.gae import (
    GAELambdaContext,
    GAELambdaInputs,
    call_lambda,
    compute_gae_lambda,
    constant_gae_lambda,
    lambda_context,
    relative_position_gae_lambda,
    vapo_length_adaptive_gae,
)
from compiled_adv.spec import load_config

LENGTHS = st.lists(st.integers(0, 200_000), min_size=1, max_size=20)


def steps(*lengths: int) -> GAELambdaContext:
    return {"timestep_lengths": torch.tensor(lengths)}  # type: ignore[typeddict-item]


def context(*lengths: int) -> GAELambdaContext:
    lengths_B = torch.tensor(lengths)
    return GAELambdaContext(
        effective_token_lengths=lengths_B, turn_counts=lengths_B.clone(), timestep_lengths=lengths_B.clone()
    )


# ---- the built-in functions ----


def test_vapo_reads_the_timestep_lengths_alone():
    result = vapo_length_adaptive_gae({"timestep_lengths": torch.tensor([4])}, alpha=0.5)
    assert result.tolist() == [0.5]


def test_vapo_is_clamped_at_zero_and_zero_on_an_empty_row():
    # Known fault BR-014: 1 - 1/(0.5*4), 1 - 1/0.5 clamped, an empty row.
    assert vapo_length_adaptive_gae(steps(4, 1, 0), alpha=0.5).tolist() == [0.5, 0.0, 0.0]


@given(LENGTHS, st.floats(1e-3, 10))
@settings(deadline=None, max_examples=50)
def test_vapo_follows_its_formula(lengths, alpha):
    expected = [max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in lengths]
    assert vapo_length_adaptive_gae(steps(*lengths), alpha=alpha).tolist() == pytest.approx(expected, abs=1e-7)


@given(LENGTHS, st.floats(1e-3, 1))
@settings(deadline=None, max_examples=50)
def test_relative_position_follows_its_formula(lengths, q):
    expected = [q ** (1 / (n - 1)) if n > 1 else float(n) for n in lengths]
    assert relative_position_gae_lambda(steps(*lengths), q=q).tolist() == pytest.approx(expected, abs=1e-7)


def test_relative_position_is_one_on_a_single_step_and_zero_on_an_empty_row():
    assert relative_position_gae_lambda(steps(1, 0), q=0.25).tolist() == [1.0, 0.0]


def test_a_constant_is_the_same_for_every_row():
    assert constant_gae_lambda(steps(3, 0, 7), value=0.75).tolist() == [0.75] * 3


@pytest.mark.parametrize(
    "fn, kwargs",
    [
        (constant_gae_lambda, {"value": 0.5}),
        (vapo_length_adaptive_gae, {"alpha": 0.5}),
        (relative_position_gae_lambda, {"q": 0.5}),
    ],
)
def test_a_built_in_gives_float32_per_row(fn, kwargs):
    result = fn(steps(3, 4), **kwargs)
    assert (result.dtype, result.shape) == (torch.float32, (2,))


@pytest.mark.parametrize("alpha", [0, -1, True, math.nan, "1", None])
def test_alpha_is_a_number_above_zero(alpha):
    with pytest.raises(InvalidValue, match="alpha"):
        vapo_length_adaptive_gae(steps(4), alpha=alpha)


@pytest.mark.parametrize("q", [0, -0.5, 1.5, True, math.nan, "1", None])
def test_q_lies_above_zero_and_not_above_one(q):
    with pytest.raises(InvalidValue, match="q"):
        relative_position_gae_lambda(steps(4), q=q)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, "1", None])
def test_a_constant_is_a_finite_number(value):
    with pytest.raises(InvalidValue, match="value"):
        constant_gae_lambda(steps(4), value=value)


@pytest.mark.parametrize("value", [-0.5, 0, 1, 1.5])
def test_a_constant_may_have_any_range(value):
    assert constant_gae_lambda(steps(4), value=value).tolist() == [value]


def test_the_two_names_of_the_context_are_one_type():
    assert GAELambdaInputs is GAELambdaContext


# ---- the lengths ----

MASK = torch.tensor([[0.0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
IDS = torch.tensor([[5, 0, 0, 5, 2, 2], [9, 9, 9, 9, 9, 9], [0, 1, 1, 3, 3, 5]])


def test_token_lengths_count_active_tokens():
    found = lambda_context(MASK, IDS, "token")
    assert found["effective_token_lengths"].tolist() == found["timestep_lengths"].tolist() == [4, 0, 6]


def test_turn_counts_count_distinct_ids_of_active_tokens():
    found = lambda_context(MASK, IDS, "turn")
    assert found["turn_counts"].tolist() == found["timestep_lengths"].tolist() == [2, 0, 4]


def test_both_lengths_are_there_in_either_unit():
    by_token, by_turn = lambda_context(MASK, IDS, "token"), lambda_context(MASK, IDS, "turn")
    for name in ("effective_token_lengths", "turn_counts"):
        assert torch.equal(by_token[name], by_turn[name])  # type: ignore[literal-required]


def test_turn_counts_are_zero_without_turn_ids():
    assert lambda_context(MASK, None, "token")["turn_counts"].tolist() == [0, 0, 0]


def test_the_turn_unit_without_turn_ids_is_refused():
    with pytest.raises(MissingKey, match="turn_ids"):
        lambda_context(MASK, None, "turn")


def test_lengths_are_int64_whatever_the_mask_and_the_ids_are():
    found = lambda_context(MASK.bool(), IDS.to(torch.int16), "turn")
    assert {x.dtype for x in found.values()} == {torch.int64}  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 5)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=100)
def test_turn_counts_take_ids_in_any_order(slots):
    mask_BT = torch.tensor([[float(active) for active, _ in slots]])
    ids_BT = torch.tensor([[i for _, i in slots]])
    expected = len({i for active, i in slots if active})
    assert lambda_context(mask_BT, ids_BT, "turn")["turn_counts"].tolist() == [expected]


# ---- calling a lambda function ----


def call(fn, **kwargs):
    return call_lambda(fn, kwargs, context(4, 1), at="actor.gae_lambda = my.f")


def test_a_lambda_functions_result_comes_back_as_float32():
    result = call(lambda c, *, slope: c["timestep_lengths"].double() * slope, slope=0.5)
    assert (result.dtype, result.tolist()) == (torch.float32, [2.0, 0.5])


def test_a_lambda_functions_result_carries_no_gradient():
    weight = torch.tensor(0.5, requires_grad=True)
    assert not call(lambda c: weight.expand(2)).requires_grad


@pytest.mark.parametrize("result", [0.5, [0.5, 0.5], None])
def test_a_result_that_is_no_tensor_is_refused_with_the_path(result):
    with pytest.raises(PluginResult, match=r"at    actor.gae_lambda = my.f"):
        call(lambda c: result)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_a_result_of_another_shape_is_refused_with_the_path(shape):
    with pytest.raises(PluginResult, match="actor.gae_lambda = my.f"):
        call(lambda c: torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_result_that_is_not_floating_point_is_refused_with_the_path(dtype):
    with pytest.raises(PluginResult, match="actor.gae_lambda = my.f"):
        call(lambda c: torch.zeros(2, dtype=dtype))


def test_a_result_on_another_device_is_refused_with_the_path():
    with pytest.raises(PluginResult, match="actor.gae_lambda = my.f"):
        call(lambda c: torch.zeros(2, device="meta"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_result_that_is_not_finite_is_refused_with_the_path_and_the_rows(bad):
    with pytest.raises(PluginResult, match=r"actor.gae_lambda = my.f\n  found .* in rows \[1\]"):
        call(lambda c: torch.tensor([0.5, bad], dtype=torch.float64))


def test_an_error_of_the_function_is_reported_with_the_path_and_chained():
    def fails(context):
        raise RuntimeError("mine")

    with pytest.raises(PluginRaised, match="actor.gae_lambda = my.f") as caught:
        call(fails)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_function_that_writes_to_its_context_is_named():
    def writes(context):
        return context["turn_counts"].mul_(2).float()

    with pytest.raises(PluginWroteInput, match="actor.gae_lambda = my.f"):
        call(writes)


def test_a_function_that_replaces_an_entry_of_its_context_is_named():
    def replaces(context):
        context["turn_counts"] = torch.zeros(2)
        return torch.zeros(2)

    with pytest.raises(PluginWroteInput, match="actor.gae_lambda = my.f"):
        call(replaces)


def test_a_function_cannot_change_its_configured_kwargs():
    kwargs = {"table": [0.5]}

    def appends(context, *, table):
        table.append(1.0)
        return torch.zeros(2)

    call_lambda(appends, kwargs, context(4, 1), at="here")
    assert kwargs == {"table": [0.5]}


# ---- for a custom estimator ----


def temporal(config, turn_ids=IDS) -> TemporalInputs:
    zeros = torch.zeros(MASK.shape)
    flags = torch.zeros(3, dtype=torch.bool)
    return TemporalInputs(zeros, zeros, zeros, zeros, torch.zeros(3), flags, MASK, turn_ids, 1.0, config)


VAPO = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 0.5}}


@pytest.mark.parametrize("unit, lengths", [("token", (4, 0, 6)), ("turn", (2, 0, 4))])
@pytest.mark.parametrize("config", [load_config(VAPO), SimpleNamespace(**VAPO)])
def test_a_custom_estimator_gets_a_lambda_per_row_in_its_own_unit(unit, lengths, config):
    expected = vapo_length_adaptive_gae(steps(*lengths), alpha=0.5)
    assert torch.equal(compute_gae_lambda(temporal(config), unit), expected)


def test_a_custom_estimators_unit_wins_over_the_configured_one():
    config = load_config(VAPO | {"gae_timestep_unit": "turn"})
    expected = vapo_length_adaptive_gae(steps(4, 0, 6), alpha=0.5)
    assert torch.equal(compute_gae_lambda(temporal(config), "token"), expected)


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_a_custom_estimator_gets_a_configured_number_as_it_is(unit):
    assert compute_gae_lambda(temporal(load_config({"gae_lambda": 0.95}), turn_ids=None), unit) == 0.95


def test_a_trainers_object_without_a_lambda_means_the_default():
    assert compute_gae_lambda(temporal(SimpleNamespace()), "token") == 1.0


def test_a_custom_estimator_asking_for_turns_without_turn_ids_is_refused():
    with pytest.raises(MissingKey, match="turn_ids"):
        compute_gae_lambda(temporal(load_config(VAPO), turn_ids=None), "turn")


@pytest.mark.parametrize("config", [load_config(VAPO), load_config({})])
def test_an_unknown_unit_is_refused(config):
    with pytest.raises(UnknownName, match="token, turn"):
        compute_gae_lambda(temporal(config), "sentence")


def test_the_built_in_lambdas_are_the_three_public_ones():
    assert {fn.__name__ for fn in gae.BUILT_IN_LAMBDAS} == {
        "constant_gae_lambda",
        "relative_position_gae_lambda",
        "vapo_length_adaptive_gae",
    }
