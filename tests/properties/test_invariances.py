"""What must not change a result: padding, the order of prompts, masked slots, dtypes and the caller's torch state."""

import json
import math
import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_adv
from compiled_adv import TrajBatchMeta
from tests.compiled import shared
from tests.flavours import FLAVOURS, strided
from tests.random_cases import FIXED, Case, cases

# Backend -> the configurations it is tested on; None is the whole space.
BACKENDS = {"eager": None, "reference": FIXED, "compiled": FIXED}
SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
TOLERANCE = 1e-6  # sums may run in another order

each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")

OWN_SLOT = ("logprobs", "token_rewards")  # active where the token was generated
ALIGNED = ("prox_logp", "ref_logp", "values")  # active where the aligned loss mask is set

Result = tuple[dict[str, Any], dict[str, list[int]]]


def drawn(data: st.DataObject, backend: str, **limits: Any) -> Case:
    return data.draw(cases(fixed=BACKENDS[backend], **limits))


@lru_cache(maxsize=64)
def _built(config: str) -> compiled_adv.Compute:
    return compiled_adv.build(json.loads(config))


def built(case: Case, backend: str) -> compiled_adv.Compute:
    """One instance per configuration, as in a trainer; what an instance kept from another call must not show."""
    return shared.built(case.on(backend)) if backend == "compiled" else _built(json.dumps(case.on(backend)))


def run(case: Case, backend: str) -> Result:
    compute = built(case, backend)
    out = compute(case.batch, case.meta, **case.call)
    return out, compute.last_warnings


def computed(out: dict[str, Any], case: Case) -> dict[str, Tensor]:
    """What the call made; the rest is the batch's own."""
    return {key: x for key, x in out.items() if x is not case.batch.get(key)}


def is_strict(case: Case) -> bool:
    return case.config["actor"].get("advantage", {}).get("rules") == "strict"


def same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for key, expected in want.items():
        have = got[key]
        assert have.dtype == expected.dtype and have.shape == expected.shape, key
        near = (have.double() - expected.double()).abs() <= tolerance * (1 + expected.double().abs())
        assert near.all(), (key, have, expected)


def rows_of(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {key: x[rows] for key, x in batch.items()}


def steady(case: Case, level: str = "batch") -> Case:
    """process_weighted jumps where an advantage is 0, so the last digit of a mean over other rows may decide it."""
    actor = case.config["actor"]
    means = [norm["mean_level"] for norm in (actor.get("reward_norm"), actor.get("adv_norm")) if norm]
    jumps = case.call["advantage_shaping_mode"] == "process_weighted" and level in means
    return replace(case, call={"advantage_shaping_mode": "additive"}) if jumps else case


# ---- padding, order and company ----


@each_backend
@SETTINGS
@given(data=st.data(), extra=st.integers(1, 40))
def test_widening_the_padding_changes_nothing_but_the_wrap(backend: str, data: st.DataObject, extra: int) -> None:
    case = drawn(data, backend, needs=frozenset({"is_truncated"}))
    tokens = case.batch["loss_mask"].shape[1]
    wraps_B = torch.zeros(len(case.batch["rewards"])).bool() if is_strict(case) else case.batch["loss_mask"][:, 0] != 0
    # A wrapped last column takes the fold of the turn before it, so the row's advantages may move its peers' mean.
    assume(not (wraps_B.any() and _folds(case) and case.config["actor"].get("adv_norm")))
    wide = {
        key: torch.nn.functional.pad(x, (0, extra), value=-1 if key == "turn_ids" else 0) if x.ndim == 2 else x
        for key, x in case.batch.items()
    }
    (got, got_warnings), (want, want_warnings) = run(case.with_batch(wide), backend), run(case, backend)
    assert got_warnings == want_warnings
    for key, expected in computed(want, case).items():
        have = got[key]
        if expected.ndim == 1:
            same({key: have}, {key: expected})
        else:
            same({key: have[~wraps_B, :tokens]}, {key: expected[~wraps_B]}, TOLERANCE)
            assert not have[~wraps_B, tokens:].any(), key


def _folds(case: Case) -> bool:
    return "token_rewards" in case.batch and not case.config["actor"].get("token_rewards_as_adv", True)


@each_backend
@SETTINGS
@given(data=st.data())
def test_permuting_prompt_groups_permutes_the_results(backend: str, data: st.DataObject) -> None:
    case = steady(drawn(data, backend))
    rows, meta = len(case.batch["rewards"]), case.meta
    sizes = _slices(case) if meta is None else meta.traj_group_sizes
    order = data.draw(st.permutations(range(len(sizes))))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    moved = [row for i in order for row in range(starts[i], starts[i] + sizes[i])]
    moved += range(len(moved), rows)  # rows beyond the last full slice stay at the end
    if meta is not None:
        meta = _meta(meta, order)
    shuffled = replace(case, batch=rows_of(case.batch, moved), meta=meta)
    (got, got_warnings), (want, want_warnings) = run(shuffled, backend), run(case, backend)
    want = {key: x[moved] for key, x in computed(want, case).items()}
    same({key: got[key] for key in want}, want, TOLERANCE)
    assert {name: sorted(moved[row] for row in found) for name, found in got_warnings.items()} == want_warnings


@each_backend
@SETTINGS
@given(data=st.data())
def test_splitting_by_prompt_changes_nothing_under_group_statistics(backend: str, data: st.DataObject) -> None:
    metas = ("sizes", "nulls", "rollouts")
    case = steady(drawn(data, backend, levels=("group", None), metas=metas), "group")
    assert case.meta is not None
    want, want_warnings = run(case, backend)
    want = computed(want, case)
    parts: dict[str, list[Tensor]] = {key: [] for key in want}
    warnings: dict[str, list[int]] = {}
    start = 0
    for i, size in enumerate(case.meta.traj_group_sizes):
        rows = list(range(start, start + size))
        part, found = run(replace(case, batch=rows_of(case.batch, rows), meta=_meta(case.meta, [i])), backend)
        for key in want:
            parts[key].append(part[key])
        for name, at in found.items():
            warnings.setdefault(name, []).extend(start + row for row in at)
        start += size
    same({key: torch.cat(x) for key, x in parts.items()}, want, TOLERANCE)
    assert warnings == want_warnings


def _slices(case: Case) -> list[int]:
    """Full slices of rows that any group level of the case makes; single rows where there is no group level."""
    actor = case.config["actor"]
    norms = [norm for norm in (actor.get("reward_norm"), actor.get("adv_norm")) if norm]
    grouped = [norm.get("group_size", 1) for norm in norms if "group" in (norm["mean_level"], norm["std_level"])]
    size = math.lcm(*grouped)
    return [size] * (len(case.batch["rewards"]) // size)


def _meta(meta: TrajBatchMeta, prompts: list[int]) -> TrajBatchMeta:
    """Metadata of these prompts, in this order."""
    groups = meta.rollout_groups
    return TrajBatchMeta(
        len(prompts),
        [meta.traj_group_sizes[i] for i in prompts],
        [meta.traj_seqlens[i] for i in prompts],
        None if groups is None else [groups[i] for i in prompts],
    )


# ---- masked slots ----


def masked_slots(case: Case) -> dict[str, Tensor]:
    """Where a channel's number may be anything (semantics.md: what "active" means for each)."""
    batch = case.batch
    own_BT = batch["loss_mask"] != 0
    rows, tokens = own_BT.shape
    aligned_BT = own_BT.roll(-1, 1)
    if is_strict(case):
        aligned_BT[:, -1] = False
    lengths_B = (batch["attention_mask"] != 0).sum(1)
    cut_B = batch["is_truncated"] != 0 if "is_truncated" in batch else lengths_B == tokens
    boot_BT = torch.zeros_like(own_BT)
    boot_BT[torch.arange(rows), lengths_B - 1] = cut_B  # an empty row's last token is column -1
    masked = {key: ~own_BT for key in (*OWN_SLOT, "turn_ids")}
    masked |= {"prox_logp": ~aligned_BT, "ref_logp": ~aligned_BT, "values": ~(aligned_BT | boot_BT)}
    return {key: slots_BT for key, slots_BT in masked.items() if key in batch}


def filled(case: Case, seed: int, numbers: list[float]) -> Case:
    """Each masked slot of the float channels holds one of these numbers."""
    generator = torch.Generator().manual_seed(seed)
    batch = dict(case.batch)
    for key, slots_BT in masked_slots(case).items():
        if key != "turn_ids":
            pick_BT = torch.randint(len(numbers), slots_BT.shape, generator=generator)
            batch[key] = torch.where(slots_BT, torch.tensor(numbers)[pick_BT], batch[key])
    return case.with_batch(batch)


@each_backend
@SETTINGS
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_nan_and_inf_in_masked_slots_read_as_zero(backend: str, data: st.DataObject, seed: int) -> None:
    case = drawn(data, backend)
    zeros, bad = filled(case, seed, [0.0]), filled(case, seed, [math.nan, math.inf, -math.inf, 0.0])
    (got, got_warnings), (want, want_warnings) = run(bad, backend), run(zeros, backend)
    same(computed(got, bad), computed(want, zeros))
    assert got_warnings == want_warnings


@each_backend
@SETTINGS
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_finite_garbage_in_masked_slots_changes_nothing(backend: str, data: st.DataObject, seed: int) -> None:
    case = drawn(data, backend)
    bad = filled(case, seed, [3.4e38, -3.4e38, 1e-42, -1e10, 7.0])
    rng = random.Random(seed)
    for key, slots_BT in masked_slots(case).items():
        if key == "turn_ids":  # any integer, in any order
            junk = [rng.choice([-(2**63), 2**63 - 1, -1, 3]) for _ in range(slots_BT.numel())]
            bad.batch[key] = torch.where(slots_BT, torch.tensor(junk).reshape(slots_BT.shape), case.batch[key])
    for key in ("input_ids", "mopd_teacher_logp_sum"):  # never read as numbers
        if key in bad.batch:
            bad.batch[key] = torch.full_like(bad.batch[key], 12345)
    (got, got_warnings), (want, want_warnings) = run(bad, backend), run(case, backend)
    got, want = computed(got, bad), computed(want, case)
    if "values" in case.batch:  # returns are advantages + values in masked columns too
        for out in (got, want):
            out["returns"] = torch.where(masked_slots(case)["values"], 0.0, out["returns"])
    same(got, want)
    assert got_warnings == want_warnings


@each_backend
@SETTINGS
@given(data=st.data(), number=st.sampled_from([7.0, -1.0, 0.5, 1e-42, 1e38]))
def test_loss_mask_and_truncation_count_what_is_not_zero(backend: str, data: st.DataObject, number: float) -> None:
    case = drawn(data, backend)
    masks = {key: x * torch.tensor(number) for key, x in case.batch.items() if key in ("loss_mask", "is_truncated")}
    got, want = run(case.with_batch(case.batch | masks), backend)[0], run(case, backend)[0]
    want = computed(want, case)
    same({key: got[key] for key in want}, want)


# ---- the caller's objects ----


def snapshot(case: Case) -> Any:
    """The batch's entries, every byte of their storage (slots outside a view included) and the metadata."""
    entries = [(key, id(x)) for key, x in case.batch.items()]
    tensors = [x for x in case.batch.values() if isinstance(x, Tensor)]
    stored = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().tobytes() for x in tensors]
    return entries, stored, [x._version for x in tensors], repr(case.meta)


# What is refused, from the first check to the last stage: name -> (batch, per-call values) of a legal case.
REFUSED = {
    "unknown mode": lambda case: (case.batch, {"advantage_shaping_mode": "gvop"}),
    "unknown value": lambda case: (case.batch, {"scale": 1.0}),
    "missing key": lambda case: ({key: x for key, x in case.batch.items() if key != "logprobs"}, case.call),
    "wrong shape": lambda case: (case.batch | {"logprobs": case.batch["logprobs"][:, 1:]}, case.call),
    "bad mask": lambda case: (case.batch | {"loss_mask": case.batch["loss_mask"] + math.nan}, case.call),
    "outside attention": lambda case: (case.batch | {"loss_mask": (case.batch["attention_mask"] == 0) * 1}, case.call),
    "bad reward": lambda case: (case.batch | {"rewards": case.batch["rewards"] * math.inf + math.inf}, case.call),
    "bad values": lambda case: (case.batch | {"values": case.batch["logprobs"] * math.nan}, case.call),
}


def refused(case: Case, backend: str, name: str) -> Case:
    """Make the refused call; gives the case that was refused."""
    batch, call = REFUSED[name](case)
    bad = replace(case, batch=batch, call=call)
    compute = built(case, backend)
    before = snapshot(bad)
    try:
        compute(bad.batch, bad.meta, **bad.call)
    except compiled_adv.CompiledAdvError:
        assert snapshot(bad) == before
        return bad
    assume(False)  # this case does not read what was broken
    raise AssertionError


@each_backend
@SETTINGS
@given(data=st.data())
def test_inputs_stay_bit_identical(backend: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    case = case.with_batch({key: strided(x) for key, x in case.batch.items()})
    before = snapshot(case)
    run(case, backend)
    assert snapshot(case) == before


@each_backend
@pytest.mark.parametrize("name", REFUSED)
@settings(SETTINGS, max_examples=5)
@given(data=st.data())
def test_a_refused_call_leaves_inputs_and_the_next_call_alone(backend: str, name: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    want, want_warnings = run(case, backend)
    refused(case, backend, name)
    got, got_warnings = run(case, backend)
    same(computed(got, case), computed(want, case))
    assert got_warnings == want_warnings


@each_backend
@SETTINGS
@given(data=st.data())
def test_every_computed_output_is_a_new_contiguous_tensor_without_grad(backend: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    first, second = run(case, backend)[0], run(case, backend)[0]
    taken = {x.untyped_storage().data_ptr() for x in case.batch.values()}
    for out in (computed(first, case), computed(second, case)):
        for key, x in out.items():
            where = x.untyped_storage().data_ptr()
            assert where not in taken, f"{key} shares its storage"
            taken.add(where)
            assert x.is_contiguous() and not x.requires_grad and x.grad_fn is None, key
            assert x.dtype == (torch.bool if key == "is_truncated" else torch.float32), key


@each_backend
@SETTINGS
@given(data=st.data())
def test_the_same_call_twice_gives_the_same_bits(backend: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    first, first_warnings = run(case, backend)
    kept = {key: x.clone() for key, x in computed(first, case).items()}
    second, second_warnings = run(case, backend)
    same(computed(second, case), kept)
    same(computed(first, case), kept)  # and the first result is still what it was
    assert first_warnings == second_warnings


@each_backend
@SETTINGS
@given(data=st.data())
def test_what_is_not_computed_passes_as_the_same_object(backend: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    more = {"original_rewards": case.batch["rewards"].clone(), "images": [[b"png"]], "note": "kept", "empty": None}
    batch = case.batch | more
    out = run(case.with_batch(batch), backend)[0]
    made = {"loss_mask", "logprobs", "rewards", "is_truncated", "ref_logp"}
    made |= set() if case.config["actor"].get("use_decoupled_loss") else {"prox_logp"}
    assert {key for key in batch if out.get(key) is batch[key]} == batch.keys() - made


# ---- flavours of tensors and of torch's own state ----


@each_backend
@pytest.mark.parametrize("flavour", FLAVOURS)
@settings(SETTINGS, max_examples=8)
@given(data=st.data())
def test_the_flavour_of_the_input_changes_no_bit(backend: str, flavour: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    guise, state = FLAVOURS[flavour]
    want = computed(run(case, backend)[0], case)
    batch = guise(case.batch)
    with state():
        got = built(case, backend)(batch, case.meta, **case.call)
    same({key: got[key] for key in want}, want)
    assert not any(got[key].requires_grad or got[key].is_inference() for key in want)


@each_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@settings(SETTINGS, max_examples=8)
@given(data=st.data())
def test_integer_rewards_count_like_floats(backend: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = drawn(data, backend)
    rewards_B = (case.batch["rewards"] * 4).abs().round()
    want = computed(run(case.with_batch(case.batch | {"rewards": rewards_B}), backend)[0], case)
    whole_B = rewards_B.to(dtype)
    got = run(case.with_batch(case.batch | {"rewards": whole_B}), backend)[0]
    assert got["rewards"].untyped_storage().data_ptr() != whole_B.untyped_storage().data_ptr()
    penalised = case.config["actor"].get("overlong_reward_penalty", False)
    assert got["rewards"].dtype == (torch.float32 if penalised else dtype)
    same({key: got[key].to(want[key].dtype) for key in want}, want)


@each_backend
@settings(SETTINGS, max_examples=8)
@given(data=st.data())
def test_bool_rewards_count_as_one_and_zero(backend: str, data: st.DataObject) -> None:
    case = drawn(data, backend)
    rewards_B = (case.batch["rewards"] > 0).float()
    want = computed(run(case.with_batch(case.batch | {"rewards": rewards_B}), backend)[0], case)
    got = run(case.with_batch(case.batch | {"rewards": rewards_B.bool()}), backend)[0]
    same({key: got[key] for key in want}, want)
