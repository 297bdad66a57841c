"""The benchmarks' own parts: valid, repeatable batches, a floor that moves all of its data, peers that agree."""

import shutil

import pytest
import torch

from perf import cases, peers
from perf.floor import Floor, channels
from perf.ratios import interleave, ratio
from perf.shapes import LADDERS, MASKS, RECIPES, make_batch

SHAPE = (16, 192)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the floor is built with g++")


def test_a_batch_is_the_same_for_the_same_seed_and_another_for_another():
    first, again, other = (make_batch(*SHAPE, turns=4, seed=seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["logprobs"], other["logprobs"])


def test_a_random90_mask_keeps_about_nine_in_ten_generated_tokens():
    full, thinned = (make_batch(64, 512, mask=mask)[0]["loss_mask"] for mask in MASKS)
    assert 0.87 < (thinned.sum() / full.sum()).item() < 0.93


def test_the_masks_of_a_ladder_shape_lie_within_the_rows():
    for rows, tokens in LADDERS["small"]:
        batch, _ = make_batch(rows, tokens, turns=8)
        assert not (batch["loss_mask"].bool() & ~batch["attention_mask"]).any()


def test_the_group_sizes_of_a_batch_add_up_to_its_rows():
    _, meta = make_batch(20, 64)
    assert meta["traj_group_sizes"] == [8, 8, 4]


def test_the_floor_leaves_out_what_is_only_handed_on():
    batch, _ = make_batch(*SHAPE)
    result = {**batch, "advantages": torch.zeros(SHAPE), "rewards": torch.zeros(SHAPE[0])}
    inputs, outputs = channels(batch, result)
    assert not any(x is batch["input_ids"] for x in inputs)
    assert len(outputs) == 1 and outputs[0] is result["advantages"]


@needs_compiler
@pytest.mark.parametrize("threads", (1, 2, 3))
@pytest.mark.parametrize("way", ("apart", "overlap"))
def test_the_floor_writes_every_output(way, threads):
    batch, _ = make_batch(*SHAPE)
    floor = Floor(batch, {k: torch.zeros(SHAPE) for k in "abcde"}, fresh=True, threads=threads)
    floor.way = way
    assert all(torch.equal(x, torch.ones(SHAPE)) for x in floor())  # the pattern it writes is 1.0


@needs_compiler
def test_the_floor_counts_the_bytes_of_its_channels():
    batch, _ = make_batch(*SHAPE, channels=())
    floor = Floor(batch, {"advantages": torch.zeros(SHAPE)})
    assert floor.moved == SHAPE[0] * SHAPE[1] * (1 + 8 + 4 + 4)  # attention and loss mask, logprobs; one output


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe, peer", [("token_gae", "column_loop"), ("turn_gae_gvpo", "turn_scatter")])
def test_a_plain_torch_peer_agrees_with_eager(recipe, peer, mask):
    contender = cases.Case(recipe, SHAPE, mask).peer(peer)
    assert contender.difference is not None and contender.difference < 1e-5


def test_a_peer_that_differs_is_refused():
    wrong = peers.Peer(lambda: {"returns": torch.ones(2, 3)}, ("returns",), "")
    with pytest.raises(AssertionError, match="returns differs by 0.5"):
        peers.check(wrong, {"returns": torch.zeros(2, 3) + 3})


@pytest.mark.parametrize("peer", peers.NAMES)
def test_a_peer_says_why_it_cannot_do_a_recipe(peer):
    recipe = "turn_gae_gvpo" if peer != "turn_scatter" else "grpo"
    with pytest.raises(peers.Unsupported, match="GAE|written for"):
        cases.Case(recipe, SHAPE, "contiguous").peer(peer)


def test_every_contender_gets_a_turn_in_every_round():
    times = interleave({"a": lambda: None, "b": lambda: None}, seconds=0, rounds=(5, 7))
    assert [len(x) for x in times.values()] == [5, 5]


def test_a_ratio_is_the_median_of_the_rounds():
    assert ratio([2.0, 9.0, 4.0], [1.0, 1.0, 2.0])[0] == 2.0


def test_every_recipe_is_a_config_that_builds():
    for name in RECIPES:
        assert cases.Case(name, SHAPE, "contiguous").backend("eager").difference == 0.0
