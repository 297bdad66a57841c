"""What fuzzing found, each as a test of its whole kind."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import compiled_adv
from compiled_adv import concat_batch, load_config
from compiled_adv.batch import COMPUTABLE, as_meta, split_batch
from compiled_adv.errors import (
    BadKwargs,
    BadMeta,
    BadTurnIds,
    BatchError,
    CallError,
    CompiledAdvError,
    EmptyBatch,
    InvalidValue,
    MissingKey,
    RolloutFile,
    WrongDtype,
    WrongType,
)
from compiled_adv.rollouts import read_group
from tests.contracts.small import Runner, group, meta_of, rows
from tests.fuzz.fuzz_compute import DTYPES, LOOKS, retyped
from tests.fuzz.values import MADE, Odd

HUGE = 10**5000  # more digits than Python writes
BATCH = rows("pgg", "pg.", rewards=[1, -1])

# Numbers of these exist only to be stored.
STORED = [dtype for dtype in DTYPES if dtype not in COMPUTABLE]


@pytest.fixture(params=["reference", "eager"])
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


# ---- tensors ----


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("key", ["loss_mask", "attention_mask", "rewards", "logprobs", "values", "is_truncated"])
def test_a_dtype_without_arithmetic_is_refused_by_name(run: Runner, key: str, dtype: torch.dtype) -> None:
    like = BATCH.get(key, torch.zeros(2, 3))
    error = run.refusal(BATCH | {key: retyped(like, dtype)})
    assert isinstance(error, (WrongDtype, WrongType)) and key in str(error)


@pytest.mark.parametrize("look", ["sparse", "csr", "mkldnn", "quantized", "nested", "meta"])
@pytest.mark.parametrize("key", ["loss_mask", "input_ids", "logprobs", "values"])
def test_a_tensor_that_is_not_plain_is_refused_by_name(run: Runner, key: str, look: str) -> None:
    error = run.refusal(BATCH | {key: LOOKS[look](BATCH.get(key, torch.zeros(2, 3)))})
    assert isinstance(error, BatchError) and key in str(error)


@pytest.mark.parametrize("look", ["sparse", "quantized", "nested", "meta"])
@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "extra"])
def test_a_prompt_with_a_tensor_that_is_not_plain_is_refused_by_name(key: str, look: str) -> None:
    bad = BATCH | {key: LOOKS[look](BATCH.get(key, torch.zeros(2, 3)))}
    with pytest.raises(WrongType, match=key):
        concat_batch([bad, bad])
    with pytest.raises(WrongType, match=key):
        split_batch(bad, meta_of(2, width=3))


@pytest.mark.parametrize("byte", [2, 3, 128, 255])
@pytest.mark.parametrize("key", ["attention_mask", "loss_mask", "is_truncated"])
def test_a_true_that_is_another_byte_than_one_is_true(run: Runner, key: str, byte: int) -> None:
    batch = rows("pgg.", "pggg", rewards=[1, 2], values=[[1] * 4] * 2, is_truncated=[True, False])
    other = batch | {key: (batch[key].ne(0).to(torch.uint8) * byte).view(torch.bool)}
    assert torch.equal(run(other)["advantages"], run(batch)["advantages"])


TOKEN_LAMBDA = {
    "gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae",
    "gae_lambda_kwargs": {"alpha": 0.5},
}


@pytest.mark.parametrize("ids", [[-1, -1, -1], [-1, 3, 3], [-1, 1, 0], [-1, 2**63 - 1, -(2**63)], [-1, 0, -1]], ids=str)
@pytest.mark.parametrize("actor", [{"gae_timestep_unit": "turn"}, TOKEN_LAMBDA], ids=["turn", "lambda"])
def test_turn_ids_of_any_number_are_looked_at_before_they_are_used(run: Runner, actor: Any, ids: list[int]) -> None:
    assert isinstance(run.refusal(rows("pgg", turn_ids=[ids], rewards=[1]), actor), BadTurnIds)


# ---- keys, metadata and per-call values ----


@pytest.mark.parametrize("key", [1, HUGE, (1, 2), None, "é\ud800", "x" * 10_000], ids=lambda key: type(key).__name__)
def test_any_key_can_be_in_a_message(key: Any) -> None:
    for bad, error in (({key: 1}, EmptyBatch), ({key: torch.zeros(0, 3)}, EmptyBatch)):
        with pytest.raises(error) as caught:
            concat_batch([bad])
        assert len(str(caught.value).encode()) < 5000
    with pytest.raises(MissingKey):
        compiled_adv.build({"advantage": {"backend": "eager"}})({key: 1})


@pytest.mark.parametrize("number", [HUGE, -HUGE, 10**400, 2**64], ids=["huge", "-huge", "10^400", "2^64"])
@pytest.mark.parametrize("place", ["sizes", "counts", "reference"])
def test_an_integer_without_end_in_metadata_is_refused(run: Runner, number: int, place: str) -> None:
    counts, reference = (number if place == "counts" else 2,), (number if place == "reference" else 1.0,)
    meta = meta_of(number if place == "sizes" else 2, groups=[group(*counts, rewards=reference)])
    if place == "reference" and number == 2**64:
        assert run(BATCH, meta=meta)  # a large score, and finite
    else:
        assert isinstance(run.refusal(BATCH, meta=meta), BadMeta)


@pytest.mark.parametrize(
    "sizes", [itertools.count(1), range(10**9), torch.tensor(2), iter([2]), Odd(), {2: 2}, "22", None, 2], ids=repr
)
@pytest.mark.parametrize("field", ["traj_group_sizes", "traj_seqlens", "rollout_groups"])
def test_a_list_of_metadata_is_a_list_with_an_end(field: str, sizes: Any) -> None:
    if field == "rollout_groups" and sizes is None:
        return
    with pytest.raises(BadMeta):
        as_meta(meta_of(2) | {field: sizes})


@pytest.mark.parametrize("make", MADE)
def test_a_mode_of_any_type_is_refused(run: Runner, make: Any) -> None:
    error = run.refusal(BATCH, advantage_shaping_mode=make())
    assert isinstance(error, CallError) and len(str(error)) < 1000


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("mode", ["additive", "process_weighted"])
def test_gvpo_values_that_nothing_reads_may_be_anything(run: Runner, mode: str, make: Any) -> None:
    batch = BATCH | {"token_rewards": torch.full((2, 3), 0.5)}
    out = run(batch, advantage_shaping_mode=mode, gvpo_negative_scale=make(), gvpo_zero_eps=make())
    assert torch.equal(out["advantages"], run(batch, advantage_shaping_mode=mode)["advantages"])


@pytest.mark.parametrize("make", [*MADE, lambda: HUGE, lambda: -1, lambda: float("nan")])
def test_gvpo_values_that_are_read_are_numbers(run: Runner, make: Any) -> None:
    value = make()
    try:
        run(BATCH, advantage_shaping_mode="gvpo", gvpo_zero_penalty=value)
    except CallError as error:
        assert "gvpo_zero_penalty" in str(error)
    else:
        assert 0 <= float(value) < float("inf") and not isinstance(value, (bool, str))


# ---- configurations ----


@pytest.mark.parametrize("number", [1e39, -1e39, 1e300, 3.4028235677973366e38])
@pytest.mark.parametrize("key", ["kl_ctl", "reward_bias", "reward_scaling", "discount", "overlong_penalty_factor"])
def test_a_number_beyond_float32_is_refused(key: str, number: float) -> None:
    # in float32 it would be infinite, and its product with 0 no number
    with pytest.raises(InvalidValue, match=key):
        load_config({key: number})


@pytest.mark.parametrize("text", ["é\ud800", "\udfff"])
def test_text_that_is_no_unicode_is_refused_with_a_message_that_prints(text: str) -> None:
    for config in (text, {text: 1}, {"advantage": {text: 1}}, {"advantage": {"estimator": text}}, {"rules": text}):
        try:
            load_config(config)
        except CompiledAdvError as error:
            assert str(error).encode()


@pytest.mark.parametrize("block", ["reward_norm", "advantage"])
@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(2).numpy(), range(3), b"x"], ids=repr)
def test_an_object_that_is_no_block_is_refused(block: str, value: Any) -> None:
    with pytest.raises(CompiledAdvError):
        load_config({block: value})


@pytest.mark.parametrize("value", [object(), torch.zeros(2)], ids=repr)
def test_an_object_without_any_key_of_a_norm_is_no_norm(value: Any) -> None:
    with pytest.raises(InvalidValue, match="should be a mapping"):
        load_config({"adv_norm": value})


class Failing:
    """A trainer's configuration with a key that cannot be read."""

    discount = 1.0

    @property
    def kl_ctl(self) -> float:
        raise RuntimeError("interpolation failed")


def test_an_attribute_that_fails_is_named_by_its_own_error() -> None:
    with pytest.raises(InvalidValue, match="interpolation failed"):
        load_config(Failing())


def doubling(levels: int) -> list[Any]:
    """Two to the power of `levels` values in a few lists."""
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("value", [range(10**9), [range(10**6)], doubling(40)], ids=["range", "inner", "doubling"])
def test_kwargs_larger_than_memory_are_refused(value: Any) -> None:
    for config in (
        {"gae_lambda_kwargs": {"alpha": value}},
        {"advantage": {"estimator": {"implementation": "token_gae", "kwargs": {"x": value}}}},
    ):
        with pytest.raises(BadKwargs):
            load_config(config)


WRITTEN = {
    "digits.yaml": "kl_ctl: " + "9" * 5000,
    "digits.json": '{"kl_ctl": ' + "9" * 5000 + "}",
    "int.yaml": "kl_ctl: !!int xyz",
    "float.yaml": "kl_ctl: !!float x",
    "bool.yaml": "mask_no_eos_with_zero: !!bool maybe",
    "date.yaml": "kl_ctl: 2020-99-99",
    "timestamp.yaml": "kl_ctl: !!timestamp x",
    "binary.yaml": "kl_ctl: !!binary é",
    "tag.yaml": "kl_ctl: !!python/object/apply:os.system [id]",
    "key.yaml": "{[1]: 2}",
    "bytes.yaml": b"\xff\xfe\x00",
    "bytes.json": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_a_parser_rejects_in_any_way_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content = WRITTEN[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CompiledAdvError, match=name):
        load_config(tmp_path / name)


@pytest.mark.parametrize("unit", ["[", "{a: ", "- ", '{"a":', "? ", "!!set {"])
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_nesting_without_end_is_refused_at_once(tmp_path: Path, unit: str, suffix: str) -> None:
    (tmp_path / f"deep{suffix}").write_text((unit * 200_000)[:999_000])
    start = time.process_time()
    with pytest.raises(CompiledAdvError):
        load_config(tmp_path / f"deep{suffix}")
    assert time.process_time() - start < 10  # the square of the depth would take minutes


# ---- rollout files ----


@pytest.mark.parametrize("key", ["row_counts", "references", "rewards", "loss_mask"])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_a_rollout_file_with_numbers_that_cannot_be_computed_with_is_refused(
    tmp_path: Path, key: str, dtype: torch.dtype
) -> None:
    path = tmp_path / "g.safetensors"
    save_file(BATCH | {key: BATCH.get(key, torch.ones(2)).to(dtype)}, path)
    with pytest.raises(RolloutFile, match="does not compute with"):
        read_group(path)


def test_a_rollout_file_whose_masks_hold_other_bytes_gives_the_right_result(tmp_path: Path) -> None:
    batch = {key: x.bool() if key.endswith("mask") else x for key, x in rows("pgg.", "pggg", rewards=[1, 2]).items()}
    path = tmp_path / "g.safetensors"
    save_file(batch, path)
    compute = compiled_adv.build({"kl_ctl": 0.0, "advantage": {"backend": "eager"}})
    (want,) = compute.compute_advantages([read_group(path)])
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + size])["attention_mask"]["data_offsets"]
    for at in range(8 + size + start, 8 + size + end):
        content[at] *= 7
    path.write_bytes(content)
    (got,) = compute.compute_advantages([read_group(path)])
    assert torch.equal(got["advantages"], want["advantages"])
