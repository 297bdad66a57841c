"""Tuned boundaries against powers of two with as many buckets, over a workload's own shapes, both called in turns.

    python -m perf.tuned [single_turn_math ...] [--shapes N] [--rounds N]

Shapes are drawn from the workload as often as they came. Both serve each of them in every round, the best round of a
shape counts, and the ratio is that of the sums. The answers of the two are compared first: they are bitwise equal.
"""

from __future__ import annotations

import argparse
import math
import random
import time
import warnings

import torch

import compiled_adv
from compiled_adv import tune
from compiled_adv.config_file import bucket_files
from compiled_adv.errors import AdvantageWarning
from perf.shapes import RECIPES

RECIPE = RECIPES["token_gae"]


def built(rows: list[int], tokens: list[int]) -> compiled_adv.Compute:
    compiled = {"buckets": {"rows": rows, "tokens": tokens}}
    return compiled_adv.build({"actor": {**RECIPE.actor, "advantage": {"compiled": compiled}}})


def measure(name: str, n_shapes: int, rounds: int) -> str:
    file = bucket_files()[name]
    work = tune.read_lengths(file.with_suffix(".lengths.json"))
    buckets = compiled_adv.load_config({"advantage": {"compiled": {"buckets": str(file)}}}).advantage.compiled.buckets
    assert buckets is not None
    top = (buckets.rows[-1], buckets.tokens[-1])
    k = len(buckets.rows) * len(buckets.tokens)
    other = tune.powers(work, k, top)
    sides = {
        "tuned": built(list(buckets.rows), list(buckets.tokens)),
        "powers": built(list(other.rows), list(other.tokens)),
    }
    shapes = random.Random(0).choices(list(work.counts), weights=list(work.counts.values()), k=n_shapes)
    batches = [RECIPE.batch(*shape) for shape in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)
        for batch, meta in batches:
            one, two = (compute(batch, meta) for compute in sides.values())
            assert torch.equal(one["advantages"], two["advantages"])
    best = {side: [math.inf] * len(batches) for side in sides}
    for k_round in range(rounds):
        for i, (batch, meta) in enumerate(batches):
            for side in list(sides)[:: 1 if k_round % 2 else -1]:
                start = time.perf_counter()
                sides[side](batch, meta)
                best[side][i] = min(best[side][i], time.perf_counter() - start)
    padding = [f"{100 * compute.cache.info().padding:.0f} %" for compute in sides.values()]
    per_call = {side: 1e3 * sum(seconds) / n_shapes for side, seconds in best.items()}
    columns = [name, str(k), *padding, *(f"{ms:.2f}" for ms in per_call.values())]
    return "| " + " | ".join(columns) + f" | {per_call['powers'] / per_call['tuned']:.2f}x |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(bucket_files()))
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| workload | buckets | padding, tuned | powers of two | ms a call, tuned | powers of two | powers / tuned |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in asked.names:
        print(measure(name, asked.shapes, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
