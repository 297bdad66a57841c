"""A batch report in a real browser: it draws, complains of nothing, and what came with the batch stays text."""

import pytest
import torch

import compiled_adv
from compiled_adv import report

EVIL = "<img src=x onerror=\"document.body.dataset.broken='yes'\"><script>document.body.dataset.broken='yes'</script>"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    at_T = torch.arange(24)
    lengths_B = torch.tensor([24, 20, 12, 22])
    valid_BT = at_T < lengths_B[:, None]
    generated_BT = valid_BT & (at_T >= 4) & (at_T % 8 != 3)
    batch = {
        "input_ids": at_T.expand(4, 24).clone(),
        "attention_mask": valid_BT,
        "loss_mask": generated_BT.long(),
        "logprobs": -0.25 * generated_BT,
        "ref_logp": -0.5 * valid_BT,
        "values": 0.125 * valid_BT,
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "turn_ids": torch.where(generated_BT, at_T // 8, -1),
    }
    actor = {"advantage": {"backend": "eager", "stats": True}}
    path = tmp_path_factory.mktemp("report") / "page.html"
    report.write(path, compiled_adv.build({"actor": actor}), batch, decode=lambda ids: EVIL)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_the_console_is_silent(page, written, scheme):
    page.prefer(scheme)
    page.open(written)
    inked = "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('svg path[d], svg image').length)"
    assert len(page.js(inked)) >= 6 and all(page.js(inked))
    assert page.errors() == []


def test_the_switch_turns_the_colours_and_draws_the_charts_again(page, written):
    page.open(written)
    before = page.js("getComputedStyle(document.body).backgroundColor")
    page.all("#theme")[0].click()
    assert page.js("getComputedStyle(document.body).backgroundColor") != before
    assert page.errors() == []


def test_text_of_the_rollouts_runs_nothing(page, written):
    page.open(written)
    assert page.js("document.body.dataset.broken") is None
    assert page.all(".tokens img") == [] and page.js("document.querySelector('.tokens').textContent").count("<img") > 0
    assert page.errors() == []


@pytest.mark.parametrize("width", [420, 1280])
def test_the_graph_of_stages_is_drawn_within_its_section(page, written, width):
    page.driver.set_window_size(width, 1000)
    page.open(written)
    (drawn,) = page.all("svg.graph")
    assert len(drawn.find_elements("css selector", ".node")) > 10
    assert page.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.driver.set_window_size(1280, 1000)
