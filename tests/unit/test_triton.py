"""The GPU's operators in Triton's interpreter, against the plain loops and the torch form.

The interpreter takes each entry of a scan in Python: blocks are made small, and batches with them.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from compiled_adv.kernels import SCHEMAS, blocked
from tests.unit.test_kernels import Case, recurrence_loop, turns_loop

if os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is first imported, so not set here
    pytest.skip("make test runs these by themselves", allow_module_level=True)
triton = pytest.importorskip("compiled_adv.kernels.triton", reason="needs Triton")

BLOCK = 8
# one block and several, a width of whole blocks, one column, no active entry at all
SHAPES = [(2, 21, 0.6), (2, 16, 1.0), (1, 1, 1.0), (2, 11, 0.0)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    monkeypatch.setattr(triton, "BLOCK", BLOCK)
    yield


@pytest.fixture(params=["a program for each row", "a program for each block"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "FEW_ROWS", 0 if "row" in request.param else 10**9)


def form() -> dict[str, object]:
    operators = triton.operators().items()
    return {plain._qualified_op_name.split("::")[1]: operator for plain, operator in operators}


def shapes(*which: int) -> pytest.MarkDecorator:
    chosen = [SHAPES[i] for i in which]
    return pytest.mark.parametrize(
        "case", [Case(*shape, 3) for shape in chosen], ids=["x".join(map(str, s)) for s in chosen]
    )


def close(got, expected, tolerance=1e-6):
    for have, want in zip(got, expected, strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@shapes(0, 1, 2, 3)
def test_recurrence_is_the_loop(case, split):
    end = case.mask.shape[1] - 1
    want = recurrence_loop(case.rewards, case.values, case.mask, case.bootstrap, 0.97, case.gae_lambda, end)
    close(case.recurrence(form(), end=torch.tensor(end)), want)


@shapes(0)
def test_recurrence_without_critic_is_the_torch_form(case, split):
    close(case.recurrence(form(), values=None), case.recurrence(vars(blocked), values=None))


@shapes(0, 1, 2)
def test_discounted_sum_is_the_torch_form(case, split):
    factor = case.values.clamp(-1, 1)
    close([form()["discounted_sum"](case.rewards, factor)], [blocked.discounted_sum(case.rewards, factor)])


@shapes(0, 2, 3)
def test_moments_are_the_torch_form(case):
    got, want = form()["row_moments"](case.rewards, case.mask), blocked.row_moments(case.rewards, case.mask)
    close(got, want, 1e-12)


def test_merged_moments_are_the_torch_form():
    case, part = Case(21, 5, 0.4, 7), torch.arange(21) % 4 - 1
    moments = blocked.row_moments(case.rewards, case.mask)
    close(form()["merge_moments"](*moments, part), blocked.merge_moments(*moments, part), 1e-12)


@shapes(0, 1, 2, 3)
@pytest.mark.parametrize("critic", [True, False], ids=["critic", "none"])
def test_turns_are_the_loop(case, critic):
    totals, firsts, ends, *_ = turns_loop(case.rewards, case.values, case.ids, case.mask)
    got = form()["turn_totals"](case.rewards, case.values if critic else None, case.ids, case.mask)
    close(got, (totals, firsts if critic else torch.empty(0), ends))


@shapes(0, 1, 2, 3)
@pytest.mark.parametrize("order", ["in order", "backwards"])
def test_turn_counts_are_the_loop(case, order):
    ids = case.ids.flip(1) if order == "backwards" else case.ids
    *_, counts, ordered = turns_loop(case.rewards, case.values, ids, case.mask)
    close(form()["turn_counts"](ids, case.mask), (counts, ordered))


def everything(case: Case) -> list[torch.Tensor]:
    ours = form()
    moments = ours["row_moments"](case.rewards, case.mask)
    return [
        *case.recurrence(ours),
        *moments,
        *ours["merge_moments"](*moments, torch.arange(len(case.mask)) % 2),
        *ours["turn_totals"](case.rewards, case.values, case.ids, case.mask),
        *ours["turn_counts"](case.ids, case.mask),
        ours["discounted_sum"](*(torch.where(case.mask != 0, x, 0.0) for x in (case.rewards, case.values))),
    ]


def test_padding_changes_no_bit():
    case, padded = Case(2, 10, 0.6, 4), Case(3, 17, 0.0, 5)
    for name in ("rewards", "values", "mask", "ids"):
        getattr(padded, name)[:2, :10] = getattr(case, name)
    padded.bootstrap[:2], padded.gae_lambda[:2] = case.bootstrap, case.gae_lambda
    for got, want in zip(everything(padded), everything(case), strict=True):
        assert torch.equal(got[: len(want)] if got.ndim == 1 else got[:2, :10], want)


def test_splitting_rows_changes_no_bit(monkeypatch):
    case, found = Case(2, 29, 0.6, 6), []
    for few in (0, 10**9):
        monkeypatch.setattr(triton, "FEW_ROWS", few)
        found.append([*case.recurrence(form()), form()["discounted_sum"](case.rewards, case.values)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_not_active_is_never_read_into_a_result(split):
    case, poisoned = Case(1, 13, 0.5, 1), Case(1, 13, 0.5, 1)
    poison = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(5)[:13]
    poisoned.rewards, poisoned.values = (torch.where(case.mask != 0, x, poison) for x in (case.rewards, case.values))
    assert all(torch.equal(a, b) for a, b in zip(everything(poisoned), everything(case), strict=True))


def test_bfloat16_is_read_as_float32():
    case, short = Case(1, 11, 0.5, 2), Case(1, 11, 0.5, 2)
    for name in ("rewards", "values", "mask"):
        setattr(short, name, getattr(case, name).bfloat16())
        setattr(case, name, getattr(short, name).float())
    got, want = everything(short)[:-1], everything(case)[:-1]  # the discounted sum is given back as it came
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_equal_numbers_have_no_spread_at_all():
    moments = form()["row_moments"](torch.full((3, 21), -3e7), torch.ones(3, 21))
    merged = form()["merge_moments"](*moments, torch.zeros(3, dtype=torch.int64))
    assert moments[2].tolist() == [0.0] * 3 and merged[2].tolist() == [0.0] * 3


def test_a_factor_that_overflows_leaves_zeros_alone(split):
    zeros = torch.zeros(1, 20)
    run, _ = form()["backward_recurrence"](
        zeros, zeros, torch.ones(1, 20), torch.zeros(1), 1e30, torch.full((1,), 1e30, dtype=torch.float64), None, False
    )
    assert torch.equal(run, zeros)


def test_every_operator_has_a_form_or_is_traced_as_its_parts():
    assert triton.FORMS.keys() == SCHEMAS.keys() - {"turn_recurrence"}
