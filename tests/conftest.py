"""Compiles only where a test is about compiling: anywhere else the default backend stands for eager."""

import pytest


@pytest.fixture(autouse=True)
def eager_unless_the_test_is_about_compiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "compiled" not in request.node.nodeid.removeprefix("compiled_adv"):
        monkeypatch.setenv("COMPILED_ADV_BACKEND", "eager")
