"""Files when the machine misbehaves: nothing that was reported written is lost or half there, and the next run works.

A full disk is a limit on the size of files, which the kernel enforces; a kill is SIGKILL at the moment of a write.
"""

import os
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import compiled_adv
from compiled_adv.errors import BuildFailed
from compiled_adv.kernels import build
from compiled_adv.rollouts import read_group, write_group
from tests.contracts.small import rows

Shell = Callable[..., Result]
RUN = ("run", "--config", "config.yaml", "--rollouts", "rollouts", "--out", "out")

# argv[1]: bytes that a file may have; argv[2]: how many files are flushed before the process is killed, -1 for all
SCRIPT = """
import os, resource, signal, sys
from compiled_adv import cli
size, left = int(sys.argv[1]), int(sys.argv[2])
if size:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
flush = os.fsync
def counted(descriptor):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    flush(descriptor)
os.fsync = counted
sys.argv = ["compiled-adv", *sys.argv[3:]]
cli.main()
"""


@pytest.fixture
def folder(tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rollouts/ and an eager configuration, and the current one."""
    (tmp_path / "config.yaml").write_text("actor: {advantage: {backend: eager}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, *words: str, size: int = 0, flushed: int = -1) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(size), str(flushed), *RUN, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def whole(out: Path) -> list[str]:
    """Names of the results; each must be readable."""
    paths = sorted(path for path in out.rglob("*") if path.is_file() and not path.name.startswith("."))
    assert all(read_group(path)["advantages"].ndim == 2 for path in paths)
    return [path.name for path in paths]


BOTH = ["group_000.safetensors", "group_001.safetensors"]


# ---- results ----


def test_a_full_disk_is_one_message_and_leaves_whole_files_only(folder: Path, shell: Shell) -> None:
    assert shell(*RUN).exit_code == 0
    done = run(folder, "--overwrite", size=(folder / "out" / BOTH[0]).stat().st_size)  # the other one is larger
    assert done.returncode == 2 and "OutputFailed" in done.stderr and "Traceback" not in done.stderr
    assert whole(folder / "out") == BOTH  # the old one of the other
    assert not [path for path in (folder / "out").iterdir() if path.name.startswith(".")]
    assert shell(*RUN, "--overwrite").exit_code == 0
    assert whole(folder / "out") == BOTH


@pytest.mark.parametrize(("flushed", "finished"), [(0, 0), (1, 1), (2, 1)])
def test_a_run_killed_while_writing_leaves_whole_files_only(
    folder: Path, shell: Shell, flushed: int, finished: int
) -> None:
    # each file is flushed, and then its folder
    assert run(folder, flushed=flushed).returncode == -9
    left = whole(folder / "out")
    assert left == BOTH[:finished]
    assert any(path.name.endswith(".tmp") for path in (folder / "out").iterdir()) == (flushed % 2 == 0)
    again = shell(*RUN, *(["--overwrite"] if left else []))
    assert again.exit_code == 0, again.stderr
    assert whole(folder / "out") == BOTH


def test_a_file_is_reported_written_only_when_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    flush, rename = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        flush(descriptor)

    def renamed(source: Path, target: Path) -> None:
        order.append("name")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_group(tmp_path / "group.safetensors", {"rewards": torch.zeros(2)})
    assert order == ["file", "name", "folder"]


def test_what_a_killed_run_left_does_not_count_as_results(folder: Path, shell: Shell) -> None:
    (folder / "out").mkdir()
    (folder / "out" / ".group_000.safetensors.0a1b2c3d.tmp").write_bytes(b"half")
    assert shell(*RUN).exit_code == 0


def test_other_hidden_files_still_count(folder: Path, shell: Shell) -> None:
    (folder / "out").mkdir()
    (folder / "out" / ".mine").touch()
    assert "--overwrite" in shell(*RUN).stderr


def test_a_clock_that_goes_back_changes_nothing(folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    result = shell(*RUN)
    assert result.exit_code == 0 and "-" not in result.stdout.split("tokens/s")[1].splitlines()[2]
    assert whole(folder / "out") == BOTH


# ---- the operator's cache ----

# Stands in for g++: writes a library of a few bytes to what follows -o.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo fake && exit 0
{before}
while [ "$1" != -o ]; do shift; done
printf library > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a stand-in for the compiler in place, with a command to run before it writes."""

    def use(before: str = "") -> None:
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(before=before))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    use()
    return use


def test_a_cache_folder_that_cannot_be_written_is_done_without(tmp_path: Path, compiler: Callable[[str], None]) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        path = build.library(tmp_path / "file" / "cache")
    assert path.read_bytes() == b"library" and tmp_path not in path.parents


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_is_done_without(tmp_path: Path, compiler: Callable[[str], None]) -> None:
    (tmp_path / "cache").mkdir(mode=0o555)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert build.library(tmp_path / "cache").read_bytes() == b"library"


def test_a_library_in_a_cache_that_became_read_only_is_used(tmp_path: Path, compiler: Callable[[str], None]) -> None:
    path = build.library(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o555)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.library(tmp_path / "cache") == path
    (tmp_path / "cache").chmod(0o755)


def test_a_damaged_library_that_cannot_be_removed_is_not_used(
    tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.library(tmp_path / "cache")
    path.write_bytes(b"half")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert build.library(tmp_path / "cache").read_bytes() == b"library"


def test_a_build_that_was_killed_leaves_nothing_that_is_used(tmp_path: Path, compiler: Callable[[str], None]) -> None:
    scratch = tmp_path / "cache" / "tmpabcd1234"
    scratch.mkdir(parents=True)
    (scratch / "operator.so").write_bytes(b"half")
    assert build.library(tmp_path / "cache").read_bytes() == b"library"


def test_a_disk_that_fills_while_building_is_an_error_and_the_next_build_works(
    tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    compiler("echo 'fatal error: No space left on device' >&2; exit 1")
    with pytest.raises(BuildFailed, match="No space left"):
        build.library(tmp_path / "cache")
    compiler("")
    assert build.library(tmp_path / "cache").read_bytes() == b"library"


def test_no_folder_at_all_is_a_named_error(
    tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.tempfile, "mkdtemp", full)
    with pytest.warns(RuntimeWarning), pytest.raises(BuildFailed, match="No space left"):
        build.library(tmp_path / "file")


def test_a_library_from_the_future_is_used_as_it_is(tmp_path: Path, compiler: Callable[[str], None]) -> None:
    path = build.library(tmp_path / "cache")
    os.utime(path, (2**33, 2**33))
    compiler("exit 1")
    assert build.library(tmp_path / "cache").exists()


# ---- the compile cache ----


def test_a_cache_of_compiled_code_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = {"cache_dir": str(tmp_path / "file" / "cache"), "buckets": {"rows": [1], "tokens": [3]}}
    compute = compiled_adv.build({"kl_ctl": 0.0, "advantage": {"backend": "compiled", "compiled": settings}})
    with pytest.warns(RuntimeWarning, match="cache_dir"):
        out = compute(rows("pgg", rewards=[1]))
    assert out["advantages"].tolist() == [[1, 1, 0]]
