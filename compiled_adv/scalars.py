"""Takes any value; tells whether it is a plain number. A bool is none, and neither is a string."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def is_integer(value: object, at_least: int) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least


def plain(value: Any) -> Any:
    """A number of numpy's as Python's own; anything else as it is."""
    return value.item() if is_number(value) and hasattr(value, "item") else value
