"""Gives the golden cases for the compiled backend: all of them in one bucket, a dozen of them in three more.

Run as a module it compiles them, last ones first, into torch's on-disk cache: tests/compiled/conftest.py starts it
beside the tests, which begin with the first ones, so that both cores of a small machine compile.
"""

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

import compiled_adv
from compiled_adv.conformance import CaseResult, check_case
from tests.compiled.shared import built, configured

FOLDER = Path(__file__).parent.parent / "golden"
CASES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/*.json"))}
ONE = {"rows": [12], "tokens": [128]}  # holds them all

# Between them these take every built-in stage.
DOZEN = (
    "adv_norm_batch",
    "fold_token",
    "fold_turn",
    "many_at_once_strict",
    "process_gvpo_inherits",
    "process_weighted_table",
    "reward_norm_mixed_levels",
    "reward_norm_uneven_groups",
    "rollout_references",
    "token_gap_carries_state",
    "truncated_by_width",
    "turn_values_bootstrap",
)


def shape(name: str) -> tuple[int, int]:
    rows, tokens = CASES[name]["batch"]["loss_mask"]["shape"]
    return rows, tokens


def buckets(name: str) -> dict[str, dict[str, list[int]]]:
    """Four buckets for a case: its own shape, and the next larger in either or both."""
    rows, tokens = shape(name)
    return {
        "exact": {"rows": [rows], "tokens": [tokens]},
        "more tokens": {"rows": [rows], "tokens": ONE["tokens"]},
        "more rows": {"rows": ONE["rows"], "tokens": [tokens]},
        "more of both": ONE,
    }


def instance(config: Mapping[str, Any], bucket: Mapping[str, list[int]] = ONE) -> compiled_adv.Compute:
    return built(configured(config["actor"], buckets=bucket))


def call(
    config: dict[str, Any], batch: dict[str, Any], meta: Any, per_call: dict[str, Any], **where: Any
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """A case's call, as conformance.check_case wants it."""
    compute = instance(config, **where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        return compute(batch, meta, **per_call), compute.last_warnings


def check(name: str, bucket: Mapping[str, list[int]] = ONE) -> CaseResult:
    return check_case(CASES[name], lambda *given: call(*given, bucket=bucket))


def outputs(name: str, bucket: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
    """What a case computes in a bucket."""
    seen: dict[str, Any] = {}

    def keep(config: Any, batch: dict[str, Any], meta: Any, per_call: Any) -> Any:
        out, found = call(config, batch, meta, per_call, bucket=bucket)
        seen.update((key, x) for key, x in out.items() if x is not batch.get(key))
        return out, found

    assert check_case(CASES[name], keep).status == "passed"
    return seen


def jobs() -> list[tuple[str, Mapping[str, list[int]]]]:
    """Every case and bucket, in the order of the tests."""
    return [(name, ONE) for name in CASES] + [(name, where) for name in DOZEN for where in buckets(name).values()]


if __name__ == "__main__":
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(int(sys.argv[1]))
    for name, bucket in reversed(jobs()):
        check(name, bucket)
