"""Every recipe in configs/, on the ladder's largest shape, with the channels that it needs, by each backend."""

from __future__ import annotations

from typing import Any

from compiled_adv.config_file import recipes
from perf import cases
from perf.measure import record
from perf.shapes import LADDERS


def contenders(ladder: str) -> list[tuple[cases.Case, str]]:
    backends = ("compiled",) if ladder == "small" else cases.BACKENDS
    return [
        (cases.Case(name, LADDERS[ladder][-1], "contiguous"), backend) for name in recipes() for backend in backends
    ]


def test_recipe(benchmark: Any, case: cases.Case, contender: str, threads: int) -> None:
    it = case.backend(contender)
    rows, tokens = case.shape
    benchmark.group = f"{case.recipe} {rows}x{tokens}"
    facts: dict[str, Any] = {"recipe": case.recipe, "rows": rows, "tokens": tokens, "difference": it.difference}
    floor = case.floor(threads=threads).run
    record(benchmark, it.run, suite="recipe", contender=contender, floor=floor, **facts)
