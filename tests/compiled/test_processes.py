"""Processes: a second one starts from the on-disk cache, a damaged cache is rebuilt, workers work, forks never hang."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import inductor
from tests.compiled.shared import GRPO, assert_right, assert_same, built, case_of, configured, run

ROOT = Path(__file__).parents[2]

# Compiles into argv[1], saves the result to argv[2], and prints how torch's cache did.
SCRIPT = """
import json, sys, torch
import torch._inductor.config
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch._inductor.config.compile_threads = 1
import compiled_adv
from tests.compiled.shared import GRPO, case_of, configured, run
compute = compiled_adv.build(configured(GRPO.actor, cache_dir=sys.argv[1]))
result, _ = run(compute, case_of(GRPO))
torch.save(result, sys.argv[2])
found = {key: counters["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss", "bypass")}
print(json.dumps(found | {"seconds": compute.cache.info().compile_seconds}))
"""


def start(cache: Path, out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, str(cache), str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A cache folder that two processes filled at once, a result of theirs, and how the first one did."""
    cache, out = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("out")
    both = [start(cache, out / f"{i}.pt") for i in range(2)]
    found = [finish(process) for process in both]
    assert_same(torch.load(out / "0.pt"), torch.load(out / "1.pt"))
    return cache, out / "0.pt", found[0]


def test_processes_that_fill_one_cache_at_once_are_both_right(cold):
    _, result, _ = cold
    assert_same(torch.load(result), run(built(case_of(GRPO).on("compiled")), case_of(GRPO))[0])


def test_nothing_is_kept_out_of_the_cache(cold):
    assert cold[2]["bypass"] == 0


def test_the_cache_lies_in_the_configured_folder(cold):
    cache, _, _ = cold
    assert any(path.suffix == ".so" for path in cache.rglob("*"))


def test_a_second_process_starts_from_the_cache(cold, tmp_path: Path):
    cache, result, _ = cold
    found = finish(start(cache, tmp_path / "second.pt"))
    assert (found["hit"], found["miss"]) == (1, 0)
    assert_same(torch.load(tmp_path / "second.pt"), torch.load(result))


DAMAGE = {
    "everything cut off": ("*", lambda data: data[: len(data) // 2]),
    "everything garbage": ("*", lambda data: b"\0" * len(data)),
    "libraries cut off": ("*.so", lambda data: data[: len(data) // 2]),
    "libraries gone": ("*.so", None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_rebuilt(cold, damage: str, tmp_path: Path):
    cache, result, _ = cold
    broken = tmp_path / "cache"
    shutil.copytree(cache, broken)
    pattern, change = DAMAGE[damage]
    for path in [path for path in broken.rglob(pattern) if path.is_file() and path.suffix != ".lock"]:
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))
            os.utime(path, (0, 0))  # damaged long ago
    finish(start(broken, tmp_path / "rebuilt.pt"))
    assert_same(torch.load(tmp_path / "rebuilt.pt"), torch.load(result))
    if damage == "everything cut off":
        found = finish(start(broken, tmp_path / "again.pt"))
        assert found["hit"] == 1, "what was rebuilt is kept"


def test_what_an_error_names_is_removed_with_what_it_was_made_from_unless_it_is_new(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("entry", "kernel.so", "kernel.main.cpp", "kernels.so", "fresh.so"):
        (tmp_path / name).write_bytes(b"\0")
        os.utime(tmp_path / name, (0, 0) if name != "fresh.so" else None)
    error = ImportError("no PyInit_kernel", path=str(tmp_path / "kernel.so"))
    error.__cause__ = OSError(f"{tmp_path}/entry cannot be read, nor {tmp_path}/fresh.so")
    assert inductor._remove_damaged(error, 1.0) and not inductor._remove_damaged(error, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.so", "kernels.so"]


def test_a_cache_folder_that_another_process_wipes_is_filled_again(tmp_path: Path):
    folder = tmp_path / "cache"
    buckets = {"rows": [8], "tokens": [16, 32]}
    compute = compiled_adv.build(configured(GRPO.actor, cache_dir=str(folder), buckets=buckets))
    for tokens in (9, 20, 12):
        assert_right(compute, case_of(GRPO, 5, tokens))
        shutil.rmtree(folder, ignore_errors=True)
    assert compute.cache.info().compiles == 2 and compute.cache.info().fallbacks == 0


# ---- workers ----


def work(config: str, results: Any) -> None:
    """A worker that knows the configuration alone."""
    import compiled_adv

    torch.set_num_threads(1)
    got, _ = run(compiled_adv.build(json.loads(config)), case_of(GRPO))
    results.put({key: x.tolist() for key, x in got.items()})


def test_spawned_workers_work_after_first_use():
    compute = built(case_of(GRPO).on("compiled"))
    want = {key: x.tolist() for key, x in run(compute, case_of(GRPO))[0].items()}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(json.dumps(configured(GRPO.actor)), results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert found == [want, want]


# First use, then a fork: the child computes, too.
FORK = """
import os, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from tests.compiled.shared import GRPO, assert_same, built, case_of, run
small, large = case_of(GRPO), case_of(GRPO, 8, 128)
compute = built(small.on("compiled"))
want, _ = run(compute, small)
run(compute, large)
if int(sys.argv[1]) > 1:
    torch.ones(1 << 22).sum()  # OpenMP's threads exist
child = os.fork()
if child == 0:
    try:
        assert_same(run(compute, small)[0], want)
        word = "works"
    except Exception as error:
        word = type(error).__name__
    print(word, flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert_same(run(compute, small)[0], want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("threads, word", [(1, "works"), (2, "Forked")])
def test_a_fork_after_first_use_works_or_raises_and_never_hangs(threads: int, word: str):
    command = [sys.executable, "-c", FORK, str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == word
