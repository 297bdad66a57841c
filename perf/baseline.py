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
from compiled_adv.errors import CompiledAdvError, ResultsFile
from compiled_adv.files import check_outputs, write_whole

STATS = ("median", "q1", "q3", "rounds")
FACTS = ("suite", "contender", "recipe", "mask", "rows", "tokens", "over_floor")


def reduced(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results that are judged: our own, by their ratio to the floor."""
    kept = [
        {
            "fullname": each["fullname"],
            "stats": {name: each["stats"][name] for name in STATS if name in each["stats"]},
            "extra_info": {name: each["extra_info"][name] for name in FACTS if name in each["extra_info"]},
        }
        for each in results["benchmarks"]
        if (facts := each.get("extra_info") or {}).get("over_floor") and facts.get("contender") in OURS
    ]
    return {
        "machine_info": {"stamp": results["machine_info"]["stamp"]},
        "commit_info": {name: results["commit_info"].get(name) for name in ("id", "time", "dirty")},
        "datetime": results.get("datetime"),
        "benchmarks": kept,
    }


def write_baseline(source: Path, out: Path) -> None:
    """Raises ResultsFile or OutputFailed, and leaves what was there."""
    check_outputs([out], [source])
    read_run(source)  # it says what is wrong with a file that is no results
    kept = reduced(json.loads(source.read_bytes()))
    if not kept["benchmarks"]:
        raise ResultsFile(f"{source} holds nothing to judge by", hint="results with a ratio to the floor")
    write_whole(out, json.dumps(kept, indent=1).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m perf.baseline RESULTS.json BASELINE.json")
    try:
        write_baseline(*map(Path, sys.argv[1:]))
    except CompiledAdvError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
