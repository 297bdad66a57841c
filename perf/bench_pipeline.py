"""Whole pipelines: every recipe on every shape and mask, by each backend, beside the streaming floor and the peers.

Each answer is compared before it is timed; a case that a contender cannot do is skipped with the reason. Figures that
compare contenders come from calls in turns (extra_info), as in `python -m perf.ratios`.
"""

from __future__ import annotations

from typing import Any

import pytest

from perf import cases, peers
from perf.measure import record
from perf.shapes import LADDERS, MASKS, RECIPES

OURS = (*cases.BACKENDS, "floor")
PEERED = ("token_gae", "turn_gae_gvpo")  # on the small ladder; on the others every recipe has its peers


def contenders(ladder: str) -> list[tuple[cases.Case, str]]:
    """Every recipe on every shape, and the first of them under every mask; on the small ladder, where compiling is most
    of the time, the others on its largest shape alone, and no other mask."""
    first, small = next(iter(RECIPES)), ladder == "small"
    return [
        (cases.Case(recipe, shape, mask), contender)
        for recipe in RECIPES
        for shape in (LADDERS[ladder][-1:] if small and recipe != first else LADDERS[ladder])
        for mask in (MASKS if recipe == first and not small else MASKS[:1])
        for contender in (OURS if small and recipe not in PEERED else (*OURS, *peers.NAMES))
    ]


def test_pipeline(benchmark: Any, case: cases.Case, contender: str, threads: int) -> None:
    benchmark.group = str(case)
    try:
        floor = case.floor(threads=threads)
        if contender == "floor":
            it = floor
        elif contender in cases.BACKENDS:
            it = case.backend(contender)
        else:
            it = case.peer(contender)
    except peers.Unsupported as error:
        pytest.skip(str(error))
    others = {} if contender in ("compiled", "floor") else {"compiled": case.backend("compiled").run}
    record(
        benchmark,
        it.run,
        suite="pipeline",
        contender=contender,
        floor=None if contender == "floor" else floor.run,
        others=others,
        recipe=case.recipe,
        rows=case.shape[0],
        tokens=case.shape[1],
        mask=case.mask,
        **it.facts,
    )
