"""Benchmark results as perf/ writes them, made up: for tests of the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES = ((16, 256), (64, 1024))
STAMP = {
    "cpu": "a CPU",
    "cores": 2,
    "device": "cpu",
    "threads": 1,
    "torch": "2.13.0",
    "python": "3.11.7",
    "commit": "c",
}


def benchmark(name: str, milliseconds: float, **extra: Any) -> dict[str, Any]:
    """One entry of the list `benchmarks`."""
    seconds = milliseconds / 1e3
    stats = {"median": seconds, "q1": 0.9 * seconds, "q3": 1.1 * seconds, "rounds": 50}
    return {"fullname": f"perf/bench_x.py::{name}", "extra_info": extra, "stats": stats}


def results(*, commit: str = "abc1234", day: int = 1, slower: float = 1.0, **stamp: Any) -> dict[str, Any]:
    """A run of every suite. slower: a factor on our own time, for regressions."""
    made = []
    for rows, tokens in SHAPES:
        for recipe in ("token_gae", "grpo"):
            floor = rows * tokens / 1e7
            for contender, factor in (("compiled", 3.0 * slower), ("eager", 20.0), ("areal", 90.0), ("floor", 1.0)):
                facts: dict[str, Any] = {"suite": "pipeline", "contender": contender, "recipe": recipe}
                facts |= {"rows": rows, "tokens": tokens, "mask": "contiguous", "peak_memory": 10_000_000}
                if contender != "floor":
                    facts["over_floor"] = [factor, 0.95 * factor, 1.05 * factor]
                if contender in ("eager", "areal"):
                    facts["over"] = {"compiled": [factor / 3, factor / 3.3, factor / 2.7]}
                made.append(benchmark(f"pipeline[{recipe} {rows}x{tokens}-{contender}]", floor * factor, **facts))
    shape = {"rows": 64, "tokens": 1024}
    for name, gain in (("drop_idle", 1.4), ("share", 1.1)):
        facts = {
            "suite": "pass",
            "contender": name,
            "recipe": "grpo",
            "over": {"with": [gain, gain - 0.05, gain + 0.05]},
        }
        made.append(benchmark(f"pass[{name}]", 2.0, **facts, **shape))
    for start, seconds in (("cold", 9.0), ("warm", 2.0)):
        parts = {"import": 1.0, "first bucket": seconds, "next bucket": seconds / 4}
        made.append(benchmark(f"start[{start}]", 1e4, suite="start", contender=start, parts=parts, **shape))
    for kind, ms in (("filled", 2.0), ("padded", 2.2), ("exact", 1.5), ("miss", 1800.0)):
        made.append(benchmark(f"bucket[{kind}]", ms, suite="bucket", contender=kind, padding=0.3, **shape))
    for stage in ("KLRewards", "TokenGAE"):
        made.append(benchmark(f"stage[{stage}]", 0.5, suite="stage", contender="eager", stage=stage, **shape))
    made.append(
        benchmark(
            "recipe[default]",
            3.0,
            suite="recipe",
            contender="compiled",
            recipe="default",
            over_floor=[3, 2, 4],
            **shape,
        )
    )
    made.append(benchmark("plugin[mine]", 3.0, suite="plugin", contender="require", recipe="mine", **shape))
    return {
        "machine_info": {"stamp": STAMP | stamp},
        "commit_info": {"id": commit, "time": f"2026-11-{day:02}T00:00:00+00:00", "dirty": False},
        "datetime": f"2026-11-{day:02}T01:00:00+00:00",
        "benchmarks": made,
    }


def written(path: Path, content: Any) -> Path:
    """A JSON file of it."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
