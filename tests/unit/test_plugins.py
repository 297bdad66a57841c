"""Functions of one row or one prompt as stage functions, on the backends that need no compiler."""

import inspect
import warnings
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import discounted_sum, errors, kernels
from compiled_adv.kernels import cpu
from compiled_adv.plugins import is_pad_safe
from tests.unit import mapped_plugins

PATH = "tests.unit.mapped_plugins."
PROCESS, OUTCOME, ESTIMATOR = "process_adv_shaping", "outcome_reward_shaping", "estimator"


@pytest.fixture(params=["reference", "eager"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def build(backend: str, slot: str, name: str, **kwargs: Any) -> compiled_adv.Compute:
    choice = {"implementation": PATH + name, "kwargs": kwargs}
    return compiled_adv.build({"actor": {"kl_ctl": 0.0, "advantage": {"backend": backend, slot: choice}}})


def run(compute: compiled_adv.Compute, meta: Any = None, **more: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        return compute(batch(**more), meta)


def batch(**more: Any) -> dict[str, Any]:
    """Rows of 2, 3 and 1 generated tokens."""
    loss_mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0]])
    return {
        "input_ids": torch.ones(3, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]),
        "loss_mask": loss_mask,
        "rewards": torch.tensor([1.0, 2.0, 4.0]),
        "logprobs": torch.zeros(3, 4),
        "is_truncated": torch.zeros(3, dtype=torch.bool),
        **more,
    }


def meta(*sizes: int) -> dict[str, Any]:
    return {"n_trajs": len(sizes), "traj_group_sizes": [*sizes], "traj_seqlens": [4] * len(sizes)}


# ---- one row ----


def test_an_outcome_function_of_one_row_gets_its_tensors_without_the_row_dimension(backend: str) -> None:
    assert run(build(backend, OUTCOME, "plus_length"))["rewards"].tolist() == [3.0, 5.0, 5.0]


def test_its_keyword_only_parameters_are_the_kwargs(backend: str) -> None:
    assert run(build(backend, OUTCOME, "plus_length", weight=10.0))["rewards"].tolist() == [21.0, 32.0, 14.0]


def test_integer_rewards_come_as_numbers_that_can_be_shaped(backend: str) -> None:
    out = run(build(backend, OUTCOME, "plus_length", weight=0.5), rewards=torch.tensor([1, 2, 4]))["rewards"]
    assert out.tolist() == [2.0, 3.5, 4.5] and out.dtype == torch.float32


def test_a_key_that_the_batch_lacks_is_named(backend: str) -> None:
    with pytest.raises(errors.MissingKey, match="'scores'"):
        run(build(backend, OUTCOME, "needs_scores"))


def test_a_key_that_is_no_tensor_is_named(backend: str) -> None:
    with pytest.raises(errors.WrongType, match="'scores'"):
        run(build(backend, OUTCOME, "needs_scores"), scores=["a", "b", "c"])


def test_a_key_of_the_trainers_own_is_read(backend: str) -> None:
    assert run(build(backend, OUTCOME, "needs_scores"), scores=torch.ones(3, 4))["rewards"].tolist() == [5, 6, 8]


@pytest.mark.parametrize(("more", "want"), [({}, [1, 2, 4]), ({"scores": torch.ones(3, 4)}, [5, 6, 8])])
def test_a_key_with_a_default_may_be_missing(backend: str, more: Any, want: list[int]) -> None:
    assert run(build(backend, OUTCOME, "may_have_scores"), **more)["rewards"].tolist() == want


def test_an_estimator_of_one_row_gets_fields_numbers_and_none(backend: str) -> None:
    out = run(build(backend, ESTIMATOR, "total_as_advantage"))
    assert out["advantages"].tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [4, 0, 0, 0]]


def test_an_estimator_of_one_row_may_return_a_temporal_result(backend: str) -> None:
    out = run(build(backend, ESTIMATOR, "as_a_result"))
    assert out["tot_rewards"][0].tolist() == [2, 3, 2, 2]


def test_an_estimator_of_one_row_must_return_three_parts(backend: str) -> None:
    with pytest.raises(errors.PluginResult, match="advantages, returns, total_rewards"):
        run(build(backend, ESTIMATOR, "two_parts"))


def test_process_shaping_of_one_row(backend: str) -> None:
    # token GAE with discount and lambda 1 broadcasts the outcome up to its column
    out = run(build(backend, PROCESS, "without_mean"))["advantages"]
    assert out[0].tolist() == [0.0, 0.0, -1.0, -1.0]


def test_rows_draw_random_numbers_of_their_own(backend: str) -> None:
    torch.manual_seed(0)
    compute = build(backend, PROCESS, "random_sign")
    signs = [run(compute)["advantages"][:, 0].ne(0).tolist() for _ in range(8)]
    assert any(len({*each}) == 2 for each in signs)


def test_a_branch_on_a_tensor_is_the_functions_own_error(backend: str) -> None:
    with pytest.raises(errors.PluginRaised, match="branches"):
        run(build(backend, PROCESS, "branches"))


# ---- one prompt ----


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (3,), (1, 1, 1)])
def test_a_function_of_one_prompt_sees_the_rows_of_that_prompt_alone(backend: str, sizes: tuple[int, ...]) -> None:
    out, start = run(build(backend, OUTCOME, "without_group_mean"), meta(*sizes))["rewards"], 0
    for size in sizes:
        own = torch.tensor([1.0, 2.0, 4.0])[start : start + size]
        torch.testing.assert_close(out[start : start + size], own - own.mean())
        start += size


def test_one_number_for_a_prompt_goes_to_all_its_rows(backend: str) -> None:
    assert run(build(backend, OUTCOME, "size_of_group"), meta(2, 1))["rewards"].tolist() == [2, 2, 1]


def test_a_function_of_one_prompt_may_read_tokens(backend: str) -> None:
    compute = build(backend, OUTCOME, "by_longest", weight=1.0)
    assert run(compute, meta(2, 1))["rewards"].tolist() == [1, 1, 3]


@pytest.mark.parametrize(("size", "want"), [(1, [1, 1, 1]), (2, [2, 2, 1]), (5, [3, 3, 3])])
def test_without_metadata_prompts_are_slices_and_the_tail_is_one(backend: str, size: int, want: list[int]) -> None:
    assert run(build(backend, OUTCOME, "size_of_group", group_size=size))["rewards"].tolist() == want


def test_metadata_wins_over_group_size(backend: str) -> None:
    assert run(build(backend, OUTCOME, "size_of_group", group_size=1), meta(2, 1))["rewards"].tolist() == [2, 2, 1]


def test_without_metadata_and_group_size_the_prompts_are_asked_for(backend: str) -> None:
    with pytest.raises(errors.BadMeta, match="group_size: 8"):
        run(build(backend, OUTCOME, "size_of_group"))


def test_group_sizes_that_do_not_cover_the_rows_are_refused(backend: str) -> None:
    with pytest.raises(errors.BadMeta, match="do not sum"):
        run(build(backend, OUTCOME, "size_of_group"), meta(2, 2))


# ---- at build ----


def test_a_field_that_the_slot_does_not_give_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(errors.BadKwargs, match="reads 'advantage'.*") as caught:
        build("eager", PROCESS, "reads_nonsense")
    assert "advantages " in str(caught.value.hint)


@pytest.mark.parametrize("slot", [PROCESS, ESTIMATOR, "compute"])
def test_a_function_of_one_prompt_is_refused_outside_outcome_shaping(slot: str) -> None:
    with pytest.raises(errors.BadKwargs, match="mapped over prompts"):
        build("eager", slot, "size_of_group")


def test_a_function_of_one_row_is_refused_as_the_whole_computation() -> None:
    with pytest.raises(errors.BadKwargs, match="mapped over rows"):
        build("eager", "compute", "plus_length")


def test_an_unknown_kwarg_is_refused() -> None:
    with pytest.raises(errors.BadKwargs, match="takes no 'weigth'"):
        build("eager", OUTCOME, "plus_length", weigth=1.0)


def test_a_missing_kwarg_is_refused() -> None:
    with pytest.raises(errors.BadKwargs, match="weight"):
        build("eager", OUTCOME, "by_longest")


def test_a_mapped_function_keeps_its_name_and_has_the_signature_of_a_stage_function() -> None:
    fn = mapped_plugins.plus_length
    assert fn.__name__ == "plus_length" and list(inspect.signature(fn).parameters) == ["inputs", "weight"]


# ---- pad-safe ----


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("declared", True),
        ("declared_inside", True),
        ("without_group_mean", True),  # one number for each row: tokens cannot reach it
        ("plus_length", False),
        ("by_longest", False),
    ],
)
def test_a_function_is_pad_safe_if_declared_or_if_it_reads_one_number_for_each_row(name: str, safe: bool) -> None:
    assert is_pad_safe(getattr(mapped_plugins, name)) is safe


# ---- the recurrence ----

OPERATORS = {"torch": kernels.discounted_sum, "cpp": cpu.operators()[torch.ops.compiled_adv.discounted_sum]}


def by_loop(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out, run = torch.zeros(x.shape), torch.zeros(x.shape[:-1], dtype=torch.float64)
    for t in reversed(range(x.shape[-1])):
        run = x[..., t].double() + factor[..., t].double() * run
        out[..., t] = run
    return out


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (3, 33), (9, 64), (2, 3, 5), (4, 0), (0, 4)], ids=str)
def test_discounted_sum_is_the_loop(form: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, factor = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    torch.testing.assert_close(OPERATORS[form](x, factor), by_loop(x, factor))


@pytest.mark.parametrize("form", OPERATORS)
def test_discounted_sum_does_not_overflow_where_there_is_nothing_to_carry(form: str) -> None:
    x = torch.zeros(1, 2000)
    x[0, 0] = 1.0
    out = OPERATORS[form](x, torch.full_like(x, 3.0))
    assert out[0, 0] == 1.0 and not out[0, 1:].any()


@pytest.mark.parametrize("form", OPERATORS)
def test_discounted_sum_takes_any_strides_and_leaves_its_inputs(form: str) -> None:
    x, factor = torch.randn(8, 12).t()[:, ::2], torch.rand(1, 4).expand(12, 4)
    before = x.clone(), factor.clone()
    torch.testing.assert_close(OPERATORS[form](x, factor), by_loop(x, factor))
    assert torch.equal(x, before[0]) and torch.equal(factor, before[1])


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (0, None), (None, 1)], ids=str)
def test_vmap_maps_discounted_sum(form: str, dims: tuple[int | None, ...]) -> None:
    x, factor = torch.randn(5, 6), torch.rand(5, 6)
    by_dim = {0: lambda each: each, 1: lambda each: each.t().contiguous(), None: lambda each: each[0]}
    given = [by_dim[d](each) for each, d in zip((x, factor), dims, strict=True)]
    want = [each[:1].expand(5, 6) if d is None else each for each, d in zip((x, factor), dims, strict=True)]
    torch.testing.assert_close(torch.func.vmap(OPERATORS[form], in_dims=dims)(*given), by_loop(*want))


def test_the_factor_may_be_a_number() -> None:
    x = torch.ones(3)
    assert discounted_sum(x, 0.5).tolist() == [1.75, 1.5, 1.0]
