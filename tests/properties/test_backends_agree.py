"""Every backend against the plain loops: eager over the whole configuration space, compiled over twelve of it."""

import warnings

import torch
from hypothesis import HealthCheck, given, settings

import compiled_adv
from tests.compiled import shared
from tests.random_cases import FIXED, Case, cases

SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
TOLERANCE = 1e-5


def outcome_of(case: Case, backend: str):
    """(outputs, warnings), or the class of the error."""
    config = case.on(backend)
    compute = shared.built(config) if backend == "compiled" else compiled_adv.build(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        try:
            return compute(case.batch, case.meta, **case.call), compute.last_warnings
        except compiled_adv.CompiledAdvError as error:
            return type(error).__name__, str(error)


def assert_same(got, expected) -> None:
    got_out, got_warnings = got
    expected_out, expected_warnings = expected
    if isinstance(expected_out, str) or isinstance(got_out, str):
        assert got_out == expected_out, (got, expected)
        return
    assert got_out.keys() == expected_out.keys()
    assert got_warnings == expected_warnings
    # adv_norm divides by tests.random_cases.EPS or more what float32 has rounded at this size.
    size = max(1.0, expected_out["returns"].abs().max().item())
    for key, want in expected_out.items():
        if isinstance(want, torch.Tensor):
            have = got_out[key]
            assert have.dtype == want.dtype and have.shape == want.shape, key
            slack = size if key == "advantages" else 1.0
            near = (have.double() - want.double()).abs() <= TOLERANCE * slack * (1 + want.double().abs())
            assert near.all(), (key, have, want)


@SETTINGS
@given(cases())
def test_eager_gives_what_the_loops_give(case: Case) -> None:
    assert_same(outcome_of(case, "eager"), outcome_of(case, "reference"))


@SETTINGS
@given(cases(fixed=FIXED))
def test_compiled_gives_what_the_loops_give(case: Case) -> None:
    assert_same(outcome_of(case, "compiled"), outcome_of(case, "reference"))
