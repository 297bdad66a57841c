"""compiled-adv dashboard: what it refuses, what it calls a regression, and a page that holds all it needs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled_adv.cli import app
from compiled_adv.dashboard import Ratio, is_regression
from tests.results import results, written


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["dashboard", *map(str, words)])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return written(tmp_path / "good.json", results())


def test_the_page_is_one_file_that_asks_for_nothing(good: Path, tmp_path: Path) -> None:
    done = run(good, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index.html"]
    parts = (tmp_path / "out/index.html").read_text().split("<script")
    own = [part for part in parts if "plotly.js v" not in part]
    assert len(own) == len(parts) - 1
    assert not any(word in part for part in own for word in ("http:", "https:", "src="))


def test_the_headline_states_the_main_result(good: Path, tmp_path: Path) -> None:
    run(good, "--out", tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<h1>3 x the streaming floor, 30 x faster than AReaL at 64 rows x 1,024 tokens (token_gae)</h1>" in page


GOOD = json.dumps(results())
NO_TIME = results()
NO_TIME["benchmarks"][0]["stats"]["median"] = "soon"
NO_STAMP = results()
del NO_STAMP["machine_info"]["stamp"]["cpu"]


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "is empty"),
        (GOOD[: len(GOOD) // 2], "cut short"),
        ("[1, 2]", "no results"),
        ("{}", "no results"),
        ("null", "no results"),
        ("[" * 100_000, "cut short"),
        (results() | {"benchmarks": []}, "no benchmark"),
        (results() | {"benchmarks": [1]}, "no results"),
        (NO_TIME, "no positive time"),
        (json.dumps(results()).replace('"median": ', '"median": NaN, "x": ', 1), "no positive time"),
        (NO_STAMP, "where it was measured"),
    ],
)
def test_results_that_are_none_are_refused(content: Any, says: str, tmp_path: Path) -> None:
    done = run(written(tmp_path / "bad.json", content), "--out", tmp_path / "out")
    assert done.exit_code == 2 and says in done.output and "ResultsFile" in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none.json", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "cannot be read" in done.output


@pytest.mark.parametrize("difference", [{"cpu": "another"}, {"threads": 2}, {"device": "H200"}, {"cores": 4}])
def test_results_of_two_machines_are_refused(good: Path, tmp_path: Path, difference: dict[str, Any]) -> None:
    other = written(tmp_path / "other.json", results(commit="def", **difference))
    for words in ((good, other), (good, "--fail-on-regression", other)):
        done = run(*words, "--out", tmp_path / "out")
        assert done.exit_code == 2 and "two machines" in done.output, done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("side", ["results", "baseline"])
def test_a_benchmark_on_one_side_only_is_refused(good: Path, tmp_path: Path, side: str) -> None:
    fewer = results()
    fewer["benchmarks"] = [x for x in fewer["benchmarks"] if "grpo 64x1024-compiled" not in x["fullname"]]
    other = written(tmp_path / "fewer.json", fewer)
    one, two = (other, good) if side == "results" else (good, other)
    done = run(one, "--out", tmp_path / "out", "--fail-on-regression", two)
    assert done.exit_code == 2 and "BenchmarkMissing" in done.output and "grpo 64x1024-compiled" in done.output


def test_a_regression_is_listed_and_exits_with_1(good: Path, tmp_path: Path) -> None:
    slow = written(tmp_path / "slow.json", results(commit="def", day=2, slower=1.5))
    done = run(slow, "--out", tmp_path / "out", "--fail-on-regression", good)
    assert done.exit_code == 1
    assert done.output.count("regression: ") == 4 and "3 x the floor before, 4.5 x now" in done.output
    assert (tmp_path / "out/index.html").exists()


def test_no_regression_exits_with_0(good: Path, tmp_path: Path) -> None:
    assert run(good, "--out", tmp_path / "out", "--fail-on-regression", good).exit_code == 0


@pytest.mark.parametrize(
    "before, after, expected",
    [
        (Ratio(2.0, 1.9, 2.1), Ratio(2.6, 2.5, 2.7), True),
        (Ratio(2.0, 1.9, 2.1), Ratio(2.4, 2.3, 2.5), False),  # under a quarter
        (Ratio(2.0, 1.5, 2.6), Ratio(2.6, 2.5, 2.7), False),  # within the noise
        (Ratio(2.6, 2.5, 2.7), Ratio(2.0, 1.9, 2.1), False),  # faster
    ],
)
def test_the_rule_is_on_ratios_and_their_quartiles(before: Ratio, after: Ratio, expected: bool) -> None:
    assert is_regression(before, after) is expected


def test_a_run_on_a_slower_day_is_no_regression(good: Path, tmp_path: Path) -> None:
    slow = results(commit="def", day=2)
    for each in slow["benchmarks"]:
        each["stats"] = {name: 3 * x for name, x in each["stats"].items()}
    path = written(tmp_path / "slow.json", slow)
    assert run(path, "--out", tmp_path / "out", "--fail-on-regression", good).exit_code == 0


def test_what_was_not_measured_is_not_drawn_and_said(tmp_path: Path) -> None:
    only = results()
    only["benchmarks"] = [x for x in only["benchmarks"] if x["extra_info"]["suite"] == "stage"]
    run(written(tmp_path / "only.json", only), "--out", tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<figure") == 1 and "History: results of one commit only" in page


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\u2028"


def test_names_of_a_file_are_escaped(tmp_path: Path) -> None:
    bad = copy.deepcopy(results())
    bad["commit_info"]["id"] = bad["machine_info"]["stamp"]["cpu"] = HOSTILE
    for each in bad["benchmarks"]:
        each["fullname"] += HOSTILE
        for key in ("recipe", "mask", "contender", "note", "stage", "bucket"):
            each["extra_info"][key] = HOSTILE
    done = run(written(tmp_path / "bad.json", bad), "--out", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "index.html").read_text()
    assert "<script>alert" not in page and "<img" not in page.split("</main>")[0]
    assert page.count("</script>") == page.count("<figure") + 2


def test_a_page_that_cannot_be_written_leaves_nothing(good: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = run(good, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "OutputFailed" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json", "out"]


@pytest.mark.parametrize("name", ["rows", "tokens", "difference", "padding"])
@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf")])
def test_a_fact_that_is_no_number_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    bad = results()
    for each in bad["benchmarks"]:
        each["extra_info"][name] = value
    done = run(written(tmp_path / "bad.json", bad), "--out", tmp_path / "out")
    assert done.exit_code == 2 and "ResultsFile" in done.output and not (tmp_path / "out").exists(), done.output


@pytest.mark.parametrize("value", [-5, True, 1.5, "5"])
def test_rows_that_are_no_whole_number_are_refused(value: Any, tmp_path: Path) -> None:
    bad = results()
    bad["benchmarks"][0]["extra_info"]["rows"] = value
    done = run(written(tmp_path / "bad.json", bad), "--out", tmp_path / "out")
    assert done.exit_code == 2 and "no whole numbers" in done.output, done.output


def test_a_benchmark_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    bad = results()
    bad["benchmarks"].append(bad["benchmarks"][0])
    done = run(written(tmp_path / "bad.json", bad), "--out", tmp_path / "out")
    assert done.exit_code == 2 and "a benchmark twice" in done.output, done.output


def test_a_page_does_not_take_the_place_of_its_results(tmp_path: Path) -> None:
    source = written(tmp_path / "index.html", results())
    before = source.read_bytes()
    done = run(source, "--out", tmp_path)
    assert done.exit_code == 2 and "is an input" in done.output and source.read_bytes() == before


@pytest.mark.parametrize("to, code", [(">&-", 0), (">/dev/full", 2)])
def test_an_output_that_takes_nothing_is_no_traceback(good: Path, tmp_path: Path, to: str, code: int) -> None:
    words = [sys.executable, "-m", "compiled_adv", "dashboard", str(good), "--out", str(tmp_path / "out")]
    done = subprocess.run(["sh", "-c", f'exec "$@" {to}', "sh", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out/index.html").exists()
