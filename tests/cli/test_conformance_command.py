"""`compiled-adv conformance`: a line per failing case, the counts, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Shell = Callable[..., Result]

BATCH = {
    "input_ids": {"dtype": "int64", "shape": [1, 3], "data": [[5, 6, 7]]},
    "attention_mask": {"dtype": "bool", "shape": [1, 3], "data": [[True, True, True]]},
    "loss_mask": {"dtype": "int64", "shape": [1, 3], "data": [[0, 1, 1]]},
    "logprobs": {"dtype": "float32", "shape": [1, 3], "data": [[0.0, -0.5, -0.25]]},
    "rewards": {"dtype": "float32", "shape": [1], "data": [0.75]},
    "is_truncated": {"dtype": "bool", "shape": [1], "data": [False]},
}


def write(folder: Path, name: str, *, actor: dict[str, Any] | None = None, **ends: Any) -> None:
    actor = {"kl_ctl": 0.0} | (actor or {})
    case = {"name": name, "tags": [], "config": actor, "batch": BATCH, "meta": None} | ends
    (folder / f"{name}.json").write_text(json.dumps(case))


def returns(value: float) -> dict[str, Any]:
    """Every token of the outcome-only batch has the outcome as its return, up to column L-2 = 1."""
    return {"returns": {"dtype": "float64", "shape": [1, 3], "data": [[value, value, 0.0]]}}


def test_passing_cases_print_counts_alone(shell: Shell, tmp_path: Path) -> None:
    write(tmp_path, "right", expected=returns(0.75))
    write(tmp_path, "refused", actor={"kl_estimator": "k9"}, error="unknown kind")
    result = shell("conformance", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "2 passed, 0 failed, 0 skipped\n")


def test_a_failing_case_is_one_line_and_exit_code_1(shell: Shell, tmp_path: Path) -> None:
    write(tmp_path, "right", expected=returns(0.75))
    write(tmp_path, "wrong", expected=returns(0.5))
    write(tmp_path, "refused_wrongly", actor={"kl_estimator": "k9"}, expected=returns(0.75))
    result = shell("conformance", tmp_path)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in lines[:-1]] == ["refused_wrongly", "wrong"]
    assert lines[-1] == "1 passed, 2 failed, 0 skipped"


@pytest.mark.parametrize(("rules", "counts"), [("default", "1 passed, 0 failed, 1 skipped"), ("all", ", 0 skipped")])
def test_cases_of_another_rule_set_are_skipped(shell: Shell, tmp_path: Path, rules: str, counts: str) -> None:
    write(tmp_path, "right", expected=returns(0.75))
    write(tmp_path, "strict", actor={"advantage": {"rules": "strict"}}, expected=returns(0.75))
    assert counts in shell("conformance", tmp_path, "--rules", rules).stdout


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_backend_can_be_chosen(shell: Shell, tmp_path: Path, backend: str) -> None:
    write(tmp_path, "right", expected=returns(0.75))
    assert shell("conformance", tmp_path, "--backend", backend).exit_code == 0


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_a_folder_without_cases_is_exit_code_2(shell: Shell, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = shell("conformance", tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert name in result.stderr and "Traceback" not in result.stderr
