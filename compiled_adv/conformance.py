"""Takes a folder of golden files (inputs with right outputs, warnings and refusals); gives one result per case.

A golden file is JSON: {name, config, batch, meta, expected, expected_extra?, expected_warnings?} or
{name, config, batch, meta, error}. Tensors are {dtype, shape, data}.
Right is |got - expected| <= 1e-4 * (1 + |expected|).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_adv.advantage import OutcomeResult, OutcomeRewardInputs
from compiled_adv.equality import unequal
from compiled_adv.errors import AdvantageWarning, CompiledAdvError, FileError

TOLERANCE = 1e-4
# Expected arrays are float64 whatever the computation gives; the kind of number matters for these alone.
KIND_MATTERS = ("rewards", "is_truncated")

# (config with its `actor` block, batch, meta, per-call values) -> (outputs, warnings by name)
ComputeFn = Callable[
    [dict[str, Any], dict[str, Tensor], Any, dict[str, Any]], tuple[Mapping[str, Any], Mapping[str, list[int]]]
]


@dataclass(frozen=True)
class CaseResult:
    name: str
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""


def run_folder(
    folder: str | Path, *, backend: str | None = None, rules: Literal["default", "strict", "all"] = "all"
) -> list[CaseResult]:
    """Run a folder's cases of one rule set, or of all; `backend` takes the place of the configured one."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise FileError("there is no golden file here", at=str(folder), hint="a folder with one .json file per case")
    compute_fn = through_build(backend)
    return [_run_file(path, compute_fn, rules) for path in paths]


def through_build(backend: str | None) -> ComputeFn:
    """Cases go the way of every user: build, then call."""

    def compute(
        config: dict[str, Any], batch: dict[str, Tensor], meta: Any, call: dict[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, list[int]]]:
        from compiled_adv import build  # here, since importing compiled_adv must not load this file

        if backend is not None:
            advantage = dict(config["actor"].get("advantage") or {}, backend=backend)
            config = {"actor": {**config["actor"], "advantage": advantage}}
        program = build(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AdvantageWarning)  # compared by name and rows instead
            return program(batch, meta, **call), program.last_warnings

    return compute


def check_case(case: Mapping[str, Any], compute_fn: ComputeFn) -> CaseResult:
    """One case through one computation. Refusing at build and refusing at the call both count."""
    name = str(case.get("name", "?"))
    try:
        config, call = read_config(case["config"])
        batch = {key: read_tensor(array) for key, array in case["batch"].items()}
        meta, expects_error = case["meta"], "error" in case
        expected = {} if expects_error else dict(case["expected"]) | dict(case.get("expected_extra") or {})
        if not expects_error and not expected:
            raise ValueError("it expects nothing")
    except Exception as error:
        return CaseResult(name, "failed", f"not a golden file: {type(error).__name__}: {error}")
    try:
        got, got_warnings = compute_fn(config, batch, meta, call)
    except CompiledAdvError as error:
        return CaseResult(name, "passed") if expects_error else CaseResult(name, "failed", f"refused: {error}")
    except Exception as error:  # one broken case must not hide the others
        return CaseResult(name, "failed", f"raised {type(error).__name__}: {error}")
    if expects_error:
        return CaseResult(name, "failed", f"accepted, should be refused: {case['error']}")
    faults = [fault for key, array in expected.items() for fault in _differences(key, got, array)]
    if "expected_warnings" in case and dict(got_warnings) != case["expected_warnings"]:
        faults.append(f"warnings are {dict(got_warnings)}, should be {case['expected_warnings']}")
    return CaseResult(name, "failed" if faults else "passed", "; ".join(faults))


def affine(
    inputs: OutcomeRewardInputs, *, factor: float = 1.0, shift: float = 0.0, references: bool = True
) -> OutcomeResult:
    """The golden files' outcome function: r * factor + shift, references shaped alike unless told otherwise."""
    rewards_B = inputs.data["rewards"].to(torch.float32)
    groups = inputs.meta.rollout_groups if inputs.meta is not None else None
    explicit = any(reference is not None for group in groups or [] if group for reference in group.rewards)
    if inputs.meta is None or groups is None or not explicit or not references:
        return OutcomeResult(rewards_B * factor + shift)
    raw_N, row = [], 0
    for size, group in zip(inputs.meta.traj_group_sizes, groups, strict=True):
        counts = group.row_counts if group else [1] * size
        given = group.rewards if group and group.rewards else [None] * len(counts)
        for count, reference in zip(counts, given, strict=True):
            raw_N.append(float(rewards_B[row]) if reference is None else reference)
            row += count
    return OutcomeResult(rewards_B * factor + shift, rewards_B.new_tensor(raw_N) * factor + shift)


# -- reading a golden file --------------------------------------------------------------------------------------------


def read_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config that `build` takes, and the per-call values: bare names become paths, {"float": "nan"} a number."""
    actor = _numbers(config)
    call = actor.pop("call", None) or {}
    if isinstance(actor.get("gae_lambda"), str) and "." not in actor["gae_lambda"]:
        actor["gae_lambda"] = f"compiled_adv.gae.{actor['gae_lambda']}"
    for stage in (actor.get("advantage") or {}).values():
        if isinstance(stage, dict) and stage.get("implementation") == "affine":
            stage["implementation"] = "compiled_adv.conformance.affine"
    return {"actor": actor}, call


def read_tensor(array: Mapping[str, Any]) -> Tensor:
    return torch.tensor(array["data"], dtype=getattr(torch, array["dtype"])).reshape(array["shape"])


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return float(value["float"]) if set(value) == {"float"} else {key: _numbers(item) for key, item in value.items()}


def _run_file(path: Path, compute_fn: ComputeFn, rules: str) -> CaseResult:
    try:
        case = json.loads(path.read_text(encoding="utf-8"))
        case_rules = (case["config"].get("advantage") or {}).get("rules") or "default"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return CaseResult(path.stem, "failed", f"not a golden file: {type(error).__name__}: {error}")
    if rules not in ("all", case_rules):
        return CaseResult(path.stem, "skipped", f"its rules are {case_rules}")
    return check_case({"name": path.stem, **case}, compute_fn)


# -- comparing --------------------------------------------------------------------------------------------------------


def _differences(key: str, got: Mapping[str, Any], array: Mapping[str, Any]) -> Iterator[str]:
    expected, actual = read_tensor(array), got.get(key)
    if not isinstance(actual, Tensor):
        yield f"{key} is missing" if actual is None else f"{key} is no tensor"
        return
    if key in KIND_MATTERS and _kind(actual.dtype) != _kind(expected.dtype):
        yield f"{key} is {actual.dtype}, should be {_kind(expected.dtype)}"
    if actual.shape != expected.shape:
        yield f"{key} has shape {list(actual.shape)}, should be {list(expected.shape)}"
        return
    actual = actual.detach().cpu()
    wrong = unequal(actual, expected, TOLERANCE)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        have, want = actual[at].item(), expected[at].item()
        yield f"{key}{list(at)} is {have:.7g}, should be {want:.7g} ({int(wrong.sum())} wrong)"


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"
