"""After warm-up nothing compiles, whatever changes from call to call, and the results stay right.

By torch's own counters: graphs that Dynamo captured, and a stance under which it refuses to compile.
"""

import threading
from collections.abc import Iterator

import pytest
import torch

from compiled_adv.inductor import graphs_captured
from tests.compiled.shared import CRITIC, GRPO, TURNS, assert_right, assert_same, built, case_of, nothing_compiles, run
from tests.flavours import FLAVOURS
from tests.random_cases import METAS, Case, Template

TEMPLATES = {"grpo": GRPO, "critic": CRITIC, "turns": TURNS}
each_template = pytest.mark.parametrize("name", TEMPLATES)

# Torch before 2.11 compares the state of the process on each call, whatever a filter of guards says, and compiles anew.
unless_torch_compares_state = pytest.mark.skipif(
    not hasattr(torch.compiler, "skip_all_guards_unsafe"), reason="this torch guards the state of the process"
)
OF_THE_PROCESS = ("float64 by default",)
STATES = [pytest.param(name, marks=unless_torch_compares_state if name in OF_THE_PROCESS else ()) for name in FLAVOURS]


@pytest.fixture
def warm(name: str):
    """The shared instance, after its first call."""
    compute = built(case_of(TEMPLATES[name]).on("compiled"))
    run(compute, case_of(TEMPLATES[name]))
    return compute


def shapes(template: Template) -> Iterator[Case]:
    """All that the bucket holds, from one token to all of it."""
    for rows, tokens in ((1, 1), (1, 2), (2, 1), (1, 128), (8, 1), (8, 128), (3, 77)):
        yield case_of(template, rows, tokens, seed=rows + tokens)


def compositions(template: Template) -> Iterator[Case]:
    for seed, meta in enumerate(METAS * 3):
        yield case_of(template, 7, 9, seed, meta)


def densities(template: Template) -> Iterator[Case]:
    """Nothing generated, one token, everything that is valid, and nothing valid at all."""
    case = case_of(template, 4, 9)
    attention_BT = case.batch["attention_mask"] != 0
    valid_BT = attention_BT.clone()
    valid_BT[:, 0] = False  # turn GAE refuses a generated first token
    one_BT = valid_BT & (valid_BT.cumsum(1) == 1)
    for generated_BT in (torch.zeros_like(valid_BT), one_BT, valid_BT):
        yield case.with_batch(case.batch | {"loss_mask": generated_BT.long()} | turns(case, generated_BT.long()))
    nothing = {"loss_mask": torch.zeros_like(case.batch["loss_mask"]), "attention_mask": torch.zeros_like(attention_BT)}
    yield case.with_batch(case.batch | nothing)


def numbers_of_turns(template: Template) -> Iterator[Case]:
    """One turn, as many as tokens, and ids far apart."""
    case = case_of(template, 4, 12, seed=3)
    mask_BT = (case.batch["loss_mask"] != 0).long()
    for width in (100, 1, 3):
        yield case.with_batch(case.batch | turns(case, mask_BT, width))
    yield case.with_batch(case.batch | turns(case, mask_BT * 2))


def turns(case: Case, step_BT: torch.Tensor, width: int = 1) -> dict[str, torch.Tensor]:
    """Turn ids that grow by `step` at each token, `width` tokens to a turn, below the number of tokens."""
    if "turn_ids" not in case.batch:
        return {}
    tokens = case.batch["loss_mask"].shape[1]
    return {"turn_ids": (step_BT.cumsum(1) // width).clamp(max=tokens - 1)}


CHANGES = {
    "shape": shapes,
    "group composition": compositions,
    "mask density": densities,
    "number of turns": numbers_of_turns,
}


@each_template
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_compiles_whatever_the_batch(name: str, change: str, warm) -> None:
    for case in CHANGES[change](TEMPLATES[name]):
        with nothing_compiles():
            assert_right(warm, case)


@each_template
@pytest.mark.parametrize("flavour", STATES)
def test_nothing_compiles_whatever_the_tensors_and_the_state_of_torch(name: str, flavour: str, warm) -> None:
    case = case_of(TEMPLATES[name], 6, 11, seed=1)
    want, _ = run(warm, case)
    guise, state = FLAVOURS[flavour]
    with nothing_compiles(), state():
        got, _ = run(warm, case.with_batch(guise(case.batch)))
    assert_same(got, want)


@each_template
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64], ids=str
)
def test_nothing_compiles_whatever_the_dtype_of_the_rewards(name: str, dtype: torch.dtype, warm) -> None:
    case = case_of(TEMPLATES[name], 6, 11, seed=1)
    with nothing_compiles():
        assert_right(warm, case.with_batch(case.batch | {"rewards": (case.batch["rewards"] > 0).to(dtype)}))


@pytest.mark.parametrize("name", ["turns"])
def test_nothing_compiles_whatever_the_values_of_the_call(name: str, warm) -> None:
    case = case_of(TURNS, 7, 12, seed=5)
    with nothing_compiles():
        for i in range(12):
            call = {"gvpo_negative_scale": 0.1 * i, "gvpo_zero_penalty": 1.0 / (i + 1), "gvpo_zero_eps": 10.0**-i}
            assert_right(warm, case, **call)


@each_template
def test_nothing_compiles_in_another_thread(name: str, warm) -> None:
    """Grad mode and the like are a thread's own."""
    case = case_of(TEMPLATES[name], 6, 11, seed=1)
    want, _ = run(warm, case)
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(warm, case)[0])) for _ in range(3)]
    with nothing_compiles():
        for thread in threads:
            thread.start()
            thread.join()
    assert len(results) == 3
    for got in results:
        assert_same(got, want)


@unless_torch_compares_state
@each_template
def test_nothing_compiles_on_another_number_of_threads(name: str, warm) -> None:
    case = case_of(TEMPLATES[name], 8, 128, seed=1)
    want, _ = run(warm, case)
    torch.set_num_threads(2)
    try:
        with nothing_compiles():
            got, _ = run(warm, case)
    finally:
        torch.set_num_threads(1)
    assert_same(got, want)


@unless_torch_compares_state
def test_nothing_compiles_where_algorithms_must_be_deterministic() -> None:
    compute, case = built(case_of(CRITIC).on("compiled")), case_of(CRITIC, 6, 11)
    want, _ = run(compute, case)
    torch.use_deterministic_algorithms(True)
    try:
        with nothing_compiles():
            got, _ = run(compute, case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(got, want)


def test_what_is_forbidden_here_would_raise() -> None:
    """The proof above proves nothing if torch's stance lets a compile pass."""

    def fresh(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(Exception, match="fail_on_recompile|recompile"), nothing_compiles():
        torch.compile(fresh, backend="eager", fullgraph=True)(torch.ones(2))


def test_every_executable_is_one_graph() -> None:
    """No graph break, and nothing but the Program is captured for it."""
    actor = GRPO.actor | {"reward_bias": 0.125}
    config = case_of(Template(actor, GRPO.keys)).on("compiled")
    before = graphs_captured()
    compute = built(config)
    run(compute, case_of(Template(actor, GRPO.keys)))
    assert graphs_captured() - before == 1 == compute.cache.info().compiles
