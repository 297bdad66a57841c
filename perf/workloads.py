"""Writes the lengths that the shipped buckets are tuned for: configs/buckets/*.lengths.json.

    python -m perf.workloads [REAL]     REAL: a JSON file with "shapes" and "resampled_shapes" of real batches

multi_turn_agent and long_reasoning are drawn from distributions that are stated here and in the files, seed 0;
single_turn_math is a copy of real shapes, and is only written if they are given.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "configs" / "buckets"
BATCHES = 400

MATH = (
    "Real: batches of 64 sampled rows, less the unusable ones, of a 135M-parameter model on arithmetic word problems "
    "with 0 to 4 worked examples in the prompt, responses of at most 128 tokens; and batches of 8 of the same prompt "
    "groups drawn again with replacement (resampled_shapes)."
)
AGENT = (
    "Synthetic, seed 0: 4 prompts x 8 samples, a sample lost with 4 %. A row is a prompt of lognormal(median 400, "
    "sigma 0.4) tokens and 1 to 12 turns (geometric, one in four ends it), each of lognormal(180, 0.6) tokens and a "
    "tool's answer of lognormal(220, 0.9), cut at 16,384."
)
REASONING = (
    "Synthetic, seed 0: micro-batches of at most 131,072 slots, in the order of arrival. A row is a prompt of "
    "lognormal(median 200, sigma 0.5) tokens and a response of lognormal(5,000, 0.8), cut at 32,768."
)


def _lognormal(draw: random.Random, median: float, sigma: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(median), sigma)))


def agent() -> list[tuple[int, int]]:
    draw, shapes = random.Random(0), []
    for _ in range(BATCHES):
        lengths = []
        for _ in range(32):
            if draw.random() < 0.04:
                continue
            turns = 1 + min(11, int(math.log(1 - draw.random()) / math.log(1 - 1 / 4)))
            talk = sum(_lognormal(draw, 180, 0.6) + _lognormal(draw, 220, 0.9) for _ in range(turns))
            lengths.append(min(16384, _lognormal(draw, 400, 0.4) + talk))
        shapes.append((len(lengths), max(lengths)))
    return shapes


def reasoning() -> list[tuple[int, int]]:
    draw, shapes, rows, longest = random.Random(0), [], 0, 0
    while len(shapes) < BATCHES:
        length = min(32768, _lognormal(draw, 200, 0.5) + _lognormal(draw, 5000, 0.8))
        if rows and (rows + 1) * max(longest, length) > 131_072:
            shapes.append((rows, longest))
            rows, longest = 0, 0
        rows, longest = rows + 1, max(longest, length)
    return shapes


def main() -> None:
    made = {"multi_turn_agent": {"note": AGENT, "shapes": agent()}}
    made["long_reasoning"] = {"note": REASONING, "shapes": reasoning()}
    if sys.argv[1:]:
        real = json.loads(Path(sys.argv[1]).read_text())
        names = ("shapes", "resampled_shapes")
        made["single_turn_math"] = {"note": MATH, **{name: real[name] for name in names}}
    for name, content in made.items():
        (FOLDER / f"{name}.lengths.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
