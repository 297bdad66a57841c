"""The graph of stages as an SVG: every stage and line is in it, what a pass made in its colour."""

import itertools
import re

import pytest

import compiled_adv
from compiled_adv import picture

CHANNELS = ["ref_logp", "values", "token_rewards", "turn_ids"]
NORMS = {"reward_norm": {"mean_level": "group"}, "adv_norm": {"mean_level": "batch"}}
CONFIGS = ["default", "grpo", "ppo_turn_gae", {"actor": {**NORMS, "advantage": {"stats": True}}}]


def facts(config, channels=()):
    return compiled_adv.build(config).explain("json", channels)


def boxes(drawn):
    found = re.findall(r'<rect x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn)
    return [tuple(map(float, each)) for each in found]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_stage_is_drawn_and_none_upon_another(config):
    given = facts(config, CHANNELS)
    found = boxes(picture.drawing(given))
    assert len(found) == len(given["pipelines"][-1]["stages"])
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(found, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


@pytest.mark.parametrize("config", CONFIGS)
def test_a_line_ends_at_every_stage_that_reads_of_another(config):
    given = facts(config, CHANNELS)
    stages = given["pipelines"][-1]["stages"]
    writer = {version: s["name"] for s in stages for version in s["writes"]}
    pairs = {(writer[v], s["name"]) for s in stages for v in s["reads"] if v in writer}
    assert picture.drawing(given).count('marker-end="url(#head)"') == len(pairs)


def test_what_a_pass_made_has_its_colour_and_the_pass_a_place_in_the_legend():
    drawn = picture.drawing(facts("grpo"))
    legend = dict(re.findall(r'background:(var\(--\w+\))"></i><b>(\w+)</b>', drawn))
    assert "fuse_reward_norm" in legend.values()
    made = re.findall(r'class="node made" style="--made:(var\(--\w+\))"><title>(.*?)</title>', drawn, re.S)
    assert made and all(f"made by the pass {legend[colour]}" in title for colour, title in made)


def test_a_users_function_is_named_and_marked():
    choice = {"implementation": "tests.examples.overlong", "kwargs": {"budget": 9, "ramp": 4, "factor": 0.5}}
    drawn = picture.drawing(facts({"actor": {"advantage": {"outcome_reward_shaping": choice}}}))
    assert 'class="node yours"' in drawn and ">overlong<" in drawn and "your own function" in drawn


def test_names_of_others_stay_text():
    stage = {"name": "<b>x</b>", "stage": '"><script>', "config": "", "reads": ["a"], "writes": ["<i>"], "flags": []}
    drawn = picture.drawing({"pipelines": [{"after": "wired", "stages": [stage]}], "functions": []})
    assert not re.search(r"<(b|i|script)\b", drawn)
