"""Gives the operators on a CPU: operator.cpp behind torch.library, one operator for each plain one.

They take what the plain ones take, at any strides. Outputs are new tensors; inputs are never written to.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compiled_adv.kernels import FAKES, LIBRARY, SCHEMAS, build, map_rows
from compiled_adv.memory import POOL

F32, F64, I64 = torch.float32, torch.float64, torch.int64

_P, _N, _X, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
SIGNATURES = {
    "backward_recurrence": (_P, _N, _P, _N, _P, _N, _P, _P, _X, _P, _P, _N, _N, _N, _I),
    "row_moments": (_P, _N, _P, _N, _P, _P, _P, _N, _N, _I),
    "merge_moments": (_P, _P, _P, _P, _P, _P, _P, _N),
    "turn_counts": (_P, _N, _P, _N, _P, _P, _N, _N, _I),
    "turn_recurrence": (_P, _N, _P, _N, _P, _N, _P, _N, _P, _P, _X, _P, _P, _P, _P, _N, _N, _N, _I),
    "discounted_sum": (_P, _N, _P, _N, _P, _N, _N, _I),
}


@cache
def operators() -> dict[Any, Any]:
    """The CPU's operator by the plain one that it stands for. Builds or loads the library."""
    functions = _load()
    made = {}
    for name, fn in {
        "backward_recurrence": _backward_recurrence,
        "row_moments": _row_moments,
        "merge_moments": _merge_moments,
        "turn_counts": _turn_counts,
        "turn_recurrence": _turn_recurrence,
        "discounted_sum": _discounted_sum,
    }.items():
        LIBRARY.define(f"{name}_cpu{SCHEMAS[name]}")
        LIBRARY.impl(f"{name}_cpu", _bound(fn, functions), "CPU")
        torch.library.register_fake(f"compiled_adv::{name}_cpu", FAKES[name], lib=LIBRARY)
        made[getattr(torch.ops.compiled_adv, name)] = getattr(torch.ops.compiled_adv, f"{name}_cpu").default
    map_rows("discounted_sum_cpu")
    return made


def _load() -> ctypes.CDLL:
    functions = ctypes.CDLL(str(build.library()))
    for name, types in SIGNATURES.items():
        fn = getattr(functions, name)
        fn.argtypes, fn.restype = types, None
    return functions


def _bound(fn: Any, functions: ctypes.CDLL) -> Any:
    return lambda *args: fn(functions, *args)


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, copied only if its dtype or its inner stride is not ours. The caller keeps it alive."""
    if x.dtype is dtype and x.is_contiguous():
        return x
    x = x.to(dtype)
    return x if x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


def _at(x: Tensor | None) -> tuple[int | None, int]:
    """Address and row stride."""
    return (None, 0) if x is None else (x.data_ptr(), x.stride(0))


def _backward_recurrence(functions, rewards, values, steps, bootstrap, discount, gae_lambda, end, with_next):
    rows, columns = rewards.shape
    running = POOL.empty((rows, columns), F32)
    after = POOL.empty((rows, columns), F32) if with_next else torch.empty(0, dtype=F32)
    if not running.numel():
        return running, after
    rewards, steps = _flat(rewards, F32), _flat(steps, F32)
    values = None if values is None else _flat(values, F32)
    bootstrap, gae_lambda = _flat(bootstrap, F32), _flat(gae_lambda, F64)
    functions.backward_recurrence(
        *_at(rewards),
        *_at(values),
        *_at(steps),
        bootstrap.data_ptr(),
        gae_lambda.data_ptr(),
        discount,
        running.data_ptr(),
        after.data_ptr() if with_next else None,
        rows,
        columns,
        columns if end is None else min(max(int(end), 0), columns),
        torch.get_num_threads(),
    )
    return running, after


def _row_moments(functions, x, mask):
    rows, columns = x.shape
    found = tuple(torch.empty(rows, dtype=F64) for _ in range(3))
    x, mask = _flat(x, F32), _flat(mask, F32)
    functions.row_moments(*_at(x), *_at(mask), *(f.data_ptr() for f in found), rows, columns, torch.get_num_threads())
    return found


def _merge_moments(functions, n, mean, m2, part):
    n, mean, m2, part = _flat(n, F64), _flat(mean, F64), _flat(m2, F64), _flat(part, I64)
    to_n, to_mean, to_m2 = torch.empty_like(n), torch.empty_like(n), torch.empty_like(n)
    functions.merge_moments(
        n.data_ptr(),
        mean.data_ptr(),
        m2.data_ptr(),
        part.data_ptr(),
        to_n.data_ptr(),
        to_mean.data_ptr(),
        to_m2.data_ptr(),
        n.shape[0],
    )
    return to_n, to_mean, to_m2


def _turn_counts(functions, turn_ids, mask):
    rows, columns = mask.shape
    counts, ordered = torch.empty(rows, dtype=I64), torch.empty(rows, dtype=torch.bool)
    turn_ids, mask = _flat(turn_ids, I64), _flat(mask, F32)
    functions.turn_counts(
        *_at(turn_ids), *_at(mask), counts.data_ptr(), ordered.data_ptr(), rows, columns, torch.get_num_threads()
    )
    return counts, ordered


def _turn_recurrence(functions, rewards, values, turn_ids, mask, bootstrap, discount, gae_lambda, tokens):
    rows, columns = mask.shape
    running = POOL.empty((rows, columns), F32)
    after = torch.empty(0, dtype=F32) if values is None else POOL.empty((rows, columns), F32)
    ordered, inside = (torch.empty(rows, dtype=torch.bool) for _ in range(2))
    rewards, turn_ids, mask = _flat(rewards, F32), _flat(turn_ids, I64), _flat(mask, F32)
    values = None if values is None else _flat(values, F32)
    bootstrap, gae_lambda = _flat(bootstrap, F32), _flat(gae_lambda, F64)
    functions.turn_recurrence(
        *_at(rewards),
        *_at(values),
        *_at(turn_ids),
        *_at(mask),
        bootstrap.data_ptr(),
        gae_lambda.data_ptr(),
        discount,
        running.data_ptr(),
        None if values is None else after.data_ptr(),
        ordered.data_ptr(),
        inside.data_ptr(),
        int(tokens),
        rows,
        columns,
        torch.get_num_threads(),
    )
    return running, after, ordered, inside


def _discounted_sum(functions, x, factor):
    shape, columns = x.shape, x.shape[-1]
    if not x.numel():
        return x.clone()
    x, factor = (_flat(each.reshape(-1, columns), F32) for each in (x, factor))
    out = POOL.empty(x.shape, F32)
    functions.discounted_sum(*_at(x), *_at(factor), out.data_ptr(), *x.shape, torch.get_num_threads())
    return out.view(shape)
