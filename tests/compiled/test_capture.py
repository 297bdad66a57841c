"""Why torch cannot make one graph of a user's function: named, with the user's own line."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from compiled_adv.inductor import NotCaptured, capture

X = torch.arange(12.0).reshape(3, 4)
STATE = [0]


def captured(fn):
    return capture(lambda *tensors: {"out": fn(*tensors)}, (X.clone(), X.clone()), ("x", "y"))


def item(x, y):
    return x * y.max().item()


def mask_index(x, y):
    return x - x[y > 3].mean()


def nonzero(x, y):
    return x + y.nonzero().shape[0]


def torch_random(x, y):
    return x + torch.randn(3, 4)


def python_random(x, y):
    return x + random.random()


def in_place(x, y):
    y.mul_(2)
    return x * 1


def in_place_view(x, y):
    y[0].add_(1)
    return x * 1


def in_place_numpy(x, y):
    y.numpy()[...] = 0
    return x * 1


def prints(x, y):
    print("x")
    return x * 1


def branch(x, y):
    return x if y.sum() > 0 else x * 2


def changes_a_global(x, y):
    STATE[0] += 1
    return x * 1


REASONS = {
    item: ("reads a number on the host", "y.max().item()"),
    mask_index: ("a shape depends on numbers", "x[y > 3]"),
    nonzero: ("a shape depends on numbers", "y.nonzero()"),
    torch_random: ("draws random numbers", "torch.randn(3, 4)"),
    python_random: ("skipped", "x + random.random()"),
    in_place: ("writes to its input 'y'", "y.mul_(2)"),
    in_place_view: ("writes to its input 'y'", "y[0].add_(1)"),
    in_place_numpy: ("writes to its input 'y'", "y.numpy()[...]"),
    prints: ("print", 'print("x")'),
    branch: ("Data-dependent branching", "if y.sum() > 0"),
}


@pytest.mark.parametrize("fn", REASONS, ids=lambda fn: fn.__name__)
def test_the_reason_and_the_line_are_given(fn) -> None:
    what, text = REASONS[fn]
    lines = Path(__file__).read_text().splitlines()
    start = fn.__code__.co_firstlineno
    line = next(i for i, each in enumerate(lines[start:], start + 1) if text in each)
    with pytest.raises(NotCaptured) as caught:
        captured(fn)
    assert what in f"{caught.value.what} {caught.value.hint} {caught.value.__cause__}"
    assert caught.value.line == f"test_capture.py:{line}"


def test_a_change_of_what_lies_outside_is_named() -> None:
    with pytest.raises(NotCaptured, match="changes what lies outside it: .*STATE"):
        captured(changes_a_global)
    assert STATE == [0]


def test_a_captured_function_is_not_called_again_and_its_inputs_stay() -> None:
    before = X.clone()
    with pytest.raises(NotCaptured):
        captured(in_place)
    assert torch.equal(X, before)


def test_capturing_draws_no_random_numbers() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    want = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    for fn in (torch_random, python_random):
        with pytest.raises(NotCaptured):
            captured(fn)
    assert (torch.rand(1), random.random(), np.random.rand()) == want


def test_what_a_function_reads_is_known_by_name() -> None:
    assert captured(lambda x, y: y + 1).reads == ("y",)


def test_what_a_function_hands_on_as_it_is_counts_as_read() -> None:
    found = captured(lambda x, y: y)
    assert found.reads == ("y",) and found.operations == ()


@pytest.mark.parametrize("fn", [lambda x, y: x.clone().mul_(2), lambda x, y: torch.where(x > 2, x, y[[0, 2, 1]])])
def test_writes_to_its_own_tensors_and_indices_by_place_are_pure(fn) -> None:
    found = captured(fn)
    assert torch.equal(found.result["out"], fn(X, X))
