"""Imports go one way: design.md's arrow, read from the source. A room may import what comes before it, and itself."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each room in the order of the arrow. A new file gets its place here.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("errors", "scalars", "equality", "memory", "files", "page", "chart", "picture"),
    ("kernels",),
    ("config_file", "batch", "channel", "stage", "cache", "advantage_algorithms"),
    ("spec", "advantage"),  # parse, and the contracts
    ("gae", "plugins"),
    ("recipes",),
    ("resolve",),
    ("stages",),
    ("pipeline",),  # wire
    ("verify", "status", "admit"),
    ("rewrite",),
    ("passes",),
    ("program",),  # lower
    ("bucket", "inductor", "cudagraph", "distributed"),
    ("executable", "reference"),  # compile, run
    ("arguments", "placing"),
    ("show", "summary", "stats", "shadow", "rollouts", "shards"),  # show
    ("compiler",),
    ("__init__",),
    ("conformance", "report", "dashboard", "tune", "diagnosis", "doctor", "idle", "integrations"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, room in enumerate(ROOMS) for name in room}

# (importer, imported): why this arrow may point back
BACK = {("gae", "resolve"): "compute_gae_lambda looks the configured function up when an estimator asks for it"}

SHELL = ("typer", "rich", "safetensors", "plotly")
TRAINERS = ("areal", "verl", "trl", "torchrl", "slime")


def room(path: Path) -> str:
    """The room of a source file: `stages/plugin.py` -> stages, `pipeline.py` -> pipeline."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "compiled_adv" else "passes"


FILES = sorted([*(ROOT / "compiled_adv").rglob("*.py"), *(ROOT / "passes").rglob("*.py")])


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of what a file imports anywhere, but for types alone."""
    return tuple(_walk(ast.parse(path.read_text())))


def _walk(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        for other in node.orelse:
            yield from _walk(other)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def ours(path: Path) -> set[str]:
    """The rooms that a file imports."""
    names = [name.split(".") for name in imports(path) if name.split(".")[0] == "compiled_adv"]
    return {parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__" for parts in names}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_has_its_room(path):
    assert room(path) in RANK, "give it a place in ROOMS"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_arrow_points_back(path):
    here = room(path)
    allowed = {imported for importer, imported in BACK if importer == here}
    later = {name for name in ours(path) if RANK[name] > RANK.get(here, -1)} - allowed
    assert not later, f"{here} comes before {', '.join(sorted(later))}"


@pytest.mark.parametrize("pair", BACK, ids=" -> ".join)
def test_an_exception_is_still_needed(pair):
    importer, imported = pair
    assert any(imported in ours(path) for path in FILES if room(path) == importer)


def importers(name: str) -> set[str]:
    return {room(path) for path in FILES if name in ours(path)}


def test_only_the_composition_root_imports_the_passes():
    assert importers("passes") - {"passes"} == {"compiler"}


def test_nothing_imports_the_shell_but_what_runs_it():
    assert importers("cli") == {"__main__"}


def test_kernels_know_nothing_of_the_computation():
    found = {name for path in FILES if room(path) == "kernels" for name in ours(path)}
    assert found <= {"kernels", "errors", "memory"}


def test_the_rewriting_engine_knows_no_step_of_the_computation_by_name():
    (path,) = (path for path in FILES if room(path) == "rewrite")
    stages = {name for name in imports(path) if name.startswith("compiled_adv.stages")}
    assert stages <= {"compiled_adv.stages.fused.Fused"}


def test_the_reference_shares_no_stage_with_what_it_checks_but_the_plugins_wrapper():
    (path,) = (path for path in FILES if room(path) == "reference")
    shared = {name for name in imports(path) if name.startswith(("compiled_adv.stages", "compiled_adv.kernels"))}
    assert all(name.startswith("compiled_adv.stages.plugin.") for name in shared)


def test_one_file_touches_the_underscore_named_modules_of_torch():
    touching = {
        relative(path)
        for path in FILES
        if any(name.startswith("torch.") and any(p.startswith("_") for p in name.split(".")) for name in imports(path))
    }
    assert touching <= {"compiled_adv/inductor.py"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_shells_libraries_stay_in_the_shell(path):
    if room(path) not in ("cli", "summary", "rollouts", "page", "tune"):
        assert not {name.split(".")[0] for name in imports(path)} & {*SHELL}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_trainer_is_imported(path):
    if room(path) != "integrations":
        assert not {name.split(".")[0] for name in imports(path)} & {*TRAINERS}


def test_stages_look_no_names_up():
    stages = [path for path in FILES if room(path) == "stages"]
    assert all(not name.startswith("compiled_adv.resolve.resolve") for path in stages for name in imports(path))
