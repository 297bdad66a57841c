"""Every golden file on the compiled backend: right numbers, right warnings, refusals where due, in whatever bucket."""

import pytest
import torch

from tests.compiled import golden
from tests.compiled.shared import assert_same

# Each case is a program of its own to compile: `make test` takes a few, `make test-long` all of them.
LONG = pytest.mark.long
IN_ONE = [name if name in golden.DOZEN else pytest.param(name, marks=LONG) for name in golden.CASES]
IN_FOUR = [name if i < 3 else pytest.param(name, marks=LONG) for i, name in enumerate(golden.DOZEN)]


@pytest.mark.parametrize("name", IN_ONE)
def test_golden_case_holds_in_one_bucket(name: str) -> None:
    result = golden.check(name)
    assert result.status == "passed", result.reason


def test_all_golden_cases_are_here() -> None:
    assert len(golden.CASES) == 69 + 35


def test_each_case_of_the_dozen_is_padded_in_both_directions() -> None:
    assert len(golden.DOZEN) == 12
    for name in golden.DOZEN:
        rows, tokens = golden.shape(name)
        assert rows < golden.ONE["rows"][0] and tokens < golden.ONE["tokens"][0]


@pytest.mark.parametrize("name", IN_FOUR)
def test_a_golden_case_gives_the_same_bits_in_every_bucket(name: str) -> None:
    exact, *padded = (golden.outputs(name, bucket) for bucket in golden.buckets(name).values())
    assert exact, "nothing was computed"
    for other in padded:
        assert_same(other, exact)


@pytest.mark.parametrize("name", golden.DOZEN)
def test_a_golden_case_gives_the_same_bits_on_two_threads(name: str) -> None:
    one = golden.outputs(name, golden.ONE)
    torch.set_num_threads(2)
    try:
        assert_same(golden.outputs(name, golden.ONE), one)
    finally:
        torch.set_num_threads(1)
