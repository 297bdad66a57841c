"""The eager backend against a loop over token columns, at 512 rows x 8192 tokens: token GAE, KL, values, group reward
norm, batch advantage norm. Both run in turns in one process; extra_info holds the ratio of their times.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from perf import cases
from perf.ratios import interleave, ratio


def test_eager_against_a_loop_over_token_columns(benchmark: Any, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--ladder") != "large":
        pytest.skip("a shape of the large ladder")
    case = cases.Case("token_gae", (512, 8192), "contiguous")
    eager, loop = case.backend("eager"), case.peer("column_loop")  # the answers are compared here
    times = interleave({"eager": eager.run, "loop": loop.run}, seconds=15, rounds=(9, 30))
    middle, low, high = ratio(times["loop"], times["eager"])
    benchmark.extra_info.update(
        loop_over_eager=middle, quartiles=[low, high], loop_seconds=statistics.median(times["loop"])
    )
    benchmark.pedantic(eager.run, rounds=10, warmup_rounds=1)
