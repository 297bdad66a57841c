"""Takes tensors and masks; gives the operations that come in two forms, of the same numbers.

One is for a compiler, which fuses; the other is few fast passes for torch as it is, where a comparison costs four
passes and torch.where, which takes a branch for each number, seven or more.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from compiled_adv import kernels
from compiled_adv.stages.select import columns, finite, select, shift_left


def as_mask(x: Tensor) -> Tensor:
    """1.0 where x is not zero, else 0.0."""
    if is_compiling():
        return (x != 0).to(torch.float32)
    return x.to(torch.bool).view(torch.uint8).to(torch.float32)


def either(mask: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """x where the mask is set, else the other."""
    return torch.where(mask > 0, x, other) if is_compiling() else select(mask, x) + select(1 - mask, other)


def roll_left(x_BT: Tensor, tokens: Tensor) -> Tensor:
    """torch.roll by -1 within the caller's width, whatever the padded width."""
    if is_compiling():
        return torch.where(columns(x_BT) == tokens - 1, x_BT[:, :1], shift_left(x_BT))
    return shift_left(x_BT).index_copy_(1, (tokens - 1).to(torch.int64)[None], x_BT[:, :1])


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


def copy(x_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """The same numbers as a tensor of their own: compiled, a plain clone would be a loop of its own; what reads a row's
    length stays in the row's loop."""
    return torch.where(lengths_B[:, None] >= 0, x_BT, 0.0) if is_compiling() else x_BT.clone()


def prefix(words_BW: Tensor) -> tuple[Tensor, Tensor]:
    """Set tokens of each row, of four bytes in a word, and whether they are no prefix: a word has a hole, or the last
    set byte is not at the row's length."""
    if not is_compiling():
        set_BT = words_BW.view(torch.bool).to(torch.float32)
        lengths_B = set_BT.sum(1)
        return lengths_B.to(torch.int32), (set_BT * (columns(set_BT) + 1)).amax(1) != lengths_B
    for shift in (4, 2, 1):  # a bool that was made elsewhere may hold another byte than 1
        words_BW = words_BW | words_BW >> shift
    words_BW = words_BW & 0x01010101
    set_BW = (words_BW & 1) + (words_BW >> 8 & 1) + (words_BW >> 16 & 1) + (words_BW >> 24 & 1)
    hole_BW = words_BW >> 8 & ~words_BW & 0x00010101
    end_BW = torch.where(words_BW != 0, columns(words_BW) * 4 + set_BW, 0)
    lengths_B = set_BW.sum(1, dtype=torch.int32)
    return lengths_B, (hole_BW.amax(1) != 0) | (end_BW.amax(1) != lengths_B)


def row_moments(x_BT: Tensor, mask_BT: Tensor, n_B: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations, float64; in a compiled graph of sums that fuse with what writes x, exact but
    for 1e-12."""
    if not is_compiling():
        return kernels.row_moments(x_BT, mask_BT)[1:]
    # each from the start: what two sums read would be written to memory
    sum_B = select(mask_BT, x_BT).sum(1, dtype=torch.float64)
    squares_B = select(mask_BT, x_BT).to(torch.float64).square().sum(1)
    mean_B = sum_B / n_B.clamp(min=1)
    m2_B = squares_B - sum_B * mean_B
    return mean_B, torch.where(m2_B > 1e-12 * squares_B, m2_B, 0.0)


def some(violations_BT: Tensor) -> Tensor:
    """Rows with a violation. Counted as integers: a sum of floats would be cascaded, a maximum ordered around NaN."""
    if not is_compiling():
        return ~(violations_BT.sum(1) == 0)
    return (violations_BT != 0).to(torch.int32).sum(1, dtype=torch.int32) > 0


def bits(*flags: Tensor) -> Tensor:
    """Flags, bool [B] each, as bits of one word a row, int64 [B]."""
    if not is_compiling():
        place_F1 = torch.arange(len(flags), device=flags[0].device)[:, None]
        return (torch.stack(flags).to(torch.int64) << place_F1).sum(0)
    bits_B = flags[0].to(torch.int64)
    for i, flag_B in enumerate(flags[1:], 1):
        bits_B = bits_B | flag_B.to(torch.int64) << i
    return bits_B
