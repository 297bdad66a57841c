"""A trainer's own call, its computation against ours behind it: AReaL 1.0.4's `PPOActor.compute_advantages`.

Where AReaL is installed (make peers). Both take a list of trajectories, one per prompt, and give one: what AReaL does
around the computation, to concatenate and to split, is in both times. The answers are compared first.
`python -m perf.bench_trainers` prints a table, both called in turns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from perf.measure import record
from perf.ratios import interleave, ratio
from perf.shapes import GROUP, LADDERS, RECIPES

TOLERANCE = 1e-5  # of the answers, against 1 + |expected|

Run = Callable[[], list[dict[str, Any]]]


def prepared(rows: int, tokens: int) -> tuple[Run, Run, float]:
    """AReaL's own call, the same when enabled, and the largest difference of their answers."""
    from areal.api.cli_args import NormConfig, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor

    from compiled_adv.integrations import areal

    recipe = RECIPES["token_gae"]
    norms = {name: NormConfig(**recipe.actor[name]) for name in ("reward_norm", "adv_norm")}
    config = PPOActorConfig(experiment_name="perf", trial_name="perf", **{**recipe.actor, **norms})
    batch = recipe.batch(rows, tokens)[0]
    del batch["is_truncated"]  # which it does not read
    prompts = [{name: x[i : i + GROUP] for name, x in batch.items()} for i in range(0, rows, GROUP)]

    areal.disable()
    as_installed = type("AsInstalled", (PPOActor,), {"_compute_advantages": vars(PPOActor)["_compute_advantages"]})
    areal.enable()
    own, ours = as_installed(config, None), PPOActor(config, None)
    worst = difference(ours.compute_advantages(prompts), own.compute_advantages(prompts))
    return lambda: own.compute_advantages(prompts), lambda: ours.compute_advantages(prompts), worst


def difference(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> float:
    worst = 0.0
    for have, expected in zip(got, want, strict=True):
        for name, x in expected.items():
            if isinstance(x, Tensor):
                off = (have[name].double() - x.double()).abs() / (1 + x.double().abs())
                worst = max(worst, float(off.max()))
    assert worst <= TOLERANCE, worst
    return worst


@pytest.fixture
def areal_disabled_afterwards() -> Iterator[None]:
    pytest.importorskip("areal", reason="make peers")
    yield
    from compiled_adv.integrations import areal

    areal.disable()


@pytest.mark.usefixtures("areal_disabled_afterwards")
@pytest.mark.parametrize("which", ["own", "ours"])
def test_areal(which: str, benchmark: Any, request: pytest.FixtureRequest) -> None:
    rows, tokens = LADDERS[request.config.getoption("--ladder")][-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own, ours, worst = prepared(rows, tokens)
        run, others = (own, {}) if which == "own" else (ours, {"own": own})
        contender = f"areal, {which}"
        facts = {"rows": rows, "tokens": tokens, "difference": worst}
        record(benchmark, run, suite="trainers", contender=contender, others=others, **facts)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| shape | AReaL ms | ours ms | AReaL takes | quartiles | largest difference |\n|---|--:|--:|--:|--:|--:|")
    for rows, tokens in ((64, 1024), (256, 4096)):
        own, ours, worst = prepared(rows, tokens)
        times = interleave({"own": own, "ours": ours}, seconds=8.0, rounds=(5, 60))
        middle, low, high = ratio(times["own"], times["ours"])
        own_ms, ours_ms = (1e3 * sorted(times[name])[len(times[name]) // 2] for name in ("own", "ours"))
        ratios = f"{middle:.3g}x | {low:.3g}-{high:.3g}"
        print(f"| {rows} x {tokens} | {own_ms:.2f} | {ours_ms:.2f} | {ratios} | {worst:.1g} |", flush=True)


if __name__ == "__main__":
    main()
