"""One timing: runs it under pytest-benchmark, and writes beside it what a reader needs to judge it.

extra_info of every benchmark: suite, contender, rows, tokens, difference (from the eager answer), peak_memory; and
where a floor belongs to it: bytes_moved, floor_seconds and over_floor, the time over that of the floor, measured with
both called in turns [median, lower and upper quartile]. `over` holds the same against other contenders, by name.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from perf.floor import Floor
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


def peak_memory(run: Callable[[], Any]) -> int | None:
    """Bytes by which memory grows while `run` runs once; None where the system cannot tell.

    On a GPU what torch allocated; on a CPU the peak of the resident set. What an earlier call left for reuse is not
    counted again.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024
