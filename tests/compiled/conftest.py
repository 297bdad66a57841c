"""One thread: on a machine that is shared, more of them wait for each other at every call."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config

torch._inductor.config.compile_threads = 1
HELPERS: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For tests of what is compiled when, not of what the compiler makes: segments run as they are. Lists them."""
    made: list[str] = []

    def as_it_is(module, example, **_):
        made.append(f"{example[0].shape[0]}")
        return lambda *channels: module(*channels)

    monkeypatch.setattr("compiled_adv.executable.compile_graph", as_it_is)
    return made


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where the golden cases are to run, a second process compiles the last of them meanwhile."""
    wanted = sum("compiled/test_golden.py" in item.nodeid for item in session.items)
    if wanted > 60 and not session.config.option.collectonly and (os.cpu_count() or 1) > 1:
        command = [sys.executable, "-m", "tests.compiled.golden", "1"]
        HELPERS.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL))


def pytest_sessionfinish() -> None:
    for helper in HELPERS:
        helper.kill()
        helper.wait()
