"""Our backends, the streaming floor and the peers, called in turns in one process; prints a table of ratios.

    python -m perf.ratios [--recipes ...] [--shapes 64x1024 ...] [--threads N] [--json FILE]

A round gives every contender its turn, each round begins with another one, and a ratio is the median over rounds of
the ratio within a round: what disturbs the machine for a while disturbs both sides of it. A turn of a short call is
several calls, of which the median counts. A call's result is dropped within its time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if "torch" not in sys.modules:  # OpenMP reads it when torch is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from perf import cases, peers
from perf.shapes import EVERY, MASKS, RECIPES

TURN = 2e-3  # seconds that a turn of a short call lasts
MOST_CALLS = 10  # calls of one turn
SHAPES = ((64, 1024), (256, 4096), (512, 8192))


def interleave(
    runs: Mapping[str, Callable[[], Any]], *, seconds: float = 20.0, rounds: tuple[int, int] = (9, 200)
) -> dict[str, list[float]]:
    """Seconds of every contender, one entry per round; at least rounds[0] rounds, then until the seconds are over."""
    calls = {name: min(MOST_CALLS, max(1, round(TURN / _time(run)))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names, end = list(runs), time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for k in range(rounds[1]):
            if k >= rounds[0] and time.perf_counter() > end:
                break
            for name in names[k % len(names) :] + names[: k % len(names)]:
                turn = [_time(runs[name]) for _ in range(calls[name])]
                times[name].append(statistics.median(turn))
    finally:
        gc.enable()
    return times


def ratio(of: Sequence[float], to: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratio within a round, and its quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(of, to, strict=True)], n=4)
    return middle, low, high


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(case: cases.Case, wanted: Sequence[str], *, threads: int, fresh: bool, seconds: float) -> dict[str, Any]:
    """One case as a JSON-able record: {contender: {median, seconds, ...}}; what could not run says why."""
    contenders, absent = {}, {}
    for name in wanted:
        try:
            if name == "floor":
                contenders[name] = case.floor(fresh=fresh, threads=threads)
            elif name in (*cases.BACKENDS, *cases.VARIANTS):
                contenders[name] = case.backend(name)
            else:
                contenders[name] = case.peer(name)
        except peers.Unsupported as error:
            absent[name] = str(error)
    times = interleave({name: c.run for name, c in contenders.items()}, seconds=seconds)
    return {
        "case": str(case),
        "recipe": case.recipe,
        "rows": case.shape[0],
        "tokens": case.shape[1],
        "mask": case.mask,
        "contenders": {
            name: {"median": statistics.median(times[name]), "seconds": times[name], **c.facts}
            for name, c in contenders.items()
        },
        "absent": absent,
        "extra_channels": {name: case.extra_channels(name) for name in contenders if name in cases.BACKENDS},
    }


HEAD = "| case | | ms | x floor | quartiles | x {ours} | quartiles | rounds |\n|---|---|--:|--:|--:|--:|--:|--:|"


def table(record: Mapping[str, Any], ours: str) -> str:
    """One Markdown row per contender: its time over the floor's, and over ours."""
    contenders, rows = record["contenders"], []
    for name, it in contenders.items():
        cells = []
        for other in ("floor", ours):
            if name == other or other not in contenders:
                cells += ["", ""]
                continue
            middle, low, high = ratio(it["seconds"], contenders[other]["seconds"])
            cells += [f"{middle:.3g}", f"{low:.3g}-{high:.3g}"]
        milliseconds = f"{it['median'] * 1e3:.3f}"
        rows.append(" | ".join([f"| {record['case']}", name, milliseconds, *cells, str(len(it["seconds"])) + " |"]))
    return "\n".join(rows)


def shape(text: str) -> tuple[int, int]:
    rows, tokens = (int(n) for n in text.split("x"))
    return rows, tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=tuple(EVERY), default=list(RECIPES))
    parser.add_argument("--shapes", nargs="+", type=shape, default=list(SHAPES), metavar="ROWSxTOKENS")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--backends", nargs="+", choices=cases.BACKENDS, default=list(cases.BACKENDS))
    parser.add_argument("--peers", nargs="*", choices=peers.NAMES, default=list(peers.NAMES))
    parser.add_argument("--without", nargs="+", choices=cases.PASSES, help="instead: the compiled backend less a pass")
    parser.add_argument("--stats", action="store_true", help="instead: the compiled backend with stats")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="the floor writes new memory on every call")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for one case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)

    wanted = [*asked.backends, "floor", *asked.peers]
    variants = [*(f"without {name}" for name in asked.without or ()), *([cases.STATS] if asked.stats else [])]
    if variants:
        wanted = ["compiled", *variants]
    torch.set_num_threads(asked.threads)
    records, notes = [], defaultdict(set)
    differences: dict[str, float] = defaultdict(float)
    stamp = cases.stamp(asked.threads)
    print(", ".join(f"{name} {value}" for name, value in stamp.items()))
    ours = "compiled" if variants else asked.backends[-1]
    print(HEAD.format(ours=ours))
    for recipe in asked.recipes:
        for rows_and_tokens in asked.shapes:
            for mask in asked.masks:
                case = cases.Case(recipe, rows_and_tokens, mask)
                record = measure(case, wanted, threads=asked.threads, fresh=asked.fresh, seconds=asked.seconds)
                records.append(record)
                for name, it in record["contenders"].items():
                    notes[name, it.get("note", "")].add(recipe)
                    differences[name] = max(differences[name], it.get("difference", 0.0))
                for name, why in record["absent"].items():
                    notes[name, f"left out: {why}"].add(recipe)
                print(table(record, ours if ours in record["contenders"] else asked.backends[0]), flush=True)
    print("[B,T] float32 channels at the peak of a call, beside inputs and outputs:")
    for record in records:
        extra = {name: "unknown" if x is None else f"{x:.2f}" for name, x in record["extra_channels"].items()}
        print(f"  {record['case']}:", ", ".join(f"{name} {x}" for name, x in extra.items()))
    print("largest difference of the answers:", ", ".join(f"{name} {x:.1g}" for name, x in differences.items()))
    for (name, note), recipes in sorted(notes.items()):
        if note:
            print(f"{name} ({', '.join(sorted(recipes))}): {note}")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps({"machine": stamp, "cases": records}, indent=1))


if __name__ == "__main__":
    main()
