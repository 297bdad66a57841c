"""One timing: runs it under pytest-benchmark, and writes beside it what a reader needs to judge it.

extra_info of every benchmark: suite, contender, rows, tokens, difference (from the eager answer), peak_memory; and
where a floor belongs to it: bytes_moved, floor_seconds and over_floor, the time over that of the floor, measured with
both called in turns [median, lower and upper quartile]. `over` holds the same against other contenders, by name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from perf.floor import Floor
from perf.memory import peak_memory
from perf.ratios import interleave, ratio

SECONDS = 0.2  # for the calls in turns


def record(
    benchmark: Any,
    run: Callable[[], Any],
    *,
    suite: str,
    contender: str,
    floor: Floor | None = None,
    others: Mapping[str, Callable[[], Any]] | None = None,
    **facts: Any,
) -> None:
    """Time `run`; `floor` and `others` are what it is compared with."""
    benchmark.extra_info.update(suite=suite, contender=contender, peak_memory=peak_memory(run), **facts)
    benchmark(run)
    runs = {"it": run, **(others or {})} | ({} if floor is None else {"floor": floor})
    if floor is not None:
        benchmark.extra_info["bytes_moved"] = floor.moved
    if len(runs) == 1:
        return
    times = interleave(runs, seconds=SECONDS, rounds=(7, 60))
    ratios = {name: list(ratio(times["it"], of)) for name, of in times.items() if name != "it"}
    if floor is not None:
        benchmark.extra_info["over_floor"] = ratios.pop("floor")
        benchmark.extra_info["floor_seconds"] = statistics.median(times["floor"])
    if ratios:
        benchmark.extra_info["over"] = ratios
