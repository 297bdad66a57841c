"""Gives compiled instances that tests share: each configuration is compiled once in a run, in one small bucket."""

import json
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

import compiled_adv
from compiled_adv.inductor import graphs_captured
from tests.random_cases import BUCKET, FIXED, Case, fixed_case

GRPO, CRITIC, TURNS = FIXED[1], FIXED[2], FIXED[6]  # group scores; values, KL, batch norm; turns, values, GVPO

Result = tuple[dict[str, Tensor], dict[str, list[int]]]


@cache
def _built(config: str) -> compiled_adv.Compute:
    return compiled_adv.build(json.loads(config))


def built(config: dict[str, Any]) -> compiled_adv.Compute:
    """The one instance of this configuration."""
    return _built(json.dumps(config, sort_keys=True))


def configured(actor: dict[str, Any], **compiled: Any) -> dict[str, Any]:
    """An actor block for the compiled backend, in the shared bucket unless `buckets` says otherwise."""
    settings = {"backend": "compiled", "compiled": {"buckets": BUCKET} | compiled}
    return {"actor": actor | {"advantage": actor.get("advantage", {}) | settings}}


def case_of(template: Any, rows: int = 5, tokens: int = 12, seed: int = 0, meta: str = "none") -> Case:
    return fixed_case(template, random.Random(seed), rows, tokens, meta)


def run(compute: compiled_adv.Compute, case: Case, **call: Any) -> Result:
    """What a call computes, and its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        out = compute(case.batch, case.meta, **case.call | call)
    return {key: x for key, x in out.items() if x is not case.batch.get(key)}, compute.last_warnings


def expected(case: Case, **call: Any) -> Result:
    """The same by the plain loops."""
    return run(compiled_adv.build(case.on("reference")), case, **call)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Equal, bit for bit unless a tolerance is given."""
    assert got.keys() == want.keys()
    for key, wanted in want.items():
        have = got[key]
        assert have.dtype == wanted.dtype and have.shape == wanted.shape, key
        near = (have.double() - wanted.double()).abs() <= tolerance * (1 + wanted.double().abs())
        assert near.all(), (key, have, wanted)


def assert_right(compute: compiled_adv.Compute, case: Case, **call: Any) -> None:
    """A call gives what the plain loops give, warnings included."""
    (got, got_warnings), (want, want_warnings) = run(compute, case, **call), expected(case, **call)
    assert_same(got, want, 1e-5)
    assert got_warnings == want_warnings


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """By torch's own word and its own count."""
    before = graphs_captured()
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
    assert graphs_captured() == before


def together(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """What each thread returns; they start at once."""
    gate, results = threading.Barrier(count), {}

    def go(i: int) -> None:
        gate.wait(60)
        try:
            results[i] = work(i)
        except Exception as error:  # shown by the assertion of the test
            results[i] = error

    threads = [threading.Thread(target=go, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return [results.get(i) for i in range(count)]
