"""Takes rows of tokens; gives the four operations that torch lacks, in vectorised torch, on any device.

They serve the eager backend and any machine without a compiler; the compiled backend replaces each by its own
operator. No loop runs over tokens: active columns are packed, scanned in blocks by a matrix of powers relative to the
position, and the block heads are scanned the same way.
"""

import torch
from torch import Tensor

BLOCK = 32
CACHED = 1 << 17  # numbers of one temporary


def backward_recurrence(
    rewards_BT: Tensor,
    values_BT: Tensor | None,
    steps_BT: Tensor,
    bootstrap_B: Tensor,
    discount: float,
    lambda_B: Tensor,
    end: Tensor | None,
    with_next: bool,
) -> tuple[Tensor, Tensor]:
    """The masked two-state recurrence, right to left: where a step is set,

        run = R + discount*nxt - V + discount*lambda*run;  nxt = V

    Columns from `end` (int64 scalar; None: the width) on are no steps.

    Returns run [B,T] at every column (carried where no step is set) and, if asked, nxt after the column (else empty).
    """
    if end is not None and bool((steps_BT[:, int(end) :] != 0).any()):
        steps_BT = steps_BT.clone()
        steps_BT[:, int(end) :] = 0
    running_BT = torch.empty_like(rewards_BT)
    next_BT = torch.empty_like(rewards_BT) if with_next else rewards_BT.new_empty(0)
    for rows in _row_blocks(rewards_BT):
        values = None if values_BT is None else values_BT[rows]
        factor_B = discount * lambda_B[rows].to(torch.float64)
        part = _recurrence(rewards_BT[rows], values, steps_BT[rows] != 0, bootstrap_B[rows], discount, factor_B)
        running_BT[rows] = part[0].gather(1, part[2])
        if with_next:
            next_BT[rows] = part[1].gather(1, part[2])
    return running_BT, next_BT


def _recurrence(
    rewards_BT: Tensor,
    values_BT: Tensor | None,
    step_BT: Tensor,
    bootstrap_B: Tensor,
    discount: float,
    factor_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The two states before each packed step [B,N+1], the last entry being the start, and each column's entry [B,T]."""
    inclusive_BT = step_BT.cumsum(1)
    entry_BT = inclusive_BT - step_BT.to(torch.int64)
    count_B1 = inclusive_BT[:, -1:]
    width = int(count_B1.max())
    packed_BT = torch.where(step_BT, entry_BT, width + 1)  # inactive columns fall into one entry that is cut off

    def pack(x_BT: Tensor) -> Tensor:
        zeros_BN = x_BT.new_zeros(len(x_BT), width + 2)
        return zeros_BN.scatter_(1, packed_BT, x_BT)[:, : width + 1].to(torch.float64)

    delta_BN = pack(rewards_BT)
    value_BN = torch.zeros_like(delta_BN) if values_BT is None else pack(values_BT)
    value_BN.scatter_(1, count_B1, bootstrap_B[:, None].to(torch.float64))
    delta_BN[:, :-1] += discount * value_BN[:, 1:] - (0.0 if values_BT is None else value_BN[:, :-1])
    delta_BN.masked_fill_(torch.arange(width + 1, device=delta_BN.device) >= count_B1, 0.0)
    return suffix_scan(delta_BN, factor_B).to(torch.float32), value_BN.to(torch.float32), entry_BT


def _row_blocks(x_BT: Tensor) -> list[slice]:
    """Slices of rows whose temporaries stay in a CPU's cache; an accelerator takes all rows at once."""
    rows = max(1, CACHED // max(1, x_BT.shape[1])) if x_BT.device.type == "cpu" else len(x_BT)
    return [slice(start, start + rows) for start in range(0, len(x_BT), rows)]


def suffix_scan(x_BN: Tensor, factor_B: Tensor) -> Tensor:
    """y[n] = x[n] + factor * y[n+1], float64, in blocks; a power that overflows is held at the largest number."""
    rows, width = x_BN.shape
    blocks = -(-width // BLOCK)
    x_BJK = torch.nn.functional.pad(x_BN, (0, blocks * BLOCK - width)).view(rows, blocks, BLOCK)
    uniform = bool((factor_B == factor_B[:1]).all())
    exponent_K = torch.arange(BLOCK + 1, device=x_BN.device)
    limit = torch.finfo(torch.float64).max
    power_RK = (factor_B[:1] if uniform else factor_B)[:, None].pow(exponent_K).clamp(-limit, limit)
    distance_KK = exponent_K[:BLOCK, None] - exponent_K[None, :BLOCK]  # source minus target
    weight_RKK = torch.where(distance_KK >= 0, power_RK[:, distance_KK.clamp(min=0)], 0.0)
    y_BJK = x_BJK @ weight_RKK
    if blocks > 1:
        head_BJ = suffix_scan(y_BJK[:, :, 0], power_RK[:, BLOCK].expand(rows))
        after_BJ = torch.nn.functional.pad(head_BJ[:, 1:], (0, 1))
        y_BJK = y_BJK + after_BJ[:, :, None] * power_RK[:, None, 1:].flip(2)
    return y_BJK.view(rows, blocks * BLOCK)[:, :width]


def row_moments(x_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of each row's active entries, float64 [B]; zeros for an empty row."""
    blocks = [_row_moments(x_BT[rows], mask_BT[rows] != 0) for rows in _row_blocks(x_BT)]
    n_B, mean_B, m2_B = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return n_B, mean_B, m2_B


def _row_moments(x_BT: Tensor, active_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n_B = active_BT.sum(1).to(torch.float64)
    x_BT = torch.where(active_BT, x_BT, 0.0)
    mean_B = x_BT.sum(1, dtype=torch.float64) / n_B.clamp(min=1)
    away_BT = torch.where(active_BT, x_BT - mean_B[:, None], 0.0)
    return n_B, mean_B, away_BT.square_().sum(1)


def merge_moments(n_U: Tensor, mean_U: Tensor, m2_U: Tensor, part_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of each part, at index part, float64 [U]; units of part -1 are left out.

    Deviations are taken from one of the part's own means, so that equal means give a spread of exactly 0.
    """
    size = len(n_U)
    n_U = torch.where(part_U >= 0, n_U, 0.0)
    used_U = torch.where(n_U > 0, part_U, size)  # one slot more, for what is left out

    def total(x_U: Tensor) -> Tensor:
        return x_U.new_zeros(size + 1).index_add_(0, used_U, x_U)[:size]

    pivot_S = mean_U.new_zeros(size + 1).scatter_reduce_(0, used_U, mean_U, "amin", include_self=False)
    n_S = total(n_U)
    mean_S = pivot_S[:size] + total(n_U * (mean_U - pivot_S[used_U])) / n_S.clamp(min=1)
    mean_S = torch.where(n_S > 0, mean_S, 0.0)
    own_U = torch.nn.functional.pad(mean_S, (0, 1))[used_U]
    return n_S, mean_S, total(m2_U + n_U * (mean_U - own_U).square())


def turn_totals(
    rewards_BT: Tensor, values_BT: Tensor | None, turn_ids_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Reward and value of each turn at its last active column, and that column's mark.

    A turn is a run of equal ids among a row's active columns; its reward is their float64 sum, its value that of the
    first. Returns float32 [B,T] three times; without a critic the values are empty.
    """
    row_A, column_A = (mask_BT != 0).nonzero(as_tuple=True)
    id_A = turn_ids_BT[row_A, column_A]
    goes_on_A = (row_A[1:] == row_A[:-1]) & (id_A[1:] == id_A[:-1])
    start_A = torch.nn.functional.pad(~goes_on_A, (1, 0), value=True)[: len(row_A)]
    end_A = torch.nn.functional.pad(~goes_on_A, (0, 1), value=True)[: len(row_A)]
    turn_A = start_A.cumsum(0) - 1
    turns = int(start_A.sum())
    total_N = torch.zeros(turns, dtype=torch.float64, device=row_A.device)
    total_N.index_add_(0, turn_A, rewards_BT[row_A, column_A].to(torch.float64))
    ends = (row_A[end_A], column_A[end_A])

    def at_ends(x_N: Tensor) -> Tensor:
        return torch.zeros(mask_BT.shape, dtype=torch.float32, device=row_A.device).index_put_(ends, x_N)

    none = torch.empty(0, dtype=torch.float32, device=row_A.device)
    value_BT = none if values_BT is None else at_ends(values_BT[row_A[start_A], column_A[start_A]])
    ends_BT = at_ends(torch.ones(turns, dtype=torch.float32, device=row_A.device))
    return at_ends(total_N.to(torch.float32)), value_BT, ends_BT


def turn_counts(turn_ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Turns of each row, int64 [B], and whether the ids of its active columns never go back, bool [B]."""
    row_A, column_A = (mask_BT != 0).nonzero(as_tuple=True)
    id_A = turn_ids_BT[row_A, column_A]
    same_row_A = row_A[1:] == row_A[:-1]
    new_A = torch.ones(len(row_A), dtype=torch.int64, device=row_A.device)
    new_A[1:] = (~same_row_A | (id_A[1:] != id_A[:-1])).to(torch.int64)
    zeros_B = torch.zeros(len(mask_BT), dtype=torch.int64, device=row_A.device)
    backwards_A = (same_row_A & (id_A[1:] < id_A[:-1])).to(torch.int64)
    return zeros_B.index_add(0, row_A, new_A), zeros_B.index_add(0, row_A[1:], backwards_A) == 0
