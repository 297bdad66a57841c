"""What was admitted once is not looked at again, and nothing else passes by it."""

import pytest
import torch

import compiled_adv
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
