"""Every golden file, through build and on every backend: right numbers, right warnings, refusals where due."""

import json
from pathlib import Path

import pytest

from compiled_adv.conformance import check_case, through_build

HERE = Path(__file__).parent
FOLDERS = {"default": 69, "strict": 35}  # cases in each, so that a lost file shows
BACKENDS = ("reference", "eager")
PATHS = [path for folder in FOLDERS for path in sorted((HERE / folder).glob("*.json"))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_case_holds(path: Path, backend: str) -> None:
    result = check_case(json.loads(path.read_text()), through_build(backend))
    assert result.status == "passed", result.reason


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_golden_case_is_lost(folder: str) -> None:
    assert len(list((HERE / folder).glob("*.json"))) == FOLDERS[folder]
