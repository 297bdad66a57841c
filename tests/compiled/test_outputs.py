"""What a call returns is the caller's: it shares no memory with a later call, and no earlier call shows in it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_adv.memory import LEAST_BYTES, POOL
from tests.compiled.shared import CRITIC, TURNS, assert_same, built, case_of, configured, expected, run
from tests.random_cases import Case, Template

TOKENS = LEAST_BYTES // (4 * 8)  # 8 rows of so many float32 numbers come from the pool
LARGE = {"rows": [8], "tokens": [TOKENS]}


@pytest.fixture(params=[TOKENS, TOKENS - 5], ids=["exact bucket", "padded"])
def large(request: pytest.FixtureRequest) -> list[Case]:
    """Batches whose outputs come from the pool."""
    first = case_of(CRITIC, 8, request.param)
    flipped = {key: -x for key, x in first.batch.items() if key in ("rewards", "values", "logprobs")}
    return [first, first.with_batch(first.batch | flipped)]


def compute_large():
    return built(configured(CRITIC.actor, buckets=LARGE))


def test_an_earlier_result_stays_what_it_was(large):
    first, other = large
    compute = compute_large()
    kept, _ = run(compute, first)
    before = {key: x.clone() for key, x in kept.items()}
    for _ in range(3):
        run(compute, other)
    assert_same(kept, before)


def test_a_part_of_an_earlier_result_stays_what_it_was(large):
    first, other = large
    compute = compute_large()
    result, _ = run(compute, first)
    kept = {key: (x[..., -1:], x.numpy()[:1]) for key, x in result.items()}
    before = {key: (view.clone(), array.copy()) for key, (view, array) in kept.items()}
    del result
    for _ in range(3):
        run(compute, other)
    for key, (view, array) in kept.items():
        assert torch.equal(view, before[key][0]) and (array == before[key][1]).all(), key


def test_results_of_different_calls_lie_at_different_places(large):
    compute = compute_large()
    results = [run(compute, large[i % 2])[0] for i in range(4)]
    places = [x.untyped_storage().data_ptr() for result in results for x in result.values()]
    assert len(set(places)) == len(places)


def test_memory_that_was_dropped_is_used_again(large):
    compute = compute_large()
    run(compute, large[0])
    places = {x.data_ptr() for x in run(compute, large[0])[0].values() if x.nbytes >= LEAST_BYTES // 2}
    held = POOL.held_bytes()
    for _ in range(5):
        run(compute, large[0])
    assert POOL.held_bytes() == held
    again = {x.data_ptr() for x in run(compute, large[0])[0].values() if x.nbytes >= LEAST_BYTES // 2}
    assert again & places


def test_writing_into_a_result_does_not_show_in_the_next(large):
    compute = compute_large()
    want = {key: x.clone() for key, x in run(compute, large[0])[0].items()}
    result, _ = run(compute, large[0])
    for x in result.values():
        x.fill_(1)
    del result
    assert_same(run(compute, large[0])[0], want)


def test_a_large_batch_is_right(large):
    got, _ = run(compute_large(), large[0])
    want, _ = expected(large[0], **{})
    assert_same(got, want, 1e-5)


# ---- what an earlier batch leaves behind ----


def batches(template: Template, rows: int, tokens: int, seed: int, meta: str) -> Case:
    return case_of(template, rows, tokens, seed, meta)


LEAVES_BEHIND = {
    "more rows, tokens and turns": lambda t: batches(t, 8, 128, 1, "none"),
    "more prompts and rollouts": lambda t: batches(t, 8, 40, 2, "rollouts"),
}


@pytest.mark.parametrize("earlier", LEAVES_BEHIND)
@pytest.mark.parametrize("name, meta", [("critic", "sizes"), ("turns", "rollouts"), ("turns", "none")])
def test_a_small_batch_after_a_large_one_is_as_if_it_came_first(earlier: str, name: str, meta: str):
    template = {"critic": CRITIC, "turns": TURNS}[name]
    compute, small = built(case_of(template).on("compiled")), batches(template, 2, 5, 3, meta)
    alone, _ = run(compute, small)
    run(compute, LEAVES_BEHIND[earlier](template))
    assert_same(run(compute, small)[0], alone)
    assert_same(alone, expected(small)[0], 1e-5)


@pytest.mark.parametrize("bad", ["values", "rewards", "logprobs"])
def test_a_small_batch_after_one_with_nans_is_as_if_it_came_first(bad: str):
    compute, small, large = built(case_of(CRITIC).on("compiled")), case_of(CRITIC, 2, 5), case_of(CRITIC, 8, 128)
    alone, _ = run(compute, small)
    with pytest.raises(ValueError):
        run(compute, large.with_batch(large.batch | {bad: torch.full_like(large.batch[bad], torch.nan)}))
    assert_same(run(compute, small)[0], alone)


def test_a_small_batch_after_a_large_one_gives_a_fresh_processs_result(tmp_path: Path):
    """The same bits as in a process that never saw another batch; and that process compiles nothing anew."""
    script = """
import sys, torch
torch.set_num_threads(1)
from tests.compiled.shared import TURNS, built, case_of, run
small = case_of(TURNS, 2, 5, seed=3)
result, _ = run(built(small.on("compiled")), small)
torch.save(result, sys.argv[1])
"""
    small = case_of(TURNS, 2, 5, seed=3)
    compute = built(small.on("compiled"))
    run(compute, case_of(TURNS, 8, 128))
    file = tmp_path / "fresh.pt"
    subprocess.run([sys.executable, "-c", script, str(file)], check=True, timeout=300, cwd=Path(__file__).parents[2])
    assert_same(run(compute, small)[0], torch.load(file))
