"""Threads: each gets its own result, from a cold and from a warm cache, and the number of threads changes no bit."""

from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv.memory import LEAST_BYTES
from tests.compiled.shared import CRITIC, TURNS, assert_same, built, case_of, configured, expected, run, together
from tests.random_cases import Template


def assert_each_right(template: Template, results: list[Any], shapes: list[tuple[int, int]]) -> None:
    for i, (result, (rows, tokens)) in enumerate(zip(results, shapes, strict=True)):
        assert isinstance(result, tuple), result
        assert_same(result[0], expected(case_of(template, rows, tokens, seed=i))[0], 1e-5)


def test_threads_that_ask_for_one_program_at_once_each_get_their_own_result():
    template = Template(CRITIC.actor | {"reward_bias": 0.25}, CRITIC.keys)
    compute = compiled_adv.build(configured(template.actor))
    shapes = [(3, 9), (5, 12), (1, 1), (8, 60)]
    results = together(lambda i: run(compute, case_of(template, *shapes[i], seed=i)))
    assert_each_right(template, results, shapes)
    assert compute.cache.info().compiles == 1


@pytest.mark.usefixtures("interpreted")
def test_threads_that_ask_for_different_buckets_at_once_each_get_their_own_result():
    compute = compiled_adv.build(configured(CRITIC.actor, buckets={"rows": [8], "tokens": [4, 8, 16, 32]}))
    shapes = [(3, 4), (3, 8), (3, 16), (3, 32)]
    results = together(lambda i: run(compute, case_of(CRITIC, *shapes[i], seed=i)))
    assert_each_right(CRITIC, results, shapes)
    assert compute.cache.info().compiles == 4


def test_threads_that_call_a_warm_instance_over_and_over_each_get_their_own_results():
    compute = built(case_of(TURNS).on("compiled"))
    cases = [case_of(TURNS, 3 + i, 10 + i, seed=i) for i in range(4)]
    want = [run(compute, case)[0] for case in cases]

    def work(i: int) -> str:
        for _ in range(50):
            assert_same(run(compute, cases[i])[0], want[i])
        return "right"

    assert together(work) == ["right"] * 4


def test_threads_whose_results_come_from_the_pool_each_get_their_own():
    tokens = LEAST_BYTES // (4 * 8)
    compute = built(configured(CRITIC.actor, buckets={"rows": [8], "tokens": [tokens]}))
    cases = [case_of(CRITIC, 8, tokens, seed=i) for i in range(2)]
    want = [{key: x.clone() for key, x in run(compute, case)[0].items()} for case in cases]

    def work(i: int) -> str:
        for _ in range(10):
            assert_same(run(compute, cases[i % 2])[0], want[i % 2])
        return "right"

    assert together(work) == ["right"] * 4


@pytest.mark.parametrize("name", ["critic", "turns"])
def test_one_thread_and_two_compile_to_the_same_bits(name: str):
    """The kernels are other ones: torch cuts loops by the number of threads when it compiles."""
    template = {"critic": CRITIC, "turns": TURNS}[name]
    case = case_of(template, 8, 2000)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            compute = compiled_adv.build(configured(template.actor, buckets={"rows": [8], "tokens": [2048]}))
            results.append(run(compute, case)[0])
        finally:
            torch.set_num_threads(1)
    assert_same(results[1], results[0])
