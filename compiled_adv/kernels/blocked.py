"""Takes rows of tokens; gives the operations that torch lacks, in vectorised torch, on any device.

They serve the eager backend and any machine without a compiler; the compiled backend replaces each by its own
operator. No loop runs over tokens: active columns are packed where they have gaps, and scanned in blocks by a matrix of
powers relative to the position; the block heads are scanned the same way. A mask is 1 or 0.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 32
CACHED = 1 << 17  # numbers of one temporary
F32, F64 = torch.float32, torch.float64


def select(mask: Tensor, x: Tensor) -> Tensor:
    """x where the mask is set, else 0."""
    return torch.ops.aten.threshold_backward(x, mask, 0)  # torch.where takes a branch for each number


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
    if end is not None and bool(steps_BT[:, int(end) :].any()):
        steps_BT = steps_BT.clone()
        steps_BT[:, int(end) :] = 0
    factor_B = discount * lambda_B.to(F64)
    factor = factor_B[0].item() if bool((factor_B == factor_B[0]).all()) else factor_B
    width = steps_BT.shape[1]
    count_B1 = steps_BT.sum(1, keepdim=True)
    pairs_B1 = (steps_BT[:, 1:] * steps_BT[:, :-1]).sum(1, keepdim=True)
    after_B1 = select(count_B1, discount * bootstrap_B[:, None])
    if not with_next and bool((count_B1 - pairs_B1 <= 1).all()):  # the steps of each row are one run
        column_T = torch.arange(width, dtype=F32, device=steps_BT.device)
        last_B1 = (steps_BT * column_T).amax(1, keepdim=True)
        first_B1 = (last_B1 - count_B1 + 1).clamp(max=width - 1)
        rewards_BT = select(steps_BT, rewards_BT).scatter_add_(1, last_B1.to(torch.int64), after_B1)
        values_BT = None if values_BT is None else select(steps_BT, values_BT)
        run_BT = _scan(rewards_BT, values_BT, discount, factor)
        carried_B1 = run_BT.gather(1, first_B1.to(torch.int64))
        return select(steps_BT, run_BT).add_(select(first_B1 - column_T, carried_B1)), steps_BT.new_empty(0)

    most = int(count_B1.max())
    pack, unpack = (_pack_few if 16 * most < width else _pack_many)(steps_BT, count_B1, most)
    count_B1 = count_B1.to(torch.int64)
    rewards_BN = pack(rewards_BT).scatter_add_(1, (count_B1 - 1).clamp(min=0), after_B1)
    values_BN = None if values_BT is None else pack(values_BT)
    running_BT = unpack(_scan(rewards_BN, values_BN, discount, factor))
    if not with_next:
        return running_BT, steps_BT.new_empty(0)
    values_BN = torch.zeros_like(rewards_BN) if values_BN is None else values_BN
    return running_BT, unpack(values_BN.scatter(1, count_B1, bootstrap_B[:, None]))


Packing = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _pack_many(steps_BT: Tensor, count_B1: Tensor, most: int) -> Packing:
    """[B,T] -> the entries of its steps [B,most+1], zeros behind them; and back: to each column the next step's."""
    counted = F32 if steps_BT.device.type == "cpu" else torch.int64  # a GPU may refuse floats
    entry_BT = steps_BT.cumsum(1, dtype=counted) - steps_BT  # steps before the column
    packed_BT = torch.lerp(count_B1.new_full((1, 1), most + 1), entry_BT, steps_BT).to(torch.int64)
    entry_BT = entry_BT.to(torch.int64)

    def pack(x_BT: Tensor) -> Tensor:
        # inactive columns fall into one entry more, which is cut off
        return x_BT.new_zeros(len(x_BT), most + 2).scatter_(1, packed_BT, x_BT)[:, : most + 1]

    return pack, lambda x_BN: x_BN.gather(1, entry_BT)


def _pack_few(steps_BT: Tensor, count_B1: Tensor, most: int) -> Packing:
    """The same by the place of each step, which is faster where few columns are steps."""
    rows, width = steps_BT.shape
    row_S, column_S = steps_BT.to(torch.bool).nonzero(as_tuple=True)
    count_B = count_B1[:, 0].to(torch.int64)
    entry_S = torch.arange(len(row_S), device=row_S.device) - (count_B.cumsum(0) - count_B)[row_S]
    place_BN = torch.full((rows, most + 1), width - 1, device=row_S.device).index_put_((row_S, entry_S), column_S)
    columns_BN = place_BN.diff(dim=1, prepend=place_BN.new_full((rows, 1), -1))  # columns that show an entry

    def pack(x_BT: Tensor) -> Tensor:
        return x_BT.new_zeros(rows, most + 1).index_put_((row_S, entry_S), x_BT[row_S, column_S])

    def unpack(x_BN: Tensor) -> Tensor:
        return x_BN.flatten().repeat_interleave(columns_BN.flatten(), output_size=steps_BT.numel()).view(rows, width)

    return pack, unpack


def _scan(rewards_BN: Tensor, values_BN: Tensor | None, discount: float, factor: "float | Tensor") -> Tensor:
    """run where every column is a step, starting at zeros.

    Blocks hand over in float64; within a block float32 loses nothing, unless its powers leave float32.
    """
    rows, width = rewards_BN.shape
    power_K, weight_KK, tame = _powers(factor, rewards_BN.device)
    near = F32 if tame and rewards_BN.device.type == "cpu" else F64  # a GPU may multiply float32 matrices in TF32
    rewards_BJK = _blocks(rewards_BN)
    head_BJ = _sums(rewards_BJK, power_K[..., :-1])
    delta_BJK = rewards_BJK.to(near, copy=True)
    if values_BN is not None:
        values_BJK = _blocks(values_BN)
        # a value's share in the head of its block: less itself, and as the next one of the step before it
        share_K = -power_K[..., :-1]
        share_K[..., 1:] += discount * power_K[..., :-2]
        head_BJ += _sums(values_BJK, share_K)
        head_BJ[:, :-1] += discount * power_K[..., -2:-1] * values_BJK[:, 1:, 0]
        delta_BJK -= values_BJK
        delta_BJK.view(rows, -1)[:, :-1].add_(values_BJK.view(rows, -1)[:, 1:], alpha=discount)
    run_BJ = suffix_scan(head_BJ, power_K[..., -1])
    delta_BJK[:, :-1, -1] += (power_K[..., 1:2] * run_BJ[:, 1:]).to(near)
    return (delta_BJK @ weight_KK.to(near)).view(rows, -1)[:, :width].to(F32)


def suffix_scan(x_BN: Tensor, factor: Tensor) -> Tensor:
    """y[n] = x[n] + factor * y[n+1], float64, in blocks. The factor is one, or one for each row."""
    rows, width = x_BN.shape
    power_K, weight_KK, _ = _powers(factor.item() if factor.ndim == 0 else factor, x_BN.device)
    y_BJK = _blocks(x_BN) @ weight_KK
    if y_BJK.shape[1] > 1:
        head_BJ = suffix_scan(y_BJK[:, :, 0], power_K[..., BLOCK])
        after_BJ = torch.nn.functional.pad(head_BJ[:, 1:], (0, 1))
        y_BJK = y_BJK + after_BJ[:, :, None] * power_K[..., None, 1:].flip(-1)
    return y_BJK.view(rows, -1)[:, :width]


def _blocks(x_BN: Tensor) -> Tensor:
    """[B,N] as [B,J,BLOCK], with zeros at the end."""
    if missing := -x_BN.shape[1] % BLOCK:
        x_BN = torch.nn.functional.pad(x_BN, (0, missing))
    return x_BN.view(len(x_BN), -1, BLOCK)


def _sums(x_BJK: Tensor, weight_K: Tensor) -> Tensor:
    """Weighted sum of each block, float64; weights are [K] or [B,K]."""
    x_BJK = x_BJK.to(F64)
    return x_BJK @ weight_K if weight_K.ndim == 1 else (x_BJK @ weight_K[:, :, None])[..., 0]


def _powers(factor: "float | Tensor", device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """Powers 0 to BLOCK, the weight of each source in each target of a block, and whether all this fits float32."""
    return _known_powers(factor, device) if isinstance(factor, float) else _made_powers(factor[:, None])


@lru_cache(maxsize=64)
def _known_powers(factor: float, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    return _made_powers(torch.tensor([factor], dtype=F64, device=device))


def _made_powers(factor: Tensor) -> tuple[Tensor, Tensor, bool]:
    """A power that overflows is held at the largest number."""
    exponent_K = torch.arange(BLOCK + 1, device=factor.device)
    limit = torch.finfo(F64).max
    power_K = factor.pow(exponent_K).clamp(-limit, limit)
    size_K = power_K.abs()
    tame = ((size_K < 1e30) & ((size_K > 1e-30) | (size_K == 0))).all()
    distance_KK = exponent_K[:BLOCK, None] - exponent_K[None, :BLOCK]  # source minus target
    return power_K, torch.where(distance_KK >= 0, power_K[..., distance_KK.clamp(min=0)], 0.0), bool(tame)


def row_moments(x_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of each row's active entries, float64 [B]; zeros for an empty row."""
    n_B = mask_BT.sum(1).to(F64)
    x_BT = select(mask_BT, x_BT).to(F64)
    mean_B = x_BT.sum(1) / n_B.clamp(min=1)
    away_BT = x_BT.sub_(mean_B[:, None]).mul_(mask_BT.to(F64))  # finite off the mask: selected above
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
    first_S, last_S, _, new_S = _stretches(turn_ids_BT, mask_BT)
    first_N, last_N = first_S[new_S], last_S[new_S.roll(-1)]  # the first stretch begins a turn: the roll ends the last
    rewards_Z = select(mask_BT, rewards_BT).flatten()
    at_Z = rewards_Z.to(torch.bool).nonzero()[:, 0]
    turn_Z = torch.searchsorted(first_N, at_Z, right=True) - 1
    total_N = first_N.new_zeros(len(first_N), dtype=F64).index_add_(0, turn_Z, rewards_Z[at_Z].to(F64))

    def at_ends(x_N: Tensor) -> Tensor:
        return mask_BT.new_zeros(mask_BT.numel(), dtype=F32).index_put_((last_N,), x_N).view(mask_BT.shape)

    value_BT = mask_BT.new_empty(0, dtype=F32) if values_BT is None else at_ends(values_BT.flatten()[first_N])
    return at_ends(total_N.to(F32)), value_BT, at_ends(torch.ones_like(total_N, dtype=F32))


def turn_counts(turn_ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Turns of each row, int64 [B], and whether the ids of its active columns never go back, bool [B]."""
    first_S, _, id_S, new_S = _stretches(turn_ids_BT, mask_BT)
    row_S = first_S // mask_BT.shape[1]
    zeros_B = row_S.new_zeros(len(mask_BT))
    back_S = ((row_S[1:] == row_S[:-1]) & (id_S[1:] < id_S[:-1])).to(torch.int64)
    return zeros_B.index_add(0, row_S, new_S.to(torch.int64)), zeros_B.index_add(0, row_S[1:], back_S) == 0


def _stretches(turn_ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stretches of active columns with one id: their first and last flat place, id, and whether a turn begins there.

    A stretch with the id of the one before it in the row goes on with its turn. Ids are below 2^24, as columns are.
    """
    width = mask_BT.shape[1]
    id_BT = select(mask_BT, turn_ids_BT.to(F32).clamp(min=0) + 1)  # 0 where inactive; a bad id is flagged elsewhere
    changes_BT = id_BT - torch.nn.functional.pad(id_BT[:, :-1], (1, 0))
    first_S = changes_BT.to(torch.bool).flatten().nonzero()[:, 0]
    after_S = torch.nn.functional.pad(first_S[1:], (0, 1), value=mask_BT.numel())
    last_S = torch.minimum(after_S, (first_S // width + 1) * width) - 1
    id_S = id_BT.flatten()[first_S]
    first_S, last_S, id_S = (x_S[id_S > 0] for x_S in (first_S, last_S, id_S))
    row_S = first_S // width
    new_S = torch.ones_like(first_S, dtype=torch.bool)
    new_S[1:] = (row_S[1:] != row_S[:-1]) | (id_S[1:] != id_S[:-1])
    return first_S, last_S, id_S, new_S


def turn_recurrence(
    rewards_BT: Tensor,
    values_BT: Tensor | None,
    turn_ids_BT: Tensor,
    mask_BT: Tensor,
    bootstrap_B: Tensor,
    discount: float,
    lambda_B: Tensor,
    tokens: Tensor,
    turn_totals: Callable[..., tuple[Tensor, ...]] = turn_totals,
    turn_counts: Callable[..., tuple[Tensor, ...]] = turn_counts,
    backward_recurrence: Callable[..., tuple[Tensor, ...]] = backward_recurrence,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The recurrence with one step for each turn: its reward, and the value of its first column. `turn_ids` as the
    batch has them: the id of a column stands to its right, and is -1 beyond the row.

    Returns run and, with a critic, the value of the turn that ends at or behind each column (else empty), float32
    [B,T]; whether a row's active ids never go back, and whether they lie in [0, tokens), bool [B].
    """
    ids_BT = torch.nn.functional.pad(turn_ids_BT[:, 1:], (0, 1), value=-1)
    totals_BT, firsts_BT, ends_BT = turn_totals(rewards_BT, values_BT, ids_BT, mask_BT)
    _, ordered_B = turn_counts(ids_BT, mask_BT)
    values_BT, critic = (None, False) if values_BT is None else (firsts_BT, True)
    run_BT, value_BT = backward_recurrence(totals_BT, values_BT, ends_BT, bootstrap_B, discount, lambda_B, None, critic)
    seen_BT = select(mask_BT, ids_BT.to(F32))  # rounding keeps an id on its side of 0 and of the number of tokens
    return run_BT, value_BT, ordered_B, (seen_BT.amin(1) >= 0) & (seen_BT.amax(1) <= tokens - 1)


def discounted_sum(x: Tensor, factor: Tensor) -> Tensor:
    """y[t] = x[t] + factor[t] * y[t+1] along the last dim of float32 tensors of one shape, summed in float64."""
    if x.numel() == 0:
        return x.clone()
    x_BT, factor_BT = (each.reshape(-1, each.shape[-1]) for each in (x, factor))
    return torch.cat([_discounted_sum(x_BT[r], factor_BT[r]) for r in _row_blocks(x_BT)]).to(x.dtype).view(x.shape)


def _row_blocks(x_BT: Tensor) -> list[slice]:
    """Slices of rows whose temporaries stay in a CPU's cache; an accelerator takes all rows at once."""
    rows = max(1, CACHED // max(1, x_BT.shape[1])) if x_BT.device.type == "cpu" else len(x_BT)
    return [slice(start, start + rows) for start in range(0, len(x_BT), rows)]


def _discounted_sum(x_BT: Tensor, factor_BT: Tensor) -> Tensor:
    """Float64. Column by column inside all blocks of a row at once, then what comes from behind each block."""
    rows, width = x_BT.shape
    blocks = -(-width // BLOCK)

    def by_column(x_BT: Tensor) -> Tensor:
        padded_BT = torch.nn.functional.pad(x_BT.to(torch.float64), (0, blocks * BLOCK - width))
        return padded_BT.view(rows, blocks, BLOCK).permute(2, 0, 1).contiguous()

    y_KBJ, factor_KBJ = by_column(x_BT), by_column(factor_BT)
    for k in reversed(range(BLOCK - 1)):
        y_KBJ[k].addcmul_(factor_KBJ[k], y_KBJ[k + 1])
        factor_KBJ[k].mul_(factor_KBJ[k + 1])
    if blocks > 1:
        limit = torch.finfo(torch.float64).max  # 0 * inf would be NaN
        factor_KBJ = factor_KBJ.clamp_(-limit, limit)
        head_BJ = _discounted_sum(y_KBJ[0], factor_KBJ[0])
        y_KBJ.addcmul_(factor_KBJ, torch.nn.functional.pad(head_BJ[:, 1:], (0, 1)))
    return y_KBJ.permute(1, 2, 0).reshape(rows, blocks * BLOCK)[:, :width]
