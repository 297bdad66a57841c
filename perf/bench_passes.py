"""What each pass, and all of them, are worth: a recipe on which it fires, compiled without, against with all passes.

Passes that only make the graph plainer are worth 1 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from perf import cases, peers
from perf.measure import record
from perf.shapes import LADDERS

# Where a pass fires; else token_gae_gvpo is the place.
PLACES: Mapping[str, str] = {
    "share": "both_norms_by_group",
    **dict.fromkeys(("all", "drop_idle", "broadcast_outcome"), "grpo_with_ref"),
}


def contenders(ladder: str) -> list[tuple[cases.Case, str]]:
    shape = LADDERS[ladder][-1]
    found = [(cases.Case(PLACES.get(name, "token_gae_gvpo"), shape, "contiguous"), name) for name in cases.PASSES]
    return sorted(((case, f"without {name}") for case, name in found), key=str)


def test_without_a_pass(benchmark: Any, case: cases.Case, contender: str) -> None:
    rows, tokens = case.shape
    try:
        without = case.backend(contender)
    except peers.Unsupported as error:
        pytest.skip(f"{contender} on {case}: {error}")
    benchmark.group = f"{case.recipe} {rows}x{tokens}"
    facts: dict[str, Any] = {"recipe": case.recipe, "rows": rows, "tokens": tokens, "difference": without.difference}
    others = {"with": case.backend("compiled").run}
    name = contender.removeprefix("without ")
    record(benchmark, without.run, suite="pass", contender=name, others=others, **facts)
