"""What was admitted once is not looked at again, and nothing else passes by it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import compiled_adv
from compiled_adv.arguments import tensors_of
from compiled_adv.errors import CompiledAdvError
from tests.unit.wiring import a_batch

ACTOR = {"reward_norm": {"mean_level": "group", "std_level": "group"}, "advantage": {"backend": "eager"}}


def built():
    return compiled_adv.build({"actor": ACTOR})


def meta_of(batch, size=None, **changed):
    rows, tokens = batch["loss_mask"].shape
    return {"n_trajs": 1, "traj_group_sizes": [rows if size is None else size], "traj_seqlens": [tokens], **changed}


@pytest.mark.parametrize("size", [1.0, True, "1", 0, 2], ids=repr)
def test_group_sizes_that_only_compare_equal_are_refused_after_good_ones(size):
    compute, batch = built(), {key: x[:1] for key, x in a_batch().items()}
    compute(batch, meta_of(batch))
    with pytest.raises(CompiledAdvError, match="group size"):
        compute(batch, meta_of(batch, size))


def test_an_unknown_key_is_refused_after_good_metadata():
    compute, batch = built(), a_batch()
    compute(batch, meta_of(batch))
    with pytest.raises(CompiledAdvError, match="traj_group_size"):
        compute(batch, meta_of(batch, traj_group_size=[1]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.to(torch.complex64),
        lambda x: x.long(),
        lambda x: x[:, 1:],
        lambda x: x.to_sparse(),
        lambda x: x.tolist(),
        lambda x: None,
        lambda x: x.to("meta"),
    ],
    ids=["complex", "integers", "narrower", "sparse", "a list", "absent", "meta"],
)
def test_a_channel_of_another_form_is_refused_after_a_good_one(spoil):
    compute, batch = built(), a_batch()
    compute(batch)
    with pytest.raises(CompiledAdvError, match="logprobs"):
        compute({**batch, "logprobs": spoil(batch["logprobs"])})
    compute(batch)


def test_what_a_caller_does_to_its_lists_changes_no_later_batch():
    compute, batch = built(), a_batch()
    meta = meta_of(batch)
    expected = compute(batch, meta)["advantages"]
    meta["traj_group_sizes"].append(7)
    with pytest.raises(CompiledAdvError, match="group sizes"):
        compute(batch, meta)
    assert torch.equal(compute(batch, meta_of(batch))["advantages"], expected)


@pytest.mark.parametrize("value", [float("nan"), -1.0, "0.2", True], ids=repr)
def test_a_bad_number_is_refused_after_a_good_one(value):
    compute, batch = built(), a_batch()
    compute(batch, advantage_shaping_mode="gvpo", gvpo_negative_scale=1.0)
    with pytest.raises(CompiledAdvError, match="gvpo_negative_scale"):
        compute(batch, advantage_shaping_mode="gvpo", gvpo_negative_scale=value)


def test_a_default_device_or_dtype_reaches_neither_this_batch_nor_a_later_one():
    batch = a_batch()
    batch = {key: torch.cat([x] * 5) for key, x in batch.items()}  # a composition that no other test asks for
    meta, wanted = meta_of(batch), compiled_adv.build({"actor": {**ACTOR, "advantage": {"backend": "reference"}}})
    wanted = wanted(batch, meta)["advantages"]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            inside = built()(batch, meta)["advantages"]
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(inside, wanted)
    torch.testing.assert_close(built()(batch, meta)["advantages"], wanted)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def fake(x):
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


@pytest.mark.parametrize("key", ["attention_mask", "rewards", "logprobs"])
@pytest.mark.parametrize("spoil", [lambda x: TwoTensor(x, x), fake, freed], ids=["a wrapper", "fake", "freed"])
def test_a_tensor_without_memory_is_refused_before_a_kernel_reads_it(key, spoil):
    compute, batch = built(), a_batch()
    compute(batch)
    with pytest.raises(CompiledAdvError, match=key):
        compute({**batch, key: spoil(batch[key])})


def test_no_program_with_a_users_function_reads_a_wrapper_of_the_rollout():
    x = torch.ones(2, 3)
    tensors, rest = tensors_of({"loss_mask": x, "scores": x.clone(), "wrapped": TwoTensor(x, x)})
    assert (list(tensors), rest) == (["loss_mask", "scores"], ("wrapped",))


@pytest.mark.parametrize("key", ["rewards", "logprobs", "loss_mask"])
def test_no_program_reads_memory_that_holds_the_opposite(key):
    batch, compute = a_batch(), built()
    seen = compute._admit({**batch, key: torch._neg_view(-batch[key].float())}, None, compute._admit.call({}))
    assert not seen.channels[key].is_neg()
    torch.testing.assert_close(seen.channels[key], batch[key].float())
