"""Moments of several ranks as those of one batch."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from compiled_adv.distributed import TEXT, Meeting, Ranks, merge
from compiled_adv.errors import RankFailed


def exact(values: list[float]) -> tuple[int, Fraction, Fraction]:
    numbers = [Fraction(x) for x in values]
    mean = sum(numbers, Fraction(0)) / len(numbers)
    return len(numbers), mean, sum(((x - mean) ** 2 for x in numbers), Fraction(0))


def row(values: list[float]) -> list[float]:
    return [float(x) for x in exact(values)] if values else [0.0, 0.0, 0.0]


RANKS = st.lists(st.lists(st.integers(-64, 64), max_size=6), min_size=1, max_size=5)


@given(RANKS, st.sampled_from([0.0, 1e4, 1e8, -1e12]))
def test_far_from_zero_the_spread_is_lost_no_sooner_than_the_values(ranks: list[list[int]], far: float):
    parts = [[far + x / 4 for x in part] for part in ranks]
    values = [x for part in parts for x in part]
    n, mean, m2 = merge([row(part) for part in parts])
    if not values:
        assert (n, mean, m2) == (0.0, 0.0, 0.0)
        return
    want_n, want_mean, want_m2 = exact(values)
    rounding = 2.0**-52 * max(abs(far), 16.0)  # of one mean
    assert n == want_n
    assert abs(mean - float(want_mean)) <= 2 * rounding
    spread = float(want_m2)
    assert abs(m2 - spread) <= 1e-14 * spread + 8 * n * rounding * (rounding + (spread / n) ** 0.5)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.floats(-1e6, 1e6))
def test_equal_values_have_exactly_no_spread(counts: list[int], value: float):
    n, mean, m2 = merge([[float(count), value if count else 0.0, 0.0] for count in counts])
    assert m2 == 0.0 and mean == (value if n else 0.0)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_one_rank_with_values_keeps_its_own_moments_to_the_bit(empty: int):
    own = [3.0, 0.1, 0.7]
    rows = [[0.0, 0.0, 0.0]] * 2
    rows.insert(empty, own)
    assert merge(rows) == own


def test_a_rank_that_fails_is_named_even_where_the_group_was_destroyed(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    ranks = Ranks(dist.group.WORLD, ["adv_norm"])
    dist.destroy_process_group()
    with pytest.raises(RankFailed, match="rank 0 failed"):
        Meeting(ranks)._stop_if([True])


def test_each_rank_is_told_with_its_own_error_and_one_without_words_with_none(monkeypatch: pytest.MonkeyPatch):
    said = [b"", b"", b"no rows"]
    monkeypatch.setattr(Meeting, "_gathered", lambda meeting, x: [[*text.ljust(TEXT, b"\0")] for text in said])
    ranks = Ranks.__new__(Ranks)
    ranks.points, ranks.names = (), [10, 11, 12]
    with pytest.raises(RankFailed) as raised:
        Meeting(ranks)._stop_if([False, True, True])
    assert raised.value.found == "rank 12: no rows"


def test_ranks_meet_on_the_device_that_is_current_when_they_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        ranks = Ranks(dist.group.WORLD, [])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        assert ranks.device == torch.device("cuda", 3)
    finally:
        dist.destroy_process_group()
