"""Every contract is held by both backends that run without a compiler: the plain loops and the eager Program."""

import pytest

from tests.contracts import plugins_under_test
from tests.contracts.small import Runner


@pytest.fixture(params=["reference", "eager"])
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.fixture(autouse=True)
def seen() -> list:
    """What the plugins under test were given, oldest first."""
    plugins_under_test.SEEN.clear()
    return plugins_under_test.SEEN
