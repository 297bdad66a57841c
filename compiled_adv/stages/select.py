"""Takes tensors and masks; gives the few tensor idioms that every stage shares.

Masks are float32, 1 or 0: a bool tensor makes the CPU compiler's kernels scalar. A mask selects, it never multiplies:
0 * NaN is NaN. Those that a compiler wants otherwise than torch as it is are in forms.py.
"""

import torch
from torch import Tensor

from compiled_adv.channel import FACTS
from compiled_adv.kernels.blocked import select

__all__ = ["select"]  # x where the mask is set, else 0


def columns(x_BT: Tensor) -> Tensor:
    """Column numbers [T]."""
    return torch.arange(x_BT.shape[1], dtype=torch.int32, device=x_BT.device)


def fact(facts: Tensor, name: str) -> Tensor:
    """One number of the `facts` channel, as a 0-d tensor."""
    return facts[FACTS.index(name)]


def shift_left(x_BT: Tensor, fill: float = 0) -> Tensor:
    """Entry t becomes entry t+1; the last column becomes `fill`."""
    return torch.nn.functional.pad(x_BT[:, 1:], (0, 1), value=fill)


def at_column(x_BT: Tensor, column_B: Tensor) -> Tensor:
    """x[b, column[b]] as [B]."""
    return x_BT.gather(1, column_B.to(torch.int64)[:, None])[:, 0]


def last_valid(lengths_B: Tensor, tokens: Tensor) -> Tensor:
    """Column of each row's last valid token; an empty row wraps to the last column, as index -1 does."""
    return torch.where(lengths_B > 0, lengths_B, tokens) - 1


def finite(x: Tensor) -> Tensor:
    """True where x is a finite number (inf - inf and NaN - NaN are NaN)."""
    return x - x == 0
