"""Takes a result and what it should be; gives where they are not the same."""

import torch
from torch import Tensor


def unequal(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Where two tensors of one shape differ beyond float32 rounding. A NaN equals nothing."""
    got, want = got.to(torch.float64), want.to(torch.float64)
    return ~((got - want).abs() <= tolerance * (1 + want.abs()))
