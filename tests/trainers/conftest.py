"""Tests against the trainers' own packages, in .venv-peers. Collected only where this folder is asked for by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Helpers here are imported by their bare names, in spawned processes too: a peer installs a package `tests` of its own.
sys.path.insert(0, str(HERE))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(path == HERE or HERE in path.parents for path in asked) else True
