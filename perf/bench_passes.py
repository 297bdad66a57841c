"""What each pass is worth: a recipe on which it fires, compiled without it, against the same compiled with all passes.

The answers of both are compared with the eager one before they are timed, in turns. Passes that only make the graph
plainer, or save a collective between processes, are worth 1 here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
from compiled_adv.passes import DEFAULT

import compiled_adv
from compiled_adv.errors import AdvantageWarning
from perf import cases, peers
from perf.floor import channels
from perf.measure import record
from perf.shapes import LADDERS, RECIPES, Recipe

_TOKEN, _GRPO = RECIPES["token_gae"], RECIPES["grpo"]
_BOTH_BY_GROUP = {**_TOKEN.actor, "adv_norm": _TOKEN.actor["reward_norm"]}

# Where a pass fires if the first recipe of RECIPES is not the place.
PLACES: Mapping[str, tuple[str, Recipe]] = {
    "drop_idle": ("grpo with ref_logp, KL weight 0", Recipe(_GRPO.actor, ("ref_logp",))),
    "share": ("token_gae, both norms by group", Recipe(_BOTH_BY_GROUP, _TOKEN.channels)),
    "broadcast_outcome": ("grpo", _GRPO),
    "fuse_advantages": ("token_gae_gvpo", RECIPES["token_gae_gvpo"]),
}


@lru_cache(maxsize=2)
def _prepared(name: str, shape: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Batch, meta, the eager answer and the compute with all passes, of a place."""
    recipe = dict([*PLACES.values(), ("token_gae", _TOKEN)])[name]
    batch, meta = recipe.batch(*shape)
    expected = _built(recipe, {"backend": "eager"})(batch, meta, **recipe.per_call)
    return batch, meta, expected, _built(recipe, {})


def _built(recipe: Recipe, advantage: Mapping[str, Any]) -> compiled_adv.Compute:
    return compiled_adv.build({"actor": {**recipe.actor, "advantage": dict(advantage)}})


@pytest.mark.parametrize("name", [each.name for each in DEFAULT])
def test_without_a_pass(benchmark: Any, name: str, request: pytest.FixtureRequest) -> None:
    shape = LADDERS[request.config.getoption("--ladder")][-1]
    place, recipe = PLACES.get(name, ("token_gae", _TOKEN))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)
        batch, meta, expected, every = _prepared(place, shape)
        kept = [each.name for each in DEFAULT if each.name != name]
        without = _built(recipe, {"compiled": {"passes": kept}})
        fired = not _same(every, without, batch, recipe)
        if not fired:
            pytest.skip(f"{name} changes nothing on {place}")
        outputs = channels(batch, expected)[1]
        computed = tuple(key for key, x in expected.items() if any(x is y for y in outputs))
        runs = {}
        for label, compute in (("with", every), ("without", without)):
            runs[label] = lambda compute=compute: compute(batch, meta, **recipe.per_call)
            off = peers.check(peers.Peer(runs[label], computed, ""), expected, cases.TOLERANCE)
    benchmark.group = f"{place} {shape[0]}x{shape[1]}"
    facts = {"recipe": place, "rows": shape[0], "tokens": shape[1], "difference": off}
    record(benchmark, runs["without"], suite="pass", contender=name, others={"with": runs["with"]}, **facts)


def _same(one: compiled_adv.Compute, other: compiled_adv.Compute, batch: Any, recipe: Recipe) -> bool:
    """Whether two Programs are the same text."""
    mode = recipe.per_call.get("advantage_shaping_mode", "additive")
    carried = [key for key in batch if key in compiled_adv.channel.OPTIONAL]
    texts = [compute.explain("json", carried, mode)["program"] for compute in (one, other)]
    return bool(texts[0] == texts[1])
