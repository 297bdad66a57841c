"""The package as a user gets it: what an import loads, what the wheel holds, and that the wheel runs by itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = {"compiled_adv": "compiled_adv", "compiled_adv/passes": "passes", "compiled_adv/configs": "configs"}


def python(*words: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("compiled_adv", "passes", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = python("-c", "from setuptools.build_meta import build_wheel; build_wheel('dist')", cwd=folder)
    assert built.returncode == 0, built.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every module that `import compiled_adv` loads."""
    done = python("-c", "import sys, compiled_adv; print(*sys.modules)", cwd=tmp_path_factory.mktemp("import"))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["torch", "networkx", "yaml", "pydantic"])
def test_the_import_loads_the_core(module: str, loaded: set[str]) -> None:
    assert module in loaded


@pytest.mark.parametrize("module", ["typer", "rich", "safetensors", "plotly", "areal", "verl"])
def test_the_import_loads_no_extra_and_no_trainer(module: str, loaded: set[str]) -> None:
    assert module not in loaded


def test_the_shell_without_its_extra_says_how_to_get_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; import compiled_adv.cli"
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "compiled-adv[shell]" in done.stderr and "Traceback" not in done.stderr


def test_the_wheel_holds_every_source_recipe_and_rollout(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        f"{target}/{path.relative_to(REPOSITORY / source).as_posix()}"
        for target, source in CODE.items()
        for path in (REPOSITORY / source).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix != ".html"  # a picture that compiled-adv tune left
    }
    assert ours - held == set()


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    roots = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {re.sub(r"-.*", "", root) for root in roots} == {"compiled_adv"}


def test_the_wheel_brings_the_command(site: Path) -> None:
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    assert "compiled-adv = compiled_adv.cli:main" in entry_points.read_text()


def test_the_main_job_runs_from_the_wheel_alone(site: Path, tmp_path: Path) -> None:
    code = f"import compiled_adv.cli as cli; assert cli.__file__.startswith({str(site)!r}); cli.main()"
    done = python("-c", code, "run", "--json", cwd=tmp_path, path=site)
    assert done.returncode == 0, done.stderr
    assert [batch["rows"] for batch in json.loads(done.stdout)["batches"]] == [48, 115]


def test_constraints_pin_every_dependency_and_leave_torch_builds_open() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[\[><= ]", name)[0].lower() for name in wanted} - {"compiled-adv"}
    assert names - pins.keys() == set()
    assert pins["torch"] == "2.13.0"
