"""Options of the benchmarks (--ladder, --threads), pinned threads, and the stamp that goes into their JSON.

A module with `contenders(ladder)` has its tests run over these pairs, as `case` and `contender`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perf import cases
from perf.shapes import LADDERS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ladder", choices=tuple(LADDERS), default="small", help="batch shapes to time")
    parser.addoption("--threads", type=int, default=1, help="torch's threads, and the floor's")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = metafunc.module.contenders(metafunc.config.getoption("--ladder"))
        ids = [f"{case}-{contender}" for case, contender in pairs]
        metafunc.parametrize(("case", "contender"), pairs, ids=ids, scope="module")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--threads")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["stamp"] = cases.stamp(config.getoption("--threads"))
