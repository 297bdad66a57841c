"""Each operation that comes in two forms gives the right numbers in both."""

import math

import pytest
import torch

from compiled_adv.stages import forms

NAN, INF = math.nan, math.inf


@pytest.fixture(params=[False, True], ids=["as it is", "for a compiler"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "is_compiling", lambda: request.param)


def equal(got: torch.Tensor, want: list) -> None:
    assert torch.equal(got.to(torch.float64), torch.tensor(want, dtype=torch.float64))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])


def words(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.int32)


@pytest.mark.parametrize(
    "x", [torch.tensor([0, 2, -1]), torch.tensor([0.0, 0.25, NAN]), torch.tensor([False, True, True])]
)
def test_a_mask_is_one_where_a_number_is_not_zero(x):
    mask = forms.as_mask(x)
    assert mask.dtype == torch.float32
    equal(mask, [0, 1, 1])


def test_what_is_not_chosen_may_be_anything():
    mask, x, other = torch.tensor([1.0, 0.0]), torch.tensor([2.0, NAN]), torch.tensor([INF, 3.0])
    equal(forms.either(mask, x, other), [2, 3])


def test_a_roll_wraps_at_the_callers_width():
    equal(forms.roll_left(X, torch.tensor(3)), [[2, 3, 1, 0], [6, 7, 5, 0]])


def test_a_number_is_put_at_its_column_or_nowhere():
    equal(forms.put(torch.tensor([9.0, NAN]), ints(2, -1), X), [[0, 0, 9, 0], [0, 0, 0, 0]])


def test_a_column_is_taken_out():
    equal(forms.without(X, ints(0, 3)), [[0, 2, 3, 4], [5, 6, 7, 0]])


def test_no_number_that_is_not_finite_is_left():
    equal(forms.clean(torch.tensor([NAN, INF, -INF, 1.5])), [0, 0, 0, 1.5])


def test_a_copy_is_a_tensor_of_its_own():
    copied = forms.copy(X, ints(0, 4))
    assert torch.equal(copied, X) and copied.data_ptr() != X.data_ptr()


def test_a_prefix_is_as_long_as_it_has_tokens():
    lengths, holes = forms.prefix(words([1, 1, 1, 1, 1, 0, 0, 0], [0] * 8, [1] * 8))
    equal(lengths, [5, 0, 8])
    equal(holes, [0, 0, 0])


def test_a_hole_within_a_word_or_between_words_is_seen():
    equal(
        forms.prefix(words([1, 0, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]))[1], [1, 1, 1]
    )


def test_moments_are_those_of_the_active_entries():
    x = torch.tensor([[1.0, NAN, 3.0], [7.0, 7.0, 7.0], [INF, 1.0, 2.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    mean, m2 = forms.row_moments(x, mask, mask.sum(1).to(torch.float64))
    equal(mean, [2, 7, 0])
    equal(m2, [2, 0, 0])


def test_a_row_with_a_violation_is_flagged_whatever_its_size():
    equal(forms.some(torch.tensor([[0.0, 0.0], [0.0, 1e-30], [NAN, 0.0], [0.0, INF]])), [0, 1, 1, 1])


def test_flags_are_bits_in_their_order():
    flags = torch.tensor([[True, False, False], [False, False, True], [True, False, True]])
    equal(forms.bits(*flags), [5, 0, 6])
