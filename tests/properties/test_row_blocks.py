"""The eager backend takes large batches a few rows at a time; one row at a time is the hardest case of that."""

from unittest import mock

import pytest
from hypothesis import given

from compiled_adv import executable
from tests.properties.test_backends_agree import SETTINGS, assert_same, outcome_of
from tests.random_cases import Case, cases


@pytest.fixture(autouse=True)
def one_row_at_a_time():
    with mock.patch.object(executable, "BLOCK", 1):
        yield


@SETTINGS
@given(cases())
def test_eager_row_by_row_gives_what_the_loops_give(case: Case) -> None:
    assert_same(outcome_of(case, "eager"), outcome_of(case, "reference"))
