"""What each pass is worth: a recipe on which it fires, compiled without it, against the same compiled with all passes.

Passes that only make the graph plainer are worth 1 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from compiled_adv.passes import DEFAULT

from perf import cases, peers
from perf.measure import record
from perf.shapes import LADDERS

# Where a pass fires if token_gae is not the place.
PLACES: Mapping[str, str] = {
    "drop_idle": "grpo_with_ref",
    "share": "both_norms_by_group",
    "broadcast_outcome": "grpo",
    "fuse_advantages": "token_gae_gvpo",
}


@pytest.mark.parametrize("name", [each.name for each in DEFAULT])
def test_without_a_pass(benchmark: Any, name: str, request: pytest.FixtureRequest) -> None:
    shape = LADDERS[request.config.getoption("--ladder")][-1]
    case = cases.Case(PLACES.get(name, "token_gae"), shape, "contiguous")
    try:
        without = case.backend(f"without {name}")
    except peers.Unsupported as error:
        pytest.skip(f"{name} on {case}: {error}")
    benchmark.group = f"{case.recipe} {shape[0]}x{shape[1]}"
    facts: dict[str, Any] = {
        "recipe": case.recipe,
        "rows": shape[0],
        "tokens": shape[1],
        "difference": without.difference,
    }
    others = {"with": case.backend("compiled").run}
    record(benchmark, without.run, suite="pass", contender=name, others=others, **facts)
