"""Takes what blocked.py takes, on a GPU; gives the same, by Triton kernels that torch.compile inlines.

A row is cut into blocks of BLOCK columns, counted from its first. What a block does to the state that runs through the
row is one small map, found by a scan inside the block; a chain over the blocks gives each the state that enters it. So
a result never depends on the number of columns or rows behind the batch's own (padding), nor on whether one program
takes a whole row or each block has its own, as long as rows are of whole vectors (Bucket.on). All sums are float64,
inputs of any float dtype are read as float32. BLOCK and WARPS are fixed: tuned ones would round differently from bucket
to bucket.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compiled_adv.kernels import map_rows

BLOCK = 1024
WARPS = 4
# With fewer rows than this, programs of one row each would leave the GPU idle: each block gets its own.
FEW_ROWS = 128

F32, F64, I64 = torch.float32, torch.float64, torch.int64

LARGEST = tl.constexpr(1.7976931348623157e308)


# ---- what scans combine: the earlier entry first, in the scan's own direction ----


@triton.jit
def _then(a0, b0, a1, b1):
    """y -> a0*y + b0, then y -> a1*y + b1. A factor that overflows is held at the largest number: 0*inf is NaN."""
    a = a0 * a1
    return tl.where(a > LARGEST, LARGEST, tl.where(a < -LARGEST, -LARGEST, a)), b1 + a1 * b0


@triton.jit
def _latest(has0, x0, has1, x1):
    """The latest entry that has a number, and whether there is one."""
    return has0 | has1, tl.where(has1 != 0, x1, x0)


@triton.jit
def _segmented(new0, sum0, new1, sum1):
    """Sum since the latest entry that starts anew."""
    return new0 | new1, tl.where(new1 != 0, sum1, sum0 + sum1)


@triton.jit
def _at(x, place, i):
    """The entry of a block at one place, 0 at none."""
    return tl.sum(tl.where(i == place, x, 0), 0)


# ---- backward recurrence ----


@triton.jit
def _delta(reward, after, value, discount):
    # The product is rounded to float32 by itself, as on a CPU: no multiply-add is left to fuse.
    discount = tl.full((), discount, tl.float32).to(tl.float64)
    return reward + (discount * after.to(tl.float64)).to(tl.float32) - value


@triton.jit
def _steps(rewards, values, steps, first, width, end, discount, factor, CRITIC: tl.constexpr, BLOCK: tl.constexpr):
    """One block's map: run[t] = a[t] * (run of the block's last step) + b[t], up to that step.

    Also the value of the next step at each column, and of the first step and the last what the chain needs.
    """
    i = tl.arange(0, BLOCK)
    at = first + i
    step = (tl.load(steps + at, mask=at < width, other=0) != 0) & (at < end)
    reward = tl.load(rewards + at, mask=at < width, other=0).to(tl.float32)
    place = tl.max(tl.where(step, i, -1), 0)  # of the last step
    if CRITIC:
        value = tl.load(values + at, mask=at < width, other=0).to(tl.float32)
        inside = (i + 1 < BLOCK) & (at + 1 < width)
        follows = (tl.load(steps + at + 1, mask=inside, other=0) != 0) & (at + 1 < end)
        following = tl.load(values + at + 1, mask=inside, other=0).to(tl.float32)
        _, after = tl.associative_scan((follows.to(tl.int32), following), 0, _latest, reverse=True)
    else:
        value = tl.zeros([BLOCK], tl.float32)
        after = tl.zeros([BLOCK], tl.float32)
    inner = step & (i < place)
    a = tl.where(inner, factor, 1.0)
    b = tl.where(inner, _delta(reward, after, value, discount), 0).to(tl.float64)
    a, b = tl.associative_scan((a, b), 0, _then, reverse=True)
    first_step = tl.min(tl.where(step, i, BLOCK), 0)
    after = tl.where(step, value, after)
    ends = (_at(a, 0, i), _at(b, 0, i), _at(value, first_step, i), _at(reward, place, i), _at(value, place, i))
    return a, b, after, place, ends


@triton.jit
def _advance(run, after, place, a, b, first_value, reward, value, discount, factor):
    """The state that leaves a block on its left, and the run of its last step."""
    last = _delta(reward, after, value, discount).to(tl.float64) + factor * run
    return tl.where(place >= 0, a * last + b, run), tl.where(place >= 0, first_value, after), last


@triton.jit
def _show(
    running, next_out, first, width, a, b, nexts, place, run, after, last, NEXT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write one block; columns behind its last step carry what entered."""
    i = tl.arange(0, BLOCK)
    at = first + i
    shown = tl.where(i <= place, a * last + b, run)
    tl.store(running + at, shown.to(tl.float32), mask=at < width)
    if NEXT:
        tl.store(next_out + at, tl.where(i <= place, nexts, after), mask=at < width)


@triton.jit
def _recurrence_rows(
    rewards, values, steps, bootstrap, factors, end, running, next_out, rewards_row, values_row, steps_row, width,
    discount, CRITIC: tl.constexpr, NEXT: tl.constexpr, END: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rewards, values, steps = rewards + row * rewards_row, values + row * values_row, steps + row * steps_row
    running, next_out = running + row * width, next_out + row * width
    factor = tl.load(factors + row)
    last_column = tl.load(end) if END else width
    run, after = tl.full((), 0.0, tl.float64), tl.load(bootstrap + row).to(tl.float32)
    for back in range(BLOCKS):
        first = (BLOCKS - 1 - back) * BLOCK
        a, b, nexts, place, ends = _steps(
            rewards, values, steps, first, width, last_column, discount, factor, CRITIC, BLOCK
        )
        new_run, new_after, last = _advance(
            run, after, place, ends[0], ends[1], ends[2], ends[3], ends[4], discount, factor
        )
        _show(running, next_out, first, width, a, b, nexts, place, run, after, last, NEXT, BLOCK)
        run, after = new_run, new_after


@triton.jit
def _recurrence_maps(
    rewards, values, steps, factors, end, maps, rewards_row, values_row, steps_row, width, discount,
    CRITIC: tl.constexpr, END: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rewards, values, steps = rewards + row * rewards_row, values + row * values_row, steps + row * steps_row
    last_column = tl.load(end) if END else width
    _, _, _, place, ends = _steps(
        rewards, values, steps, block * BLOCK, width, last_column, discount, tl.load(factors + row), CRITIC, BLOCK
    )
    maps += (row * BLOCKS + block) * 6
    tl.store(maps, place.to(tl.float64))
    for k in tl.static_range(5):
        tl.store(maps + 1 + k, ends[k].to(tl.float64))


@triton.jit
def _recurrence_chain(bootstrap, factors, maps, states, discount, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    run, after = tl.full((), 0.0, tl.float64), tl.load(bootstrap + row).to(tl.float32)
    for back in range(BLOCKS):
        block = row * BLOCKS + BLOCKS - 1 - back
        it = maps + block * 6
        place, a, b = tl.load(it), tl.load(it + 1), tl.load(it + 2)
        first_value, reward = tl.load(it + 3).to(tl.float32), tl.load(it + 4).to(tl.float32)
        value = tl.load(it + 5).to(tl.float32)
        new_run, new_after, last = _advance(run, after, place, a, b, first_value, reward, value, discount, factor)
        tl.store(states + block * 3, run)
        tl.store(states + block * 3 + 1, after.to(tl.float64))
        tl.store(states + block * 3 + 2, last)
        run, after = new_run, new_after


@triton.jit
def _recurrence_apply(
    rewards, values, steps, factors, end, states, running, next_out, rewards_row, values_row, steps_row, width,
    discount, CRITIC: tl.constexpr, NEXT: tl.constexpr, END: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rewards, values, steps = rewards + row * rewards_row, values + row * values_row, steps + row * steps_row
    last_column = tl.load(end) if END else width
    a, b, nexts, place, _ = _steps(
        rewards, values, steps, block * BLOCK, width, last_column, discount, tl.load(factors + row), CRITIC, BLOCK
    )
    it = states + (row * BLOCKS + block) * 3
    run, after, last = tl.load(it), tl.load(it + 1).to(tl.float32), tl.load(it + 2)
    running, next_out = running + row * width, next_out + row * width
    _show(running, next_out, block * BLOCK, width, a, b, nexts, place, run, after, last, NEXT, BLOCK)


def _backward_recurrence(
    rewards: Tensor,
    values: Tensor | None,
    steps: Tensor,
    bootstrap: Tensor,
    discount: float,
    gae_lambda: Tensor,
    end: Tensor | None,
    with_next: bool,
) -> tuple[Tensor, Tensor]:
    rows, width = rewards.shape
    running = rewards.new_empty((rows, width), dtype=F32)
    after = rewards.new_empty((rows, width) if with_next else 0, dtype=F32)
    if rows * width == 0:
        return running, after
    rewards, steps = _rows(rewards), _rows(steps)
    critic = values is not None
    values = rewards if values is None else _rows(values)
    factors, bootstrap = (discount * gae_lambda.to(F64)).contiguous(), bootstrap.contiguous()
    blocks = triton.cdiv(width, BLOCK)
    last = factors if end is None else end  # without one it is not read
    strides = (rewards.stride(0), values.stride(0), steps.stride(0), width, discount)
    how = {"CRITIC": critic, "END": end is not None, "BLOCKS": blocks, "BLOCK": BLOCK, "num_warps": WARPS}
    if rows >= FEW_ROWS or blocks == 1:
        wrap_triton(_recurrence_rows)[(rows,)](
            rewards, values, steps, bootstrap, factors, last, running, after, *strides, NEXT=with_next, **how
        )
        return running, after
    maps, states = factors.new_empty((rows, blocks, 6)), factors.new_empty((rows, blocks, 3))
    wrap_triton(_recurrence_maps)[(rows, blocks)](rewards, values, steps, factors, last, maps, *strides, **how)
    wrap_triton(_recurrence_chain)[(rows,)](bootstrap, factors, maps, states, discount, BLOCKS=blocks, num_warps=1)
    wrap_triton(_recurrence_apply)[(rows, blocks)](
        rewards, values, steps, factors, last, states, running, after, *strides, NEXT=with_next, **how
    )
    return running, after


# ---- discounted sum ----


@triton.jit
def _sums(x, factors, first, width, BLOCK: tl.constexpr):
    """One block's map: y[t] = a[t] * (y behind the block) + b[t]."""
    i = tl.arange(0, BLOCK)
    at = first + i
    a = tl.load(factors + at, mask=at < width, other=1).to(tl.float32).to(tl.float64)
    b = tl.load(x + at, mask=at < width, other=0).to(tl.float32).to(tl.float64)
    return tl.associative_scan((a, b), 0, _then, reverse=True)


@triton.jit
def _discounted_rows(x, factors, out, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x, factors, out = x + row * width, factors + row * width, out + row * width
    i = tl.arange(0, BLOCK)
    y = tl.full((), 0.0, tl.float64)
    for back in range(BLOCKS):
        first = (BLOCKS - 1 - back) * BLOCK
        a, b = _sums(x, factors, first, width, BLOCK)
        tl.store(out + first + i, (a * y + b).to(tl.float32), mask=first + i < width)
        y = _at(a, 0, i) * y + _at(b, 0, i)


@triton.jit
def _discounted_maps(x, factors, maps, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    a, b = _sums(x + row * width, factors + row * width, block * BLOCK, width, BLOCK)
    tl.store(maps + (row * BLOCKS + block) * 2, _at(a, 0, i))
    tl.store(maps + (row * BLOCKS + block) * 2 + 1, _at(b, 0, i))


@triton.jit
def _discounted_chain(maps, states, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y = tl.full((), 0.0, tl.float64)
    for back in range(BLOCKS):
        block = row * BLOCKS + BLOCKS - 1 - back
        tl.store(states + block, y)
        y = tl.load(maps + block * 2) * y + tl.load(maps + block * 2 + 1)


@triton.jit
def _discounted_apply(x, factors, states, out, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    a, b = _sums(x + row * width, factors + row * width, block * BLOCK, width, BLOCK)
    at = block * BLOCK + i
    y = a * tl.load(states + row * BLOCKS + block) + b
    tl.store(out + row * width + at, y.to(tl.float32), mask=at < width)


def _discounted_sum(x: Tensor, factor: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    width = x.shape[-1]
    rows, blocks = x.numel() // width, triton.cdiv(width, BLOCK)
    x, factor = x.contiguous(), factor.contiguous()
    out = torch.empty_like(x)
    how = {"BLOCKS": blocks, "BLOCK": BLOCK, "num_warps": WARPS}
    if rows >= FEW_ROWS or blocks == 1:
        wrap_triton(_discounted_rows)[(rows,)](x, factor, out, width, **how)
        return out
    maps, states = x.new_empty((rows, blocks, 2), dtype=F64), x.new_empty((rows, blocks), dtype=F64)
    wrap_triton(_discounted_maps)[(rows, blocks)](x, factor, maps, width, **how)
    wrap_triton(_discounted_chain)[(rows,)](maps, states, BLOCKS=blocks, num_warps=1)
    wrap_triton(_discounted_apply)[(rows, blocks)](x, factor, states, out, width, **how)
    return out


# ---- moments ----


@triton.jit
def _merge(n, mean, m2, n1, mean1, m21):
    """Chan, Golub, LeVeque 1983. Equal means leave mean and m2 untouched, an empty part everything, exactly."""
    both = n + n1
    share = n1 / tl.where(both > 0, both, 1.0)
    away = mean1 - mean
    return (
        both,
        tl.where(n1 > 0, mean + away * share, mean),
        tl.where(n1 > 0, m2 + (m21 + away * away * (n * share)), m2),
    )


@triton.jit
def _moments_blocks(x, mask, out, x_row, mask_row, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    on = tl.load(mask + row * mask_row + at, mask=at < width, other=0) != 0
    numbers = tl.load(x + row * x_row + at, mask=on, other=0).to(tl.float32).to(tl.float64)
    n = tl.sum(on.to(tl.float64), 0)
    mean = tl.sum(tl.where(on, numbers, 0.0), 0) / tl.where(n > 0, n, 1.0)
    away = tl.where(on, numbers - mean, 0.0)
    out += (row * BLOCKS + block) * 3
    tl.store(out, n)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.sum(away * away, 0))


@triton.jit
def _moments_chain(parts, n_out, mean_out, m2_out, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    it = parts + row * BLOCKS * 3
    n, mean, m2 = tl.load(it), tl.load(it + 1), tl.load(it + 2)
    for block in range(1, BLOCKS):
        n, mean, m2 = _merge(
            n, mean, m2, tl.load(it + block * 3), tl.load(it + block * 3 + 1), tl.load(it + block * 3 + 2)
        )
    tl.store(n_out + row, n)
    tl.store(mean_out + row, mean)
    tl.store(m2_out + row, m2)


def _row_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x.shape
    if rows * width == 0:
        return x.new_zeros(rows, dtype=F64), x.new_zeros(rows, dtype=F64), x.new_zeros(rows, dtype=F64)
    out = x.new_empty(rows, dtype=F64), x.new_empty(rows, dtype=F64), x.new_empty(rows, dtype=F64)
    x, mask, blocks = _rows(x), _rows(mask), triton.cdiv(width, BLOCK)
    parts = x.new_empty((rows, blocks, 3), dtype=F64)
    wrap_triton(_moments_blocks)[(rows, blocks)](
        x, mask, parts, x.stride(0), mask.stride(0), width, BLOCKS=blocks, BLOCK=BLOCK, num_warps=WARPS
    )
    wrap_triton(_moments_chain)[(rows,)](parts, *out, BLOCKS=blocks, num_warps=1)
    return out


@triton.jit
def _merge_units(n, mean, m2, part, n_out, mean_out, m2_out, units, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One part's moments, around the least of its means: equal ones give a spread of exactly 0."""
    to = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    pivots = tl.full([BLOCK], LARGEST, tl.float64)
    for block in range(BLOCKS):
        at = block * BLOCK + i
        mine = (at < units) & (tl.load(part + at, mask=at < units, other=-1) == to)
        size = tl.load(n + at, mask=mine, other=0.0)
        total += size
        pivots = tl.where(size > 0, tl.minimum(pivots, tl.load(mean + at, mask=mine, other=0.0)), pivots)
    count, pivot = tl.sum(total, 0), tl.min(pivots, 0)
    away = tl.zeros([BLOCK], tl.float64)
    for block in range(BLOCKS):
        at = block * BLOCK + i
        mine = (at < units) & (tl.load(part + at, mask=at < units, other=-1) == to)
        size = tl.load(n + at, mask=mine, other=0.0)
        away += tl.where(size > 0, size * (tl.load(mean + at, mask=mine, other=0.0) - pivot), 0.0)
    centre = tl.where(count > 0, pivot + tl.sum(away, 0) / tl.where(count > 0, count, 1.0), 0.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for block in range(BLOCKS):
        at = block * BLOCK + i
        mine = (at < units) & (tl.load(part + at, mask=at < units, other=-1) == to)
        size = tl.load(n + at, mask=mine, other=0.0)
        off = tl.load(mean + at, mask=mine, other=0.0) - centre
        squares += tl.where(size > 0, tl.load(m2 + at, mask=mine, other=0.0) + size * off * off, 0.0)
    tl.store(n_out + to, count)
    tl.store(mean_out + to, centre)
    tl.store(m2_out + to, tl.sum(squares, 0))


def _merge_moments(n: Tensor, mean: Tensor, m2: Tensor, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, mean, m2, part = n.contiguous(), mean.contiguous(), m2.contiguous(), part.contiguous()
    out = torch.empty_like(n), torch.empty_like(n), torch.empty_like(n)
    if units := n.shape[0]:
        wrap_triton(_merge_units)[(units,)](
            n, mean, m2, part, *out, units, BLOCKS=triton.cdiv(units, BLOCK), BLOCK=BLOCK, num_warps=WARPS
        )
    return out


# ---- turns: runs of equal ids among a row's active columns ----


@triton.jit
def _active(ids, mask, first, width, BLOCK: tl.constexpr):
    """Active columns of a block, their ids, and the id of the active column before each, where the block has one."""
    i = tl.arange(0, BLOCK)
    at = first + i
    on = tl.load(mask + at, mask=at < width, other=0) != 0
    own = tl.load(ids + at, mask=at < width, other=0).to(tl.int64)
    inside = (i > 0) & (at - 1 < width)
    earlier = tl.load(mask + at - 1, mask=inside, other=0) != 0
    before = tl.load(ids + at - 1, mask=inside, other=0).to(tl.int64)
    has, before = tl.associative_scan((earlier.to(tl.int32), before), 0, _latest)
    return on, own, on & (has != 0) & (own != before), on & (has == 0), before


@triton.jit
def _totals(rewards, values, on, new, lead, first, width, CRITIC: tl.constexpr, BLOCK: tl.constexpr):
    """At each column of a block: whether a turn began in it, the reward since then, and the turn's first value."""
    at = first + tl.arange(0, BLOCK)
    reward = tl.load(rewards + at, mask=on, other=0).to(tl.float32).to(tl.float64)
    began, total = tl.associative_scan((new.to(tl.int32), reward), 0, _segmented)
    if CRITIC:
        value = tl.load(values + at, mask=on, other=0).to(tl.float32)
        _, value = tl.associative_scan(((new | lead).to(tl.int32), value), 0, _latest)
    else:
        value = tl.zeros([BLOCK], tl.float32)
    return began, total, value


@triton.jit
def _turn_maps(
    rewards, values, ids, mask, places, sums, rewards_row, values_row, ids_row, mask_row, width,
    SUMS: tl.constexpr, CRITIC: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    first = block * BLOCK
    on, own, new, lead, before = _active(ids + row * ids_row, mask + row * mask_row, first, width, BLOCK)
    last = tl.max(tl.where(on, i, -1), 0)
    places += (row * BLOCKS + block) * 5
    tl.store(places, (last >= 0).to(tl.int64))
    tl.store(places + 1, tl.sum(tl.where(lead, own, 0), 0))
    tl.store(places + 2, _at(own, last, i))
    tl.store(places + 3, tl.sum(new.to(tl.int64), 0))
    tl.store(places + 4, tl.sum((new & (own < before)).to(tl.int64), 0))
    if SUMS:
        _, total, value = _totals(
            rewards + row * rewards_row, values + row * values_row, on, new, lead, first, width, CRITIC, BLOCK
        )
        tl.store(sums + (row * BLOCKS + block) * 2, _at(total, BLOCK - 1, i))
        tl.store(sums + (row * BLOCKS + block) * 2 + 1, _at(value, BLOCK - 1, i).to(tl.float64))


@triton.jit
def _turn_chain(places, sums, id_states, sum_states, counts, ordered, SUMS: tl.constexpr, BLOCKS: tl.constexpr):
    """Left to right what enters each block: an active column's id before it, its turn's sum and value; back, the next
    id."""
    row = tl.program_id(0).to(tl.int64)
    has = tl.full((), 0, tl.int64)
    last, count, back = has, has, has
    total = tl.full((), 0.0, tl.float64)
    value = total
    for k in range(BLOCKS):
        block = row * BLOCKS + k
        it = places + block * 5
        some, first_id, new = tl.load(it) != 0, tl.load(it + 1), tl.load(it + 3)
        goes_on = (has != 0) & (first_id == last)
        if SUMS:
            tl.store(id_states + block * 4, has)
            tl.store(id_states + block * 4 + 1, last)
            tl.store(sum_states + block * 2, total)
            tl.store(sum_states + block * 2 + 1, value)
            own, own_value = tl.load(sums + block * 2), tl.load(sums + block * 2 + 1)
            kept = some & goes_on & (new == 0)
            total = tl.where(some, tl.where(kept, total + own, own), total)
            value = tl.where(some & ~kept, own_value, value)
        count += tl.where(some, new + tl.where(goes_on, 0, 1), 0)
        back += tl.where(some, tl.load(it + 4) + tl.where((has != 0) & (first_id < last), 1, 0), 0)
        last = tl.where(some, tl.load(it + 2), last)
        has = has | some.to(tl.int64)
    tl.store(counts + row, count)
    tl.store(ordered + row, back == 0)
    if SUMS:
        has = has * 0
        following = has
        for k in range(BLOCKS):
            block = row * BLOCKS + BLOCKS - 1 - k
            tl.store(id_states + block * 4 + 2, has)
            tl.store(id_states + block * 4 + 3, following)
            some = tl.load(places + block * 5) != 0
            following = tl.where(some, tl.load(places + block * 5 + 1), following)
            has = has | some.to(tl.int64)


@triton.jit
def _turn_apply(
    rewards, values, ids, mask, id_states, sum_states, total_out, value_out, ends, rewards_row, values_row, ids_row,
    mask_row, width, CRITIC: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    first = block * BLOCK
    at = first + i
    ids, mask = ids + row * ids_row, mask + row * mask_row
    on, own, new, lead, _ = _active(ids, mask, first, width, BLOCK)
    began, total, value = _totals(
        rewards + row * rewards_row, values + row * values_row, on, new, lead, first, width, CRITIC, BLOCK
    )
    it, it_sum = id_states + (row * BLOCKS + block) * 4, sum_states + (row * BLOCKS + block) * 2
    goes_on = (tl.load(it) != 0) & (tl.sum(tl.where(lead, own, 0), 0) == tl.load(it + 1))
    leading = (began == 0) & goes_on
    total = tl.where(leading, tl.load(it_sum) + total, total)
    inside = (i + 1 < BLOCK) & (at + 1 < width)
    later = tl.load(mask + at + 1, mask=inside, other=0) != 0
    following = tl.load(ids + at + 1, mask=inside, other=0).to(tl.int64)
    has, following = tl.associative_scan((later.to(tl.int32), following), 0, _latest, reverse=True)
    known = (has != 0) | (tl.load(it + 2) != 0)
    following = tl.where(has != 0, following, tl.load(it + 3))
    end = on & (~known | (following != own))
    out = row * width + at
    tl.store(total_out + out, tl.where(end, total, 0.0).to(tl.float32), mask=at < width)
    tl.store(ends + out, end.to(tl.float32), mask=at < width)
    if CRITIC:
        value = tl.where(leading, tl.load(it_sum + 1).to(tl.float32), value)
        tl.store(value_out + out, tl.where(end, value, 0.0), mask=at < width)


def _turn_totals(
    rewards: Tensor, values: Tensor | None, turn_ids: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = mask.shape
    critic = values is not None
    total, ends = mask.new_empty((rows, width), dtype=F32), mask.new_empty((rows, width), dtype=F32)
    value = mask.new_empty((rows, width) if critic else 0, dtype=F32)
    if rows * width == 0:
        return total, value, ends
    rewards, turn_ids, mask = _rows(rewards), _rows(turn_ids), _rows(mask)
    values = rewards if values is None else _rows(values)
    blocks = triton.cdiv(width, BLOCK)
    places, id_states = mask.new_empty((rows, blocks, 5), dtype=I64), mask.new_empty((rows, blocks, 4), dtype=I64)
    sums, sum_states = mask.new_empty((rows, blocks, 2), dtype=F64), mask.new_empty((rows, blocks, 2), dtype=F64)
    counts, ordered = mask.new_empty(rows, dtype=I64), mask.new_empty(rows, dtype=torch.bool)
    strides = (rewards.stride(0), values.stride(0), turn_ids.stride(0), mask.stride(0), width)
    how = {"CRITIC": critic, "BLOCKS": blocks, "BLOCK": BLOCK, "num_warps": WARPS}
    wrap_triton(_turn_maps)[(rows, blocks)](rewards, values, turn_ids, mask, places, sums, *strides, SUMS=True, **how)
    wrap_triton(_turn_chain)[(rows,)](
        places, sums, id_states, sum_states, counts, ordered, SUMS=True, BLOCKS=blocks, num_warps=1
    )
    wrap_triton(_turn_apply)[(rows, blocks)](
        rewards, values, turn_ids, mask, id_states, sum_states, total, value, ends, *strides, **how
    )
    return total, value, ends


def _turn_counts(turn_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = mask.shape
    if rows * width == 0:
        return mask.new_zeros(rows, dtype=I64), mask.new_zeros(rows, dtype=torch.bool) == 0
    counts, ordered = mask.new_empty(rows, dtype=I64), mask.new_empty(rows, dtype=torch.bool)
    turn_ids, mask, blocks = _rows(turn_ids), _rows(mask), triton.cdiv(width, BLOCK)
    places = mask.new_empty((rows, blocks, 5), dtype=I64)
    strides = (0, 0, turn_ids.stride(0), mask.stride(0), width)
    wrap_triton(_turn_maps)[(rows, blocks)](
        mask, mask, turn_ids, mask, places, places, *strides,
        SUMS=False, CRITIC=False, BLOCKS=blocks, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    wrap_triton(_turn_chain)[(rows,)](
        places, places, places, places, counts, ordered, SUMS=False, BLOCKS=blocks, num_warps=1
    )
    return counts, ordered


def _rows(x: Tensor) -> Tensor:
    """The tensor with an inner stride of 1, copied only if it has another."""
    return x if x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


FORMS: dict[str, Callable[..., Any]] = {
    "backward_recurrence": _backward_recurrence,
    "row_moments": _row_moments,
    "merge_moments": _merge_moments,
    "turn_totals": _turn_totals,
    "turn_counts": _turn_counts,
    "discounted_sum": _discounted_sum,
}


@cache
def operators() -> dict[Any, Any]:
    """The GPU's operator by the plain one that it stands for."""
    made = {}
    for name, fn in FORMS.items():
        triton_op(f"compiled_adv::{name}_triton", fn, mutates_args=())
        made[getattr(torch.ops.compiled_adv, name)] = getattr(torch.ops.compiled_adv, f"{name}_triton").default
    map_rows("discounted_sum_triton")
    return made
