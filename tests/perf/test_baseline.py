"""A baseline is the small part of a run that its successors are judged by."""

import pytest

from compiled_adv.dashboard import write_dashboard
from perf.baseline import reduced
from tests.results import results, written


@pytest.mark.parametrize("slower, listed", [(1.0, 0), (1.5, 4)])
def test_a_run_is_judged_by_a_baseline_as_by_the_run_it_is_of(tmp_path, slower, listed):
    baseline = written(tmp_path / "baseline.json", reduced(results()))
    run = written(tmp_path / "run.json", results(commit="def", day=2, slower=slower))
    assert len(write_dashboard([run], tmp_path, baseline)[1]) == listed


def test_a_baseline_drops_what_is_not_judged():
    kept = reduced(results())["benchmarks"]
    assert {each["extra_info"]["contender"] for each in kept} == {"compiled", "eager"}
    assert all(each["extra_info"]["over_floor"] for each in kept)
