"""Every recipe in configs/, on the ladder's largest shape, with every optional channel and 8 turns, by each backend."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import compiled_adv
from compiled_adv.config_file import recipes
from compiled_adv.errors import AdvantageWarning, CompiledAdvError
from perf import cases
from perf.floor import Floor
from perf.measure import record
from perf.shapes import LADDERS, make_batch


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("name", recipes())
def test_recipe(benchmark: Any, name: str, backend: str, threads: int, request: pytest.FixtureRequest) -> None:
    ladder = request.config.getoption("--ladder")
    if backend == "eager" and ladder == "small":
        pytest.skip("eager is timed on the larger ladders")
    rows, tokens = LADDERS[ladder][-1]
    batch, meta = make_batch(rows, tokens, turns=8)
    eager, chosen = (compiled_adv.build(_with(name, each)) for each in ("eager", backend))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)
        try:
            expected = eager(batch, meta)
        except CompiledAdvError as error:  # it asks for what these batches do not carry
            pytest.skip(str(error))
        chosen(batch, meta)
    run = lambda: chosen(batch, meta)  # noqa: E731
    off = cases.checked(run, batch, expected)
    benchmark.group = f"{name} {rows}x{tokens}"
    record(
        benchmark,
        run,
        suite="recipe",
        contender=backend,
        floor=Floor(batch, expected, threads=threads),
        recipe=name,
        rows=rows,
        tokens=tokens,
        difference=off,
    )


def _with(name: str, backend: str) -> compiled_adv.Spec:
    return compiled_adv.load_config(name).with_advantage(backend=backend)
