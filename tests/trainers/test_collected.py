"""That the rest of the suite does not collect this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def collected(*args: str) -> str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *args]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout


def test_make_test_leaves_the_trainers_out() -> None:
    found = collected("tests", "--ignore-glob=tests/[!t]*")
    assert "test_layers.py" in found and "tests/trainers" not in found
