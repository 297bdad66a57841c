"""Each fuzzed property on a few examples that are the same in every run; `make fuzz` looks further."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.properties import SHORT


@pytest.mark.parametrize(("fuzz", "examples"), SHORT.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_whatever_arrives_gives_a_right_result_or_a_named_error(fuzz: Callable[[], None], examples: int) -> None:
    every = list(HealthCheck)
    settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=every)(fuzz)()
