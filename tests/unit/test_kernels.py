"""The operators, in torch and in C++, against plain loops over tokens; and how the C++ ones are built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_adv.kernels import blocked, build, cpu

NATIVE = {plain._qualified_op_name.split("::")[1]: op for plain, op in cpu.operators().items()}
PLAIN = {name: getattr(blocked, name) for name in NATIVE}
both_forms = pytest.mark.parametrize("form", [PLAIN, NATIVE], ids=["torch", "cpp"])

# ---- the loops ----


def recurrence_loop(rewards, values, steps, bootstrap, discount, gae_lambda, end):
    rows, columns = rewards.shape
    running, after = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for b in range(rows):
        run, nxt = 0.0, bootstrap[b].item()
        for t in reversed(range(columns)):
            if steps[b, t] != 0 and t < end:
                value = 0.0 if values is None else values[b, t].item()
                run = rewards[b, t].item() + discount * nxt - value + discount * gae_lambda[b].item() * run
                nxt = value
            running[b, t], after[b, t] = run, nxt
    return running, after


def moments_of(numbers):
    mean = sum(numbers) / len(numbers) if numbers else 0.0
    return len(numbers), mean, sum((x - mean) ** 2 for x in numbers)


def turns_loop(rewards, values, ids, mask):
    totals, firsts, ends = (torch.zeros(mask.shape) for _ in range(3))
    counts, ordered = torch.zeros(len(mask), dtype=torch.int64), torch.ones(len(mask), dtype=torch.bool)
    for b in range(len(mask)):
        active = [t for t in range(mask.shape[1]) if mask[b, t] != 0]
        turns = []
        for t in active:
            if not turns or ids[b, t] != ids[b, turns[-1][-1]]:
                if turns and ids[b, t] < ids[b, turns[-1][-1]]:
                    ordered[b] = False
                turns.append([])
            turns[-1].append(t)
        for turn in turns:
            totals[b, turn[-1]] = sum(rewards[b, t].item() for t in turn)
            firsts[b, turn[-1]] = values[b, turn[0]]
            ends[b, turn[-1]] = 1.0
        counts[b] = len(turns)
    return totals, firsts, ends, counts, ordered


# ---- batches ----


class Case:
    """Random channels of one shape."""

    def __init__(self, rows, columns, active, seed):
        g = torch.Generator().manual_seed(seed)
        self.rewards, self.values = torch.randn(rows, columns, generator=g), torch.randn(rows, columns, generator=g)
        self.mask = (torch.rand(rows, columns, generator=g) < active).float()
        self.ids = torch.randint(0, 4, (rows, columns), generator=g).cummax(1).values
        self.bootstrap = torch.randn(rows, generator=g)
        self.gae_lambda = torch.rand(rows, generator=g, dtype=torch.float64)

    def recurrence(self, form, **changed):
        take = {"rewards": self.rewards, "values": self.values, "mask": self.mask, "end": None, **changed}
        return form["backward_recurrence"](
            take["rewards"], take["values"], take["mask"], self.bootstrap, 0.97, self.gae_lambda, take["end"], True
        )

    def turn_recurrence(self, form, **changed):
        take = {"rewards": self.rewards, "values": self.values, "turn_ids": self.ids, "tokens": 4, **changed}
        rewards, values, ids, tokens = take.values()
        return form["turn_recurrence"](
            rewards, values, ids, self.mask, self.bootstrap, 0.97, self.gae_lambda, torch.tensor(tokens)
        )


cases = st.builds(
    Case,
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    active=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 10**6),
)
few = settings(max_examples=60, deadline=None)


def strided(x, how):
    """The same numbers at other strides."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "every second column":
        return torch.stack([x, torch.full_like(x, 7)], 2).flatten(1)[:, ::2]
    return torch.nn.functional.pad(x, (1, 2))[:, 1:-2]


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- right numbers ----


@both_forms
@few
@given(case=cases, data=st.data())
def test_recurrence_is_the_loop(form, case, data):
    end = data.draw(st.integers(0, case.mask.shape[1]))
    got = case.recurrence(form, end=torch.tensor(end))
    expected = recurrence_loop(case.rewards, case.values, case.mask, case.bootstrap, 0.97, case.gae_lambda, end)
    close(got, expected)


@both_forms
@few
@given(case=cases)
def test_recurrence_without_critic_is_the_loop(form, case):
    expected = recurrence_loop(case.rewards, None, case.mask, case.bootstrap, 0.97, case.gae_lambda, 10**9)
    close(case.recurrence(form, values=None), expected)


@both_forms
@few
@given(case=cases)
def test_row_moments_are_those_of_the_active_entries(form, case):
    got = torch.stack(form["row_moments"](case.rewards, case.mask), 1)
    rows = zip(case.rewards.tolist(), case.mask.tolist(), strict=True)
    expected = [moments_of([x for x, on in zip(*row, strict=True) if on]) for row in rows]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@both_forms
@few
@given(case=cases)
def test_merged_moments_are_those_of_all_entries_of_a_part(form, case):
    part = torch.arange(len(case.mask)) % 3 - 1
    got = torch.stack(form["merge_moments"](*form["row_moments"](case.rewards, case.mask), part), 1)
    for p in range(len(part)):
        numbers = case.rewards[part == p][case.mask[part == p] != 0].tolist()
        torch.testing.assert_close(
            got[p], torch.tensor(moments_of(numbers), dtype=torch.float64), rtol=1e-10, atol=1e-10
        )


@few
@given(case=cases)
def test_turns_are_the_loop(case):
    totals, firsts, ends, *_ = turns_loop(case.rewards, case.values, case.ids, case.mask)
    close(blocked.turn_totals(case.rewards, case.values, case.ids, case.mask), (totals, firsts, ends))


@both_forms
@few
@given(case=cases, critic=st.booleans(), shuffled=st.booleans(), tokens=st.integers(1, 6))
def test_turn_recurrence_is_the_loop_over_turns(form, case, critic, shuffled, tokens):
    ids = case.ids.flip(1) if shuffled else case.ids
    aligned = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-1)
    totals, firsts, ends, _, ordered = turns_loop(case.rewards, case.values, aligned, case.mask)
    steps = (totals, firsts if critic else None, ends, case.bootstrap, 0.97, case.gae_lambda, 10**9)
    running, after = recurrence_loop(*steps)
    got = case.turn_recurrence(form, turn_ids=ids, values=case.values if critic else None, tokens=tokens)
    named = ((aligned >= 0) | (case.mask == 0)).all(1)  # a row with a column of no turn is refused, whatever it holds
    close(got[0][named], running[named])
    close(got[1][named] if critic else got[1], after[named] if critic else torch.empty(0))
    assert got[2][named].tolist() == ordered[named].tolist()
    assert got[3].tolist() == (named & ((aligned < tokens) | (case.mask == 0)).all(1)).tolist()


@both_forms
def test_turns_longer_than_a_vector_are_the_loop(form):
    case = Case(5, 300, 0.9, 8)
    case.ids = torch.arange(300).div(47, rounding_mode="floor").expand(5, 300).contiguous()
    aligned = torch.nn.functional.pad(case.ids[:, 1:], (0, 1), value=-1)
    case.mask[:, -1] = 0
    totals, firsts, ends, *_ = turns_loop(case.rewards, case.values, aligned, case.mask)
    steps = (totals, firsts, ends, case.bootstrap, 0.97, case.gae_lambda, 10**9)
    close(case.turn_recurrence(form)[:2], recurrence_loop(*steps))


@both_forms
@few
@given(case=cases, shuffled=st.booleans())
def test_turn_counts_are_the_loop(form, case, shuffled):
    ids = case.ids.flip(1) if shuffled else case.ids
    *_, counts, ordered = turns_loop(case.rewards, case.values, ids, case.mask)
    got_counts, got_ordered = form["turn_counts"](ids, case.mask)
    assert got_counts.tolist() == counts.tolist()
    assert got_ordered.tolist() == ordered.tolist()


@both_forms
@few
@given(case=cases)
def test_discounted_sum_is_the_loop(form, case):
    factor = case.values.clamp(-1, 1)
    expected = torch.zeros(case.mask.shape)
    for b in range(len(expected)):
        after = 0.0
        for t in reversed(range(expected.shape[1])):
            after = case.rewards[b, t].item() + factor[b, t].item() * after
            expected[b, t] = after
    close(form["discounted_sum"](case.rewards, factor), expected)


@both_forms
@pytest.mark.parametrize("value", [0.1, -3e7, 1e-30])
def test_equal_numbers_have_no_spread_at_all(form, value):
    moments = form["row_moments"](torch.full((5, 300), value), torch.ones(5, 300))
    merged = form["merge_moments"](*moments, torch.zeros(5, dtype=torch.int64))
    assert moments[2].tolist() == [0.0] * 5
    assert merged[2][0] == 0.0


@both_forms
def test_moments_far_from_zero_keep_their_spread(form):
    x = 1e4 + torch.arange(1000, dtype=torch.float32).remainder(2)[None]
    n, mean, m2 = form["row_moments"](x, torch.ones(1, 1000))
    assert (n.item(), mean.item(), m2.item()) == (1000, 10000.5, 250.0)


@both_forms
def test_what_is_not_active_is_never_read_into_a_result(form):
    case = Case(3, 20, 0.5, 1)
    poison = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(20)[:20]
    rewards, values = (torch.where(case.mask != 0, x, poison) for x in (case.rewards, case.values))
    assert torch.equal(
        torch.stack(case.recurrence(form, rewards=rewards, values=values)), torch.stack(case.recurrence(form))
    )
    assert torch.equal(
        torch.stack(form["row_moments"](rewards, case.mask)), torch.stack(form["row_moments"](case.rewards, case.mask))
    )
    assert torch.equal(
        torch.stack(case.turn_recurrence(form, rewards=rewards, values=values)[:2]),
        torch.stack(case.turn_recurrence(form)[:2]),
    )


# ---- the same bits ----


def everything(case):
    """Every result of the C++ operators on a case."""
    moments = NATIVE["row_moments"](case.rewards, case.mask)
    return [
        *case.recurrence(NATIVE),
        *moments,
        *NATIVE["merge_moments"](*moments, torch.arange(len(case.mask)) % 2),
        *case.turn_recurrence(NATIVE),
        *NATIVE["turn_counts"](case.ids, case.mask),
        # what pads a row is 0 here, as a user's function gets it
        NATIVE["discounted_sum"](*(torch.where(case.mask != 0, x, 0.0) for x in (case.rewards, case.values))),
    ]


@few
@given(case=cases, rows=st.integers(0, 6), columns=st.integers(0, 40))
def test_padding_changes_no_bit(case, rows, columns):
    padded = Case(len(case.mask) + rows, case.mask.shape[1] + columns, 0.0, 3)
    padded.ids.fill_(-1)
    for name in ("rewards", "values", "mask", "ids"):
        getattr(padded, name)[: len(case.mask), : case.mask.shape[1]] = getattr(case, name)
    padded.bootstrap[: len(case.mask)], padded.gae_lambda[: len(case.mask)] = case.bootstrap, case.gae_lambda
    for got, expected in zip(everything(padded), everything(case), strict=True):
        got = got[: len(case.mask), : case.mask.shape[1]] if got.dim() == 2 else got[: len(case.mask)]
        assert torch.equal(got, expected)


def test_threads_change_no_bit():
    case, before = Case(67, 1 << 14, 0.8, 5), torch.get_num_threads()
    try:
        found = [torch.set_num_threads(n) or everything(case) for n in (1, 2, 3)]
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@few
@given(case=cases, how=st.sampled_from(["transposed", "every second column", "inside a wider one"]))
def test_strides_change_no_bit(case, how):
    expected = everything(case)
    for name in ("rewards", "values", "mask", "ids"):
        setattr(case, name, strided(getattr(case, name), how))
    assert all(torch.equal(a, b) for a, b in zip(everything(case), expected, strict=True))


def test_one_row_expanded_is_that_row_each_time():
    case = Case(1, 50, 0.7, 2)
    for name in ("rewards", "values", "mask", "ids"):
        setattr(case, name, getattr(case, name).expand(6, 50))
    case.bootstrap, case.gae_lambda = case.bootstrap.expand(6), case.gae_lambda.expand(6)
    running, _ = case.recurrence(NATIVE)
    assert torch.equal(running, running[:1].expand(6, 50))


# ---- good citizens of torch ----


def test_inputs_keep_their_numbers():
    case = Case(5, 33, 0.6, 4)
    before = [x.clone() for x in vars(case).values()]
    everything(case)
    assert all(torch.equal(a, b) for a, b in zip(vars(case).values(), before, strict=True))


def test_results_share_no_memory():
    results = everything(Case(64, 5000, 0.6, 4))
    assert len({x.untyped_storage().data_ptr() for x in results}) == len(results)


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_what_a_compiler_is_told_about_an_operator_is_true(name):
    case = Case(4, 9, 0.6, 6)
    n, mean, m2 = NATIVE["row_moments"](case.rewards, case.mask)
    args = {
        "backward_recurrence": (case.rewards, case.values, case.mask, case.bootstrap, 0.9, case.gae_lambda, None, True),
        "row_moments": (case.rewards, case.mask),
        "merge_moments": (n, mean, m2, torch.arange(4) % 2),
        "turn_recurrence": (
            *(case.rewards, None, case.ids, case.mask, case.bootstrap),
            *(0.9, case.gae_lambda, torch.tensor(9)),
        ),
        "turn_counts": (case.ids, case.mask),
        "discounted_sum": (case.rewards, case.values),
    }[name]
    torch.library.opcheck(NATIVE[name], args, test_utils=("test_schema", "test_faketensor"))


# ---- building ----


def test_processes_that_build_at_once_end_with_one_library(tmp_path):
    program = f"from compiled_adv.kernels import build; print(build.library({str(tmp_path)!r}))"
    workers = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {worker.communicate(timeout=120)[0].strip() for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0]
    assert {str(path) for path in tmp_path.iterdir()} == paths and len(paths) == 1


def test_a_library_is_built_once(tmp_path):
    first = build.library(tmp_path)
    made = first.stat().st_mtime_ns
    assert build.library(tmp_path) == first and first.stat().st_mtime_ns == made


def test_a_damaged_library_is_built_again(tmp_path):
    path = build.library(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert build.library(tmp_path).read_bytes() == whole


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CompilerMissing, match=r"g\+\+") as error:
        build.library(tmp_path)
    assert "backend: eager" in str(error.value)


def test_a_compiler_that_refuses_is_named(tmp_path, monkeypatch):
    refusing = tmp_path / "refusing-c++"
    refusing.write_text("#!/bin/sh\necho no such language >&2\nexit 3\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("CXX", str(refusing))
    with pytest.raises(build.BuildFailed, match="no such language"):
        build.library(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["refusing-c++"]


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILED_ADV_CACHE", str(tmp_path / "own"))
    assert build.default_folder() == tmp_path / "own"
    monkeypatch.delenv("COMPILED_ADV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert build.default_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "compiled_adv"


# ---- on a GPU, for which torch's device without numbers stands here ----


class Seen(TorchDispatchMode):
    """The dtypes that operators gave, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.setdefault(operator.__name__.split(".")[0], set()).add(result.dtype)
        return result


def test_no_float32_matrices_are_multiplied_on_a_gpu(monkeypatch):
    """A trainer may have allowed TF32, which keeps ten bits."""
    powers = blocked._made_powers(torch.full((2, 1), 0.9, dtype=torch.float64))
    monkeypatch.setattr(blocked, "_powers", lambda *_: (*(x.to("meta") for x in powers[:2]), True))
    with Seen() as seen:
        blocked._scan(*torch.empty(2, 2, 70, device="meta"), 0.99, torch.empty(2, dtype=torch.float64, device="meta"))
    assert seen.dtypes["bmm"] == {torch.float64}


def test_no_floats_are_summed_along_a_row_on_a_gpu():
    """torch.use_deterministic_algorithms(True) refuses that."""
    with Seen() as seen:
        blocked._pack_many(torch.empty(2, 70, device="meta"), torch.empty(2, 1, device="meta"), 60)
    assert seen.dtypes["cumsum"] == {torch.int64}
