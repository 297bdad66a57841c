"""Any dict of tensors, any metadata and any per-call values: what the loops give, or a CompiledAdvError.

    compute(batch, meta, **call) on each backend of FUZZ_BACKENDS (eager; add compiled), against the reference
    compute.compute_advantages(list of dicts, **call) likewise

An example starts from a legal call, so that more than the first check is reached, and spoils some of it.
"""

import ctypes
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import compiled_adv
from compiled_adv.channel import OUTPUTS
from compiled_adv.errors import CompiledAdvError
from tests.fuzz.limits import bounded
from tests.fuzz.values import EDGES, numbers, odd, one_of, texts, things
from tests.random_cases import FIXED, cases

BACKENDS = os.environ.get("FUZZ_BACKENDS", "eager").split(",")
KEYS = (
    *("input_ids", "attention_mask", "loss_mask", "rewards", "logprobs", "prox_logp", "ref_logp", "values"),
    *("token_rewards", "turn_ids", "is_truncated", "mopd_teacher_logp_sum", "extra"),
)
DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
CALL = ("advantage_shaping_mode", "gvpo_negative_scale", "gvpo_zero_penalty", "gvpo_zero_eps", "mode")
META = ("n_trajs", "traj_group_sizes", "traj_seqlens", "rollout_groups", "more")


@dataclass(frozen=True)
class Example:
    config: dict[str, Any]
    batch: Any  # a mapping; or, if there is no metadata for it, a list of mappings, one for each prompt
    meta: Any
    call: dict[str, Any]

    def __repr__(self) -> str:
        try:
            return f"Example({self.config!r}, {self.batch!r}, {self.meta!r}, {self.call!r})"
        except (ValueError, RuntimeError, RecursionError, NotImplementedError) as error:
            return f"Example({error})"


# ---- tensors ----


class Subclass(Tensor):
    """A user's own tensor class."""


def wide(x: Tensor) -> Tensor:
    """The same numbers with NaN, or the largest integer, between them in memory."""
    dtype = x.dtype
    fill = float("nan") if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max
    room = torch.full((*x.shape, 3), fill, dtype=dtype)
    room[..., 1] = x
    return room[..., 1]


def offset(x: Tensor) -> Tensor:
    """The same numbers at an address that is not aligned."""
    room = torch.zeros(x.numel() + 1, dtype=x.dtype)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


def with_grad(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_() * 1 if x.is_floating_point() else x


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    # the same numbers, another look
    "transposed": lambda x: x.t().contiguous().t() if x.ndim == 2 else x,
    "strided": wide,
    "offset": offset,
    "one row for all": lambda x: x[:1].expand(x.shape) if x.ndim else x,
    "one number for all": lambda x: x.reshape(-1)[:1].reshape([1] * x.ndim).expand(x.shape) if x.numel() else x,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "with a gradient": with_grad,
    "subclass": lambda x: x.as_subclass(Subclass),
    "negated view": lambda x: torch.complex(x, -x).conj().imag if x.dtype == torch.float32 else x,
    "bytes as bool": lambda x: (x.ne(0).to(torch.uint8) * 2).view(torch.bool),
    "inference": lambda x: _inferred(x),
    "numpy": lambda x: x.numpy(),
    # another shape
    "0-dim": lambda x: x.reshape(-1)[0] if x.numel() else x.new_zeros(()),
    "flat": lambda x: x.reshape(-1),
    "swapped": lambda x: x.t() if x.ndim == 2 else x[None],
    "a dimension more": lambda x: x[..., None],
    "a column more": lambda x: torch.nn.functional.pad(x, (0, 1)),
    "a row less": lambda x: x[1:] if x.ndim else x,
    "no rows": lambda x: x[:0] if x.ndim else x,
    "no columns": lambda x: x[:, :0] if x.ndim == 2 else x,
    "huge": lambda x: x.reshape(-1)[:1].reshape([1] * x.ndim).expand([1 << 20] * x.ndim) if x.numel() else x,
    # another kind
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr() if x.ndim == 2 else x,
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
}


def _inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def look(x: Tensor, name: str) -> Any:
    try:
        return LOOKS[name](x)
    except (RuntimeError, NotImplementedError, TypeError):  # torch cannot make this one
        return x


def retyped(x: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        return x.to(dtype)
    except (RuntimeError, NotImplementedError, TypeError):
        try:
            return torch.empty(x.shape, dtype=dtype)
        except (RuntimeError, NotImplementedError, TypeError):
            return x


def planted(x: Tensor, number: Any, places: list[int] | None) -> Tensor:
    """A copy that holds the number at some places, or everywhere."""
    try:
        x = x.clone()
        if places is None:
            return x.fill_(number)
        flat = x.reshape(-1)
        for place in places:
            flat[place % len(flat)] = number
        return flat.reshape(x.shape)
    except (RuntimeError, ValueError, TypeError, OverflowError, ZeroDivisionError, NotImplementedError):
        return x  # this dtype cannot hold it


@st.composite
def changed(draw: st.DrawFn, x: Any) -> Any:
    """Something else in the place of a tensor."""
    x = x if isinstance(x, Tensor) and x.layout == torch.strided and x.device.type == "cpu" else torch.zeros(2, 3)
    kind = draw(st.sampled_from(("look", "look", "dtype", "dtype", "number", "number", "number", "thing")))
    if kind == "look":
        return look(x, draw(st.sampled_from(sorted(LOOKS))))
    if kind == "dtype":
        return retyped(x, draw(st.sampled_from(DTYPES)))
    if kind == "number":
        places = draw(st.none() | st.lists(st.integers(0, 200), min_size=1, max_size=3))
        return planted(x, draw(one_of(EDGES)), places)
    return draw(things)


# ---- metadata ----


@st.composite
def metas(draw: st.DrawFn, meta: Any) -> Any:
    """The legal metadata with one part changed, or anything."""
    if meta is None or draw(st.integers(0, 3)) == 0:
        return draw(things | st.dictionaries(st.sampled_from(META), things, max_size=5))
    parts = dict(vars(meta))
    name = draw(st.sampled_from(META))
    value = parts.get(name)
    if isinstance(value, list) and value and draw(st.booleans()):
        i = draw(st.integers(0, len(value) - 1))
        entries = st.lists(numbers | odd, max_size=3)
        piece = {"row_counts": draw(entries), "rewards": draw(entries)}
        value = [*value[:i], draw(numbers | odd | st.just(piece)), *value[i + 1 :]]
    else:
        value = draw(things)
    return parts | {name: value}


# ---- a whole call ----


PARTS = ("tensor",) * 6 + ("key", "junk", "batch", "meta", "meta", "call", "call", "number", "number")
NUMBERS = (
    *("discount", "gae_lambda", "kl_ctl", "reward_bias", "reward_scaling", "reward_clip", "overlong_penalty_factor"),
    *("overlong_tokens", "max_new_tokens", "reward_norm", "adv_norm"),
)


@st.composite
def examples(draw: st.DrawFn, compiled: bool = False) -> Example:
    case = draw(cases(fixed=FIXED) if compiled else cases())
    config = case.config
    batch: Any = dict(case.batch)
    meta: Any = case.meta
    call: dict[str, Any] = dict(case.call)
    for part in draw(st.lists(st.sampled_from(PARTS), max_size=3)):
        if part == "tensor" and isinstance(batch, dict):
            present = [key for key in KEYS if key in batch]  # what is not there is read less often
            key = draw(st.sampled_from(present * 3 + [*KEYS]))
            batch[key] = draw(changed(batch.get(key)))
        elif part == "key" and isinstance(batch, dict):
            batch.pop(draw(st.sampled_from(KEYS)), None)
        elif part == "junk" and isinstance(batch, dict):
            batch[draw(texts | st.integers() | st.tuples(st.integers()))] = draw(things)
        elif part == "batch" and draw(st.integers(0, 3)) == 0:
            batch = draw(things)
        elif part == "meta":
            meta = draw(metas(case.meta))
        elif part == "call":
            call[draw(st.sampled_from(CALL))] = draw(things)
        elif part == "number" and not compiled:
            config = draw(other_numbers(config))
    return Example(config, batch, meta, call)


@st.composite
def other_numbers(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one number at an edge."""
    actor, name = dict(config["actor"]), draw(st.sampled_from(NUMBERS))
    if not name.endswith("_norm"):
        actor[name] = draw(numbers)
    elif actor.get(name):
        actor[name] = actor[name] | {draw(st.sampled_from(("eps", "group_size"))): draw(numbers)}
    return {"actor": actor}


@st.composite
def prompts(draw: st.DrawFn) -> Example:
    """A legal call with one dict for each prompt, some of it spoiled."""
    case = draw(cases(metas=("sizes", "rollouts")))
    trajs: Any = compiled_adv.split_batch(case.batch, case.meta)
    for part in draw(st.lists(st.sampled_from(PARTS), max_size=2)):
        traj = trajs[draw(st.integers(0, len(trajs) - 1))] if isinstance(trajs, list) and trajs else None
        if not isinstance(traj, dict):
            continue
        if part == "tensor":
            key = draw(st.sampled_from(KEYS))
            traj[key] = draw(changed(traj.get(key)))
        elif part == "key":
            traj.pop(draw(st.sampled_from(KEYS)), None)
        elif part == "junk":
            traj[draw(texts | st.integers())] = draw(things)
        elif part == "meta":
            traj["rollout_group"] = draw(things | st.dictionaries(st.sampled_from(("row_counts", "rewards")), things))
        elif part == "batch":
            trajs = draw(things) if draw(st.booleans()) else [{}] * len(trajs)
    return Example(case.config, trajs, None, dict(case.call))


@lru_cache(maxsize=256)
def _built(config: str) -> compiled_adv.Compute:
    return compiled_adv.build(json.loads(config))


def outcome(example: Example, backend: str) -> Any:
    """(outputs, warnings), or the class of the error."""
    actor = example.config["actor"]
    advantage = actor.get("advantage", {}) | {"backend": backend}
    if backend == "compiled":
        advantage |= {"compiled": {"buckets": {"rows": [8], "tokens": [16]}}}  # each one costs seconds
    config = {"actor": actor | {"advantage": advantage}}
    try:
        compute = _built(json.dumps(config)) if _compact(config) else compiled_adv.build(config)
        if isinstance(example.batch, list) and example.meta is None:
            outs = compute.compute_advantages(example.batch, **example.call)
            return compiled_adv.concat_batch(outs)[0], compute.last_warnings
        return compute(example.batch, example.meta, **example.call), compute.last_warnings
    except CompiledAdvError as error:
        assert len(str(error)) < 5000, "a message is read by people"
        return type(error)


def _compact(config: Any) -> bool:
    try:
        return len(json.dumps(config)) < 5000
    except ValueError:  # an integer of thousands of digits
        return False


def check(example: Example, backends: list[str]) -> None:
    with bounded(times=20 if "compiled" in backends else 1):
        before = _content(example.batch)
        want = outcome(example, "reference")
        for backend in backends:
            got = outcome(example, backend)
            if isinstance(want, type) or isinstance(got, type):
                assert got is want, (backend, got, want)
            else:
                _same(got, want, example.batch)
        assert before == _content(example.batch), "the batch was written to"


def _same(got: Any, want: Any, batch: Any) -> None:
    """Equal to float32 rounding at the size of the numbers that went into a channel; and finite."""
    assert got[1] == want[1], (got[1], want[1])
    assert got[0].keys() == want[0].keys()
    given = batch if isinstance(batch, dict) else compiled_adv.concat_batch(batch)[0]
    size = max((_size(x) for x in [*given.values(), *want[0].values()] if isinstance(x, Tensor)), default=1.0)
    for key, expected in want[0].items():
        have = got[0][key]
        whole = isinstance(batch, dict)
        if key not in OUTPUTS or (expected is given.get(key) if whole else _equal(expected, given.get(key))):
            assert have is expected or not whole  # it passed through
            continue
        assert have.dtype == expected.dtype and have.shape == expected.shape, key
        assert not have.requires_grad and have.layout == torch.strided
        if have.dtype in (torch.float32, torch.float64):
            assert torch.isfinite(have).all(), key
        near = (have.double() - expected.double()).abs() <= 1e-5 * size * (1 + expected.double().abs())
        assert near.all(), (key, have, expected)


def _equal(a: Tensor, b: Any) -> bool:
    """The same numbers, NaN included."""
    same = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return same and bool(((a == b) | ((a != a) & (b != b))).all())


def _size(x: Tensor) -> float:
    """The largest finite number, at least 1."""
    if x.layout != torch.strided or x.is_quantized or x.device.type != "cpu" or x.is_complex() or not x.numel():
        return 1.0
    try:
        return max(1.0, float(x.detach().double().abs().nan_to_num(0, 0, 0).max()))
    except (RuntimeError, NotImplementedError):
        return 1.0


def _content(batch: Any) -> dict[Any, Any]:
    """The bytes behind every tensor that has some."""
    entries = batch.items() if isinstance(batch, dict) else ()
    dense = {k: x for k, x in entries if isinstance(x, Tensor) and x.layout == torch.strided and x.device.type == "cpu"}
    memory = {key: x.untyped_storage() for key, x in dense.items() if not x.is_nested}
    return {key: ctypes.string_at(x.data_ptr(), min(x.nbytes(), 1 << 16)) for key, x in memory.items() if x.nbytes()}


@given(examples())
def fuzz_compute(example: Example) -> None:
    check(example, [backend for backend in BACKENDS if backend != "compiled"])


@given(prompts())
def fuzz_prompts(example: Example) -> None:
    check(example, [backend for backend in BACKENDS if backend != "compiled"])


@given(examples(compiled=True))
def fuzz_compiled(example: Example) -> None:
    check(example, ["compiled"])
