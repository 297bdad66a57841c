"""Every contract is held by both backends that run without a compiler: the plain loops and the eager Program."""

import pytest

from tests.contracts.small import Runner


@pytest.fixture(params=["reference", "eager"])
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)
