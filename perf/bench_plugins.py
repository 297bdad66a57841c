"""Users' functions beside the built-in ones that do the same: the worked examples of README.md, compiled.

    python -m perf.bench_plugins [256x4096]     # called in turns, as a table of ratios to the built-in cousin

A row of the table is one function: as a part of the Program (auto), as it is between two segments (never), on the eager
backend, and its built-in cousin. Each answer is compared with the eager one before it is timed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import compiled_adv
from perf.measure import record
from perf.ratios import interleave, ratio, shape
from perf.shapes import GROUP, LADDERS, make_batch

TOLERANCE = 1e-4  # of the answers, against 1 + |expected|


@dataclass(frozen=True)
class Example:
    """A function in its slot, what else is configured, and the configuration of its cousin."""

    slot: str
    kwargs: Mapping[str, Any]
    cousin: Mapping[str, Any]
    actor: Mapping[str, Any] = field(default_factory=dict)
    channels: tuple[str, ...] = ()


_PENALTY = {"overlong_reward_penalty": True, "overlong_tokens": 64, "overlong_penalty_factor": 0.5}
_GROUP_MEAN = {"mean_level": "group", "mean_leave1out": True, "std_level": None, "group_size": GROUP}
_CRITIC = {"discount": 0.99, "gae_lambda": 0.95, "kl_ctl": 0.1}

EXAMPLES = {
    "overlong": Example(
        "outcome_reward_shaping",
        {"budget": 256, "ramp": 64, "factor": 0.5},
        {"kl_ctl": 0.0, **_PENALTY, "max_new_tokens": 256},
        {"kl_ctl": 0.0},
    ),
    "leave_one_out": Example(
        "outcome_reward_shaping", {}, {"kl_ctl": 0.0, "reward_norm": _GROUP_MEAN}, {"kl_ctl": 0.0}
    ),
    "td_lambda": Example(
        "estimator", {"decay": 0.95, "at_turn_end": 0.99}, _CRITIC, _CRITIC, channels=("ref_logp", "values")
    ),
    "centred": Example(
        "process_adv_shaping", {"weight": 1.0}, {"kl_ctl": 0.0}, {"kl_ctl": 0.0}, channels=("token_rewards",)
    ),
}


def built(name: str, way: str) -> compiled_adv.Compute:
    example = EXAMPLES[name]
    if way == "cousin":
        return compiled_adv.build({"actor": {**example.cousin, "advantage": {"backend": "compiled"}}})
    choice = {"implementation": f"tests.examples.{name}", "kwargs": dict(example.kwargs)}
    backend = {"backend": "eager"} if way == "eager" else {"backend": "compiled", "compiled": {"plugins": way}}
    return compiled_adv.build({"actor": {**example.actor, "advantage": {example.slot: choice, **backend}}})


def difference(got: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of the advantages, relative to 1 + |expected|."""
    want = expected["advantages"].double()
    return float(((got["advantages"].double() - want).abs() / (1 + want.abs())).max())


@pytest.mark.parametrize("way", ["require", "never", "eager", "cousin"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_plugin(benchmark: Any, name: str, way: str, request: pytest.FixtureRequest) -> None:
    ladder = request.config.getoption("--ladder")
    if ladder == "small":
        pytest.skip("a program for each of them, on the larger ladders")
    rows, tokens = LADDERS[ladder][-1]
    batch, meta = make_batch(rows, tokens, channels=EXAMPLES[name].channels)
    compute = built(name, way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        out = compute(batch, meta)
        expected = built(name, "eager")(batch, meta)
    off = difference(out, expected)
    # the cousin of `centred` shapes without the mean
    assert off <= TOLERANCE or (name, way) == ("centred", "cousin"), off
    benchmark.group = f"{name} {rows}x{tokens}"
    facts = {"recipe": name, "rows": rows, "tokens": tokens, "difference": off}
    record(benchmark, lambda: compute(batch, meta), suite="plugin", contender=way, **facts)


WAYS = ("require", "never", "eager")


def row(name: str, rows: int, tokens: int, seconds: float = 3.0) -> str:
    """One function, each way, against its cousin: medians of the ratio within a round."""
    batch, meta = make_batch(rows, tokens, channels=EXAMPLES[name].channels)
    computes = {way: built(name, way) for way in (*WAYS, "cousin")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        for compute in computes.values():
            compute(batch, meta)
        times = interleave(
            {way: (lambda c=compute: c(batch, meta)) for way, compute in computes.items()}, seconds=seconds
        )
    cells = [f"{ratio(times[way], times['cousin'])[0]:.2f}x" for way in WAYS]
    return f"| {name} | {1e3 * sorted(times['cousin'])[len(times['cousin']) // 2]:.2f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    size = shape(sys.argv[1] if len(sys.argv) > 1 else "256x4096")
    print("| function | cousin, ms | in the Program | between segments | eager backend |\n|---|--:|--:|--:|--:|")
    for each in EXAMPLES:
        print(row(each, *size), flush=True)
