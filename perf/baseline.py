"""Takes the JSON of a run; gives what `dashboard --fail-on-regression` reads of it, small enough to commit.

python -m perf.baseline perf/results/bench.json perf/baselines/cpu-small.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_adv.dashboard import OURS, read_run
from compiled_adv.files import write_whole

STATS = ("median", "q1", "q3", "rounds")
FACTS = ("suite", "contender", "recipe", "mask", "rows", "tokens", "over_floor")


def reduced(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results that are judged: our own, by their ratio to the floor."""
    kept = [
        {
            "fullname": each["fullname"],
            "stats": {name: each["stats"][name] for name in STATS},
            "extra_info": {name: each["extra_info"][name] for name in FACTS if name in each["extra_info"]},
        }
        for each in results["benchmarks"]
        if each["extra_info"].get("over_floor") and each["extra_info"].get("contender") in OURS
    ]
    return {
        "machine_info": {"stamp": results["machine_info"]["stamp"]},
        "commit_info": {name: results["commit_info"][name] for name in ("id", "time", "dirty")},
        "datetime": results["datetime"],
        "benchmarks": kept,
    }


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    read_run(source)  # it says what is wrong with a file that is no results
    write_whole(out, json.dumps(reduced(json.loads(source.read_bytes())), indent=1).encode() + b"\n")
