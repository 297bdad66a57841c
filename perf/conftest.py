"""Options of the benchmarks (--ladder, --threads), pinned threads, and the stamp that goes into their JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perf import cases
from perf.shapes import LADDERS, MASKS, RECIPES

FIRST = next(iter(RECIPES))  # what is timed under every mask, but on the small ladder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ladder", choices=tuple(LADDERS), default="small", help="batch shapes to time")
    parser.addoption("--threads", type=int, default=1, help="torch's threads, and the floor's")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` runs over recipes, shapes of the ladder and masks."""
    if "case" in metafunc.fixturenames:
        ladder = metafunc.config.getoption("--ladder")
        shapes, every_mask = LADDERS[ladder], FIRST if ladder != "small" else None
        every = [
            cases.Case(r, s, m) for r in RECIPES for s in shapes for m in MASKS if m == MASKS[0] or r == every_mask
        ]
        metafunc.parametrize("case", every, ids=str, scope="module")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--threads")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["stamp"] = cases.stamp(config.getoption("--threads"))
