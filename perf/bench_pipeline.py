"""Whole pipelines: every recipe on every shape and mask, by each backend, beside the streaming floor and the peers.

pytest-benchmark times one contender after the other; figures that compare them come from `python -m perf.ratios`.
Each answer is compared before it is timed; a case that a contender cannot do is skipped with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from perf import cases, peers


def timed(benchmark: Any, case: cases.Case, contender: cases.Contender) -> None:
    benchmark.group = str(case)
    rows, tokens = case.shape
    benchmark.extra_info.update(recipe=case.recipe, rows=rows, tokens=tokens, mask=case.mask, **contender.facts)
    benchmark(contender.run)


@pytest.mark.parametrize("contender", [*cases.BACKENDS, "floor", *peers.NAMES])
def test_pipeline(benchmark: Any, case: cases.Case, contender: str, threads: int) -> None:
    try:
        if contender == "floor":
            timed(benchmark, case, case.floor(threads=threads))
        elif contender in cases.BACKENDS:
            timed(benchmark, case, case.backend(contender))
        else:
            timed(benchmark, case, case.peer(contender))
    except peers.Unsupported as error:
        pytest.skip(str(error))
