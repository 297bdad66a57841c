"""Takes tensors and masks; gives the few tensor idioms that every stage shares.

Masks are float32, 1 or 0: a bool tensor makes the CPU compiler's kernels scalar. A mask selects, it never multiplies:
0 * NaN is NaN. Some have a form for a compiler, which fuses, and one of few fast passes for torch as it is, where a
comparison costs four passes and torch.where, which takes a branch for each number, seven or more.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from compiled_adv.channel import FACTS
from compiled_adv.kernels.blocked import select

__all__ = ["select"]  # x where the mask is set, else 0


def columns(x_BT: Tensor) -> Tensor:
    """Column numbers [T]."""
    return torch.arange(x_BT.shape[1], dtype=torch.int32, device=x_BT.device)


def fact(facts: Tensor, name: str) -> Tensor:
    """One number of the `facts` channel, as a 0-d tensor."""
    return facts[FACTS.index(name)]


def as_mask(x: Tensor) -> Tensor:
    """1.0 where x is not zero, else 0.0."""
    if is_compiling():
        return (x != 0).to(torch.float32)
    return x.to(torch.bool).view(torch.uint8).to(torch.float32)


def either(mask: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """x where the mask is set, else the other."""
    return torch.where(mask > 0, x, other) if is_compiling() else select(mask, x) + select(1 - mask, other)


def shift_left(x_BT: Tensor, fill: float = 0) -> Tensor:
    """Entry t becomes entry t+1; the last column becomes `fill`."""
    return torch.nn.functional.pad(x_BT[:, 1:], (0, 1), value=fill)


def roll_left(x_BT: Tensor, tokens: Tensor) -> Tensor:
    """torch.roll by -1 within the caller's width, whatever the padded width."""
    if is_compiling():
        return torch.where(columns(x_BT) == tokens - 1, x_BT[:, :1], shift_left(x_BT))
    return shift_left(x_BT).index_copy_(1, (tokens - 1).to(torch.int64)[None], x_BT[:, :1])


def at_column(x_BT: Tensor, column_B: Tensor) -> Tensor:
    """x[b, column[b]] as [B]."""
    return x_BT.gather(1, column_B.to(torch.int64)[:, None])[:, 0]


def put(x_B: Tensor, column_B: Tensor, like_BT: Tensor) -> Tensor:
    """x at each row's column, nowhere if that is -1, and 0 elsewhere; [B,T]."""
    if is_compiling():
        return torch.where(columns(like_BT) == column_B[:, None], x_B[:, None], 0.0)
    placed_B1 = torch.where(column_B < 0, 0.0, x_B)[:, None]
    return torch.zeros_like(like_BT).scatter_(1, column_B.clamp(min=0).to(torch.int64)[:, None], placed_B1)


def without(x_BT: Tensor, column_B: Tensor) -> Tensor:
    """x with 0 at each row's column."""
    if is_compiling():
        return torch.where(columns(x_BT) == column_B[:, None], 0.0, x_BT)
    return x_BT.scatter(1, column_B.to(torch.int64)[:, None], 0.0)


def clean(x: Tensor) -> Tensor:
    """0 in place of a number that is not finite: in an active slot it is an error, in a masked one nothing."""
    return torch.where(finite(x), x, 0.0) if is_compiling() else torch.nan_to_num(x, 0.0, 0.0, 0.0)


def last_valid(lengths_B: Tensor, tokens: Tensor) -> Tensor:
    """Column of each row's last valid token; an empty row wraps to the last column, as index -1 does."""
    return torch.where(lengths_B > 0, lengths_B, tokens) - 1


def finite(x: Tensor) -> Tensor:
    """True where x is a finite number (inf - inf and NaN - NaN are NaN)."""
    return x - x == 0
