"""A baseline is the small part of a run that its successors are judged by."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_adv.dashboard import OURS, read_run, write_dashboard
from compiled_adv.errors import OutputFailed, ResultsFile
from perf.baseline import reduced, write_baseline
from tests.results import results, written

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "perf" / "baselines" / "cpu-small.json"


@pytest.mark.parametrize("slower, listed", [(1.0, 0), (1.5, 4)])
def test_a_run_is_judged_by_a_baseline_as_by_the_run_it_is_of(tmp_path, slower, listed):
    baseline = written(tmp_path / "baseline.json", reduced(results()))
    run = written(tmp_path / "run.json", results(commit="def", day=2, slower=slower))
    assert len(write_dashboard([run], tmp_path, baseline)[1]) == listed


def test_a_baseline_drops_what_is_not_judged():
    kept = reduced(results())["benchmarks"]
    assert {each["extra_info"]["contender"] for each in kept} == {"compiled", "eager"}
    assert all(each["extra_info"]["over_floor"] for each in kept)


def test_what_a_dashboard_reads_is_enough_for_a_baseline(tmp_path):
    bare = results()
    del bare["datetime"], bare["commit_info"]["dirty"], bare["benchmarks"][0]["stats"]["q1"]
    bare["benchmarks"][1]["extra_info"] = None
    write_baseline(written(tmp_path / "run.json", bare), tmp_path / "baseline.json")
    assert read_run(tmp_path / "baseline.json").results


def test_a_baseline_does_not_take_the_place_of_its_run(tmp_path):
    run = written(tmp_path / "run.json", results())
    before = run.read_bytes()
    with pytest.raises(OutputFailed):
        write_baseline(run, run)
    assert run.read_bytes() == before


def test_a_run_without_a_floor_is_no_baseline(tmp_path):
    for each in (none := results())["benchmarks"]:
        each["extra_info"].pop("over_floor", None)
    with pytest.raises(ResultsFile):
        write_baseline(written(tmp_path / "run.json", none), tmp_path / "baseline.json")
    assert not (tmp_path / "baseline.json").exists()


def test_the_committed_baseline_is_small():
    assert COMMITTED.stat().st_size < 40_000


def test_the_committed_baseline_judges_a_run_of_the_same_benchmarks(tmp_path):
    assert write_dashboard([COMMITTED], tmp_path, COMMITTED)[1] == []
    slower = json.loads(COMMITTED.read_bytes())
    worst = slower["benchmarks"][0]
    worst["extra_info"]["over_floor"] = [10 * x for x in worst["extra_info"]["over_floor"]]
    (found,) = write_dashboard([written(tmp_path / "run.json", slower)], tmp_path, COMMITTED)[1]
    assert found.startswith(worst["fullname"])


def test_the_committed_baseline_is_of_the_benchmarks_of_the_small_ladder():
    """Those that are judged: whole pipelines and recipes, by our own backends."""
    command = [sys.executable, "-m", "pytest", "perf/bench_pipeline.py", "perf/bench_recipes.py"]
    command += ["--ladder", "small", "--collect-only", "-q"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.splitlines()
    judged = {line for line in listed if line.removesuffix("]").rsplit("-", 1)[-1] in OURS}
    assert {*read_run(COMMITTED).results} == judged
