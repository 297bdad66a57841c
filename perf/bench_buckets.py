"""What a bucket costs: a batch that fills it, one that is padded into it, the same one in a bucket of its own shape,
and a miss, which compiles. Token GAE with KL, critic and both norms. The padded and the exact answer are the eager one.

Tuned boundaries against powers of two, over a workload's own shapes: `python -m perf.tuned`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import compiled_adv
from compiled_adv.errors import AdvantageWarning
from perf import cases
from perf.floor import Floor
from perf.measure import record
from perf.shapes import GROUP, LADDERS, RECIPES

RECIPE = RECIPES["token_gae"]


def built(rows: int, tokens: int) -> compiled_adv.Compute:
    compiled = {"buckets": {"rows": [rows], "tokens": [tokens]}}
    return compiled_adv.build({"actor": {**RECIPE.actor, "advantage": {"compiled": compiled}}})


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return LADDERS[request.config.getoption("--ladder")][-1]


@pytest.mark.parametrize("kind", ["filled", "padded", "exact"])
def test_hit(benchmark: Any, kind: str, shape: tuple[int, int], threads: int) -> None:
    rows, tokens = shape
    part = (rows * 3 // 4 // GROUP * GROUP, tokens * 3 // 4)
    given = shape if kind == "filled" else part
    batch, meta = RECIPE.batch(*given)
    compute = built(*(part if kind == "exact" else shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)
        eager = compiled_adv.build({"actor": {**RECIPE.actor, "advantage": {"backend": "eager"}}})
        expected = eager(batch, meta)
        compute(batch, meta)
    run = lambda: compute(batch, meta)  # noqa: E731
    off = cases.checked(run, batch, expected)
    benchmark.group = f"bucket {rows}x{tokens}"
    facts = {"recipe": "token_gae", "rows": given[0], "tokens": given[1], "bucket": "{}x{}".format(*shape)}
    floor = Floor(batch, expected, threads=threads)
    padding = compute.cache.info().padding
    record(benchmark, run, suite="bucket", contender=kind, floor=floor, padding=padding, difference=off, **facts)


def test_miss(benchmark: Any, shape: tuple[int, int], tmp_path: Path) -> None:
    """A second shape in a running process, and an empty cache folder: one compilation."""
    rows, tokens = shape
    compute = compiled_adv.build({"actor": {**RECIPE.actor, "advantage": {"compiled": {"cache_dir": str(tmp_path)}}}})
    small, large = RECIPE.batch(GROUP, 128), RECIPE.batch(rows, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)
        compute(*small)  # the first batch of its kind is compared with eager
        benchmark.pedantic(lambda: compute(*large), rounds=1)
    info = compute.cache.info()
    assert info.misses == 2
    benchmark.group = f"bucket {rows}x{tokens}"
    benchmark.extra_info.update(suite="bucket", contender="miss", recipe="token_gae", rows=rows, tokens=tokens)
