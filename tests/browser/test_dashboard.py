"""The page of compiled-adv dashboard in a browser: charts are drawn, filter and colours work, nothing complains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from compiled_adv.dashboard import write_dashboard
from tests.results import results, written


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard")
    runs = [results(commit=f"commit{i}", day=i + 1, slower=s) for i, s in enumerate((1.0, 0.9, 1.4))]
    files = [written(folder / f"{i}.json", run) for i, run in enumerate(runs)]
    return write_dashboard(files, folder)[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn(page: Any, path: Path, scheme: str) -> None:
    page.prefer(scheme)
    page.open(path)
    assert page.errors() == []
    charts = page.all("section .chart")
    assert len(charts) == 9
    for chart in charts:
        marks = chart.find_elements("css selector", ".point path, .points path, .js-line")
        assert marks and chart.size["height"] > 100


def test_the_filter_leaves_the_chosen_recipe(page: Any, path: Path) -> None:
    page.open(path)
    times = "document.querySelector('.chart').data.map(t => t.y[1])"
    before = page.js(times)
    shown = "[...document.querySelectorAll('#s0 tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    assert set(page.js(shown)) == {"token_gae"}
    page.driver.execute_script(
        "const it = document.querySelector('select'); it.value = 'grpo'; it.dispatchEvent(new Event('change'))"
    )
    assert set(page.js(shown)) == {"grpo"} and len(page.js(times)) == len(before)
    assert page.errors() == []


def test_the_button_turns_light_into_dark(page: Any, path: Path) -> None:
    page.open(path)
    back = "getComputedStyle(document.body).backgroundColor"
    colour = "document.querySelector('.chart').data[0].line.color"
    light = page.js(back), page.js(colour)
    page.all("#theme")[0].click()
    dark = page.js(back), page.js(colour)
    assert light[0] != dark[0] and light[1] != dark[1]
    page.all("#theme")[0].click()
    assert (page.js(back), page.js(colour)) == light


def test_a_regression_is_marked_in_the_history(page: Any, path: Path) -> None:
    page.open(path)
    symbols = page.js("[...document.querySelectorAll('.chart')].at(-1).data[0].marker.symbol")
    assert symbols == ["circle", "circle", "x"]


def test_every_chart_has_its_table(page: Any, path: Path) -> None:
    page.open(path)
    assert all(page.js("[...document.querySelectorAll('section')].map(s => s.querySelectorAll('tbody tr').length)"))


def test_a_hostile_name_is_text(page: Any, tmp_path: Path) -> None:
    hostile = (
        "<img src=x onerror=\"document.title='broken'\"><b>bold</b></script><script>document.title='broken'</script>"
    )
    bad = copy.deepcopy(results())
    bad["commit_info"]["id"] = hostile
    for each in bad["benchmarks"]:
        each["extra_info"]["contender"] += hostile
        each["extra_info"]["recipe"] = hostile
    page.open(write_dashboard([written(tmp_path / "bad.json", bad)], tmp_path)[0])
    assert page.errors() == []
    assert page.driver.title == "compiled_adv performance"
    assert page.js("document.querySelectorAll('img, main b').length") == 0
