"""A process from its start to its first answer: cold (an empty cache folder), and warm (what the cold one left there).

Every process compares its first compiled batch with the eager answer (verify_steps), and says how long each part took.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perf.shapes import LADDERS

PROCESS = """
import json, sys, time, warnings
start = time.perf_counter()
import compiled_adv
imported = time.perf_counter()
from perf.shapes import RECIPES
warnings.simplefilter("ignore")
recipe = RECIPES[sys.argv[1]]
first, second = (recipe.batch(*map(int, shape.split("x"))) for shape in sys.argv[3:5])
begin = time.perf_counter()
compiled = {"cache_dir": sys.argv[2]}
compute = compiled_adv.build({"actor": {**recipe.actor, "advantage": {"compiled": compiled}}})
compute(*first, **recipe.per_call)
one = time.perf_counter()
compute(*second, **recipe.per_call)
two = time.perf_counter()
assert compute.cache.info().compiles == 2
print(json.dumps({"import": imported - start, "first bucket": one - begin, "next bucket": two - one}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_start(benchmark: Any, start: str, folder: Path, request: pytest.FixtureRequest) -> None:
    shapes = LADDERS[request.config.getoption("--ladder")][-2:]
    assert any(folder.rglob("*")) == (start == "warm"), "the cold process fills the cache of the warm one"
    command = [sys.executable, "-c", PROCESS, "token_gae", str(folder), *(f"{b}x{t}" for b, t in shapes)]
    done: list[str] = []

    def process() -> None:
        done.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    benchmark.pedantic(process, rounds=1)
    benchmark.group = "a process from its start"
    benchmark.extra_info.update(
        suite="start",
        contender=start,
        recipe="token_gae",
        rows=shapes[-1][0],
        tokens=shapes[-1][1],
        parts=json.loads(done[0]),
    )
