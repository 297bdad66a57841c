"""Takes a hypothesis draw; gives values that no contract asks for: numbers at every edge, objects of any type."""

import datetime
import decimal
import fractions
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

EDGES = (
    *(0, 1, -1, 2, 3, 7, 255, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**400, -(10**5000)),
    *(0.0, -0.0, 0.5, 1.0, 1e-5, 1e-45, 5e-324, 3.4e38, -3.4e38, 1e39, 1e300, math.inf, -math.inf, math.nan),
    *(True, False),
)

NAMES = (
    *("", "0", "1", "null", "none", "None", "true", "nan", "auto", "default", "batch", "group", "token", "turn"),
    *("additive", "gvpo", "process_weighted", "token_gae", "turn_gae", "identity", "eager", "reference", "strict"),
    *("k1", "k4", "os.system", "compiled_adv.gae.constant_gae_lambda", "compiled_adv", "a..b", "."),
    *("é\ud800", "x" * 5000),
    *("__main__.x", "builtins.eval", "torch.zeros", "\0", "a\nb", "../../etc/passwd", "torch.nn.Module"),
)


class Odd:
    """An object that is nothing in particular, but has attributes of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def endless() -> Any:
    """An iterable without an end."""
    while True:
        yield 1


def itself() -> list[Any]:
    """A list and a dict that hold themselves."""
    loop: list[Any] = []
    loop.append({"again": loop})
    return loop


MADE = (
    lambda: None,
    Odd,
    object,
    endless,
    itself,
    lambda: len,
    lambda: int,
    lambda: b"\xff\0",
    lambda: 1j,
    lambda: {1, 2},
    lambda: range(10**9),
    lambda: iter(()),
    lambda: decimal.Decimal("NaN"),
    lambda: fractions.Fraction(1, 3),
    lambda: datetime.date(2020, 1, 1),
    lambda: Path("nowhere"),
    lambda: np.float32(0.5),
    lambda: np.bool_(True),
    lambda: np.int64(3),
    lambda: np.array([1.0, np.nan]),
    lambda: np.array(["a", None], dtype=object),
    lambda: torch.tensor(1),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.zeros(0),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.float32,
    lambda: torch.Size([2]),
)


def one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Like sampled_from, which prints its values and so fails on an integer of thousands of digits."""
    return st.integers(0, len(values) - 1).map(lambda i: values[i])


numbers = one_of(EDGES) | st.integers(-4, 9) | st.floats(allow_nan=True)
texts = one_of(NAMES) | st.text(max_size=8)
odd = one_of(MADE).map(lambda make: make())
scalars = numbers | texts | odd
things = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(texts | numbers.filter(lambda x: x == x), inner, max_size=4)
    ),
    max_leaves=8,
)
