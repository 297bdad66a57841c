"""Buckets: which one serves a batch, what padding holds, and that cropping undoes it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compiled_adv
from compiled_adv.bucket import LEAST_TOKENS, Bucket, Ladder, ascending, crop, pad_channel, rung, rungs
from compiled_adv.channel import INPUTS
from compiled_adv.compiler import ladder
from compiled_adv.errors import InvalidValue, NoBucket, UnknownKey
from compiled_adv.memory import LEAST_BYTES, POOL

SMALL = Ladder((4, 8), (128, 256))


def declared(**compiled: object) -> Ladder:
    return ladder(compiled_adv.load_config({"actor": {"advantage": {"compiled": compiled}}}))


# ---- which bucket ----


@pytest.mark.parametrize("device, tokens", [("cpu", 1000), ("cuda:1", 1008)])
def test_rows_are_of_whole_vectors_on_a_gpu(device, tokens):
    assert Bucket(3, 1000).on(torch.device(device)) == Bucket(3, tokens)


@pytest.mark.parametrize(
    "rows, tokens, bucket",
    [
        (1, 1, Bucket(4, 128)),
        (4, 128, Bucket(4, 128)),
        (5, 128, Bucket(8, 128)),
        (4, 129, Bucket(4, 256)),
        (8, 256, Bucket(8, 256)),
    ],
)
def test_the_smallest_bucket_that_holds_the_batch_serves_it(rows, tokens, bucket):
    assert SMALL.fit(rows, tokens) == bucket


@pytest.mark.parametrize("rows, tokens", [(9, 1), (1, 257), (9, 257)])
def test_above_every_bucket_a_batch_is_its_own_bucket(rows, tokens):
    assert SMALL.fit(rows, tokens) == Bucket(rows, tokens)


@pytest.mark.parametrize("rows, tokens", [(9, 1), (1, 257)])
def test_above_every_bucket_is_an_error_where_it_is_configured_so(rows, tokens):
    with pytest.raises(NoBucket) as caught:
        Ladder(SMALL.rows, SMALL.tokens, "error").fit(rows, tokens)
    assert str(caught.value.found) == f"{rows} rows x {tokens} tokens"
    assert "overflow" in str(caught.value)


def test_every_declared_pair_is_a_bucket_the_largest_first():
    found = SMALL.buckets()
    assert sorted(found) == [Bucket(4, 128), Bucket(4, 256), Bucket(8, 128), Bucket(8, 256)]
    sizes = [bucket.rows * bucket.tokens for bucket in found]
    assert sizes == sorted(sizes, reverse=True)


def test_a_ladder_without_an_end_declares_no_bucket():
    assert Ladder(None, (128,)).buckets() == [] and Ladder((8,), None).buckets() == []


@given(st.integers(1, 1 << 20))
def test_a_rung_is_a_power_of_two_or_half_way_and_wastes_a_third_at_most(size: int):
    found = rung(size, 1)
    assert size <= found <= max(size * 1.5, 1)
    odd = found
    while odd % 2 == 0:
        odd //= 2
    assert odd in (1, 3)


@given(st.integers(1, 1 << 20))
def test_no_lower_rung_holds_the_size(size: int):
    assert all(lower < size for lower in rungs(1, size) if lower < rung(size, 1))


@given(st.integers(1, 1 << 20))
def test_a_rung_is_its_own_rung(size: int):
    assert rung(rung(size, LEAST_TOKENS), LEAST_TOKENS) == rung(size, LEAST_TOKENS) >= LEAST_TOKENS


def test_the_rungs_of_rows_and_of_tokens():
    assert rungs(1, 10) == (1, 2, 3, 4, 6, 8, 12)
    assert rungs(LEAST_TOKENS, 1000) == (128, 192, 256, 384, 512, 768, 1024)


def test_boundaries_are_in_order_and_without_repeats():
    assert ascending([8, 4, 8]) == (4, 8)


# ---- as configured ----


def test_auto_without_limits_has_no_end():
    assert declared() == Ladder(None, None)
    assert declared().fit(5, 100) == Bucket(6, 128)


def test_auto_goes_to_the_limits():
    found = declared(max_rows=4, max_tokens=200)
    assert found == Ladder((1, 2, 3, 4), (128, 192, 256))


def test_boundaries_are_declared_in_the_config():
    assert declared(buckets={"rows": [8, 4], "tokens": [128]}, overflow="error") == Ladder((4, 8), (128,), "error")


@pytest.mark.parametrize("text", ["rows: [4, 8]\ntokens: [128]\n", "buckets:\n  rows: [4, 8]\n  tokens: [128]\n"])
def test_boundaries_are_declared_in_a_file(tmp_path, text):
    file = tmp_path / "buckets.yaml"
    file.write_text(text)
    assert declared(buckets=str(file)) == Ladder((4, 8), (128,))


@pytest.mark.parametrize(
    "compiled, error",
    [
        ({"buckets": {"rows": [4]}}, InvalidValue),
        ({"buckets": {"rows": [], "tokens": [128]}}, InvalidValue),
        ({"buckets": {"rows": [0], "tokens": [128]}}, InvalidValue),
        ({"buckets": {"rows": [4.5], "tokens": [128]}}, InvalidValue),
        ({"buckets": {"rows": [True], "tokens": [128]}}, InvalidValue),
        ({"buckets": {"rows": [4], "tokens": [128], "columns": [1]}}, UnknownKey),
        ({"max_rows": 0}, InvalidValue),
        ({"max_buckets": 0}, InvalidValue),
    ],
)
def test_wrong_boundaries_are_refused(compiled, error):
    with pytest.raises(error):
        declared(**compiled)


# ---- padding in ----

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.integers(0, 5))


def channel(name: str, rows: int, tokens: int) -> torch.Tensor:
    """Numbers in the shape and dtype of a channel, none of which padding may hold."""
    known = INPUTS[name]
    shape = Bucket(rows, tokens).shape(known.dims)
    numbers = torch.arange(2, 2 + torch.Size(shape).numel(), dtype=torch.float64)
    return numbers.reshape(shape).to(known.dtype)


PADDED = [name for name, known in INPUTS.items() if known.dims != "S"]


@pytest.mark.parametrize("name", PADDED)
@given(SHAPES)
def test_padding_keeps_the_numbers_and_fills_the_rest(name: str, shape: tuple[int, int, int, int]):
    rows, tokens, more_rows, more_tokens = shape
    bucket, x = Bucket(rows + more_rows, tokens + more_tokens), channel(name, rows, tokens)
    padded = pad_channel(name, x, bucket)
    assert padded.shape == bucket.shape(INPUTS[name].dims) and padded.dtype == x.dtype and padded.is_contiguous()
    inside = torch.zeros(padded.shape, dtype=torch.bool)
    inside[tuple(slice(size) for size in x.shape)] = True
    assert torch.equal(padded[inside], x.flatten())
    filled = torch.full_like(padded[~inside], INPUTS[name].pad)
    assert torch.equal(padded[~inside].nan_to_num(-9.0), filled.nan_to_num(-9.0))


@pytest.mark.parametrize("name", ["turn_ids", "member_of_row", "group_of_row"])
def test_padding_belongs_to_no_turn_rollout_or_prompt(name):
    assert INPUTS[name].pad == -1


@given(SHAPES)
def test_cropping_undoes_padding(shape: tuple[int, int, int, int]):
    rows, tokens, more_rows, more_tokens = shape
    bucket = Bucket(rows + more_rows, tokens + more_tokens)
    for name in ("values", "rewards"):
        x = channel(name, rows, tokens)
        assert torch.equal(crop(pad_channel(name, x, bucket), rows, tokens, bucket), x)


def test_a_channel_that_fits_is_not_copied():
    x = channel("values", 4, 8)
    assert pad_channel("values", x, Bucket(4, 8)) is x


@pytest.mark.parametrize("bucket", [Bucket(4, 8), Bucket(6, 8), Bucket(4, 16)], ids=str)
def test_a_strided_channel_becomes_contiguous(bucket):
    x = channel("values", 8, 4).T
    padded = pad_channel("values", x, bucket)
    assert padded.is_contiguous() and torch.equal(padded[:4, :8], x)


def test_scalars_are_never_padded():
    x = torch.arange(6, dtype=torch.int32)
    assert torch.equal(pad_channel("facts", x, Bucket(100, 100)), x)


def test_a_later_version_of_a_channel_is_padded_like_it():
    x = torch.ones(2, dtype=torch.int64)
    assert pad_channel("member_of_row.1", x, Bucket(4, 8)).tolist() == [1, 1, -1, -1]


def test_what_a_users_function_wrote_is_padded_with_zeros():
    assert pad_channel("shaped", torch.ones(1, 2), Bucket(2, 3)).tolist() == [[1, 1, 0], [0, 0, 0]]


def test_padding_never_writes_to_the_channel():
    x = channel("values", 3, 5)
    before = x.clone()
    pad_channel("values", x, Bucket(4, 8)).fill_(7)
    assert torch.equal(x, before)


def test_memory_that_was_used_before_shows_nothing_of_it():
    bucket = Bucket(2, LEAST_BYTES // 8)
    used = POOL.empty(bucket.shape("BT"), torch.float32).fill_(9)
    place = used.data_ptr()
    del used
    padded = pad_channel("values", torch.ones(1, 3), bucket)
    assert padded.data_ptr() == place, "this test is about memory that is used again"
    assert float(padded.sum()) == 3


def test_an_attention_mask_is_padded_in_words_of_four_tokens():
    assert Bucket(2, 9).shape("BW") == (2, 3)
