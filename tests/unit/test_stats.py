"""compute.stats(): the numbers of a batch that a trainer logs, the same from every backend, without consequences."""

import math
import warnings

import pytest
import torch

import compiled_adv
from compiled_adv.channel import STATS

GROUP = {"mean_level": "group", "std_level": "group", "group_size": 2}
BATCH = {"mean_level": "batch", "std_level": "batch"}


def batch(**changed):
    """Four rows of two prompts: prompt of 2 tokens, then 3, 1, 4 and 2 generated ones; two rows are padded."""
    lengths_B = torch.tensor([5, 3, 6, 4])
    at_T = torch.arange(6)
    valid_BT = at_T < lengths_B[:, None]
    generated_BT = valid_BT & (at_T >= 2)
    generator = torch.Generator().manual_seed(0)
    noise_BT = torch.randn(4, 6, generator=generator)
    return {
        "input_ids": torch.ones(4, 6, dtype=torch.int64),
        "attention_mask": valid_BT,
        "loss_mask": generated_BT.long(),
        "logprobs": torch.where(generated_BT, -noise_BT.abs(), 0.0),
        "ref_logp": torch.where(valid_BT, -0.5, 0.0),
        "values": torch.where(valid_BT, noise_BT / 3, 0.0),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.5]),
        "is_truncated": torch.tensor([False, False, True, False]),
        "token_rewards": torch.where(generated_BT, torch.tensor([[-0.5], [0.5], [-0.5], [-0.2]]), 0.0),
    } | changed


def stats_of(backend, rollouts=None, meta=None, *, actor=None, **per_call):
    actor = {"kl_ctl": 0.1, "reward_norm": GROUP, "adv_norm": BATCH, **(actor or {})}
    actor["advantage"] = {"backend": backend, "stats": True, **actor.get("advantage", {})}
    compute = compiled_adv.build({"actor": actor})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = compute(rollouts or batch(), meta, **per_call)
    return compute.stats(), out


def by_hand(rollouts, out):
    """What can be said from the batch and its result alone."""
    active_BT = out["loss_mask"] != 0
    x, returns, values = (t[active_BT].double() for t in (out["advantages"], out["returns"], rollouts["values"]))
    kl = (out["logprobs"] - out["ref_logp"])[active_BT].double().clamp(-10, 10)
    lengths_B = active_BT.sum(1).double()
    rewards_B = out["rewards"].double()
    found = {"rows": 4, "tokens": int(active_BT.sum()), "groups": 2, "groups/zero_spread": 0.5, "truncated": 0.25}
    found["padding"] = 1 - 18 / 24
    for name, y in (("reward", rewards_B), ("advantage", x), ("response_length", lengths_B)):
        found |= {f"{name}/mean": y.mean(), f"{name}/std": y.std(correction=0), f"{name}/min": y.min()}
        found[f"{name}/max"] = y.max()
    found["kl/mean"] = kl.mean()
    found["values/explained_variance"] = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("backend", ["reference", "eager", "compiled"])
def test_the_numbers_are_those_of_the_batch_and_its_result(backend):
    rollouts = batch()
    found, out = stats_of(backend, rollouts)
    expected = by_hand(rollouts, out)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


TURNS = {"gae_timestep_unit": "turn", "kl_estimator": "k3", "adv_norm": None}


@pytest.mark.parametrize("actor", [{}, TURNS], ids=["token", "turn"])
def test_a_compiled_program_measures_what_eager_measures(actor):
    rollouts = batch()
    rollouts["turn_ids"] = torch.where(rollouts["loss_mask"] != 0, torch.tensor([0, 0, 0, 1, 1, 2]), -1)
    found, want = (stats_of(b, rollouts, actor=actor, advantage_shaping_mode="gvpo")[0] for b in ("compiled", "eager"))
    assert {k: found[k] for k in STATS} == pytest.approx({k: want[k] for k in STATS}, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("adv_norm", [BATCH, None], ids=["normalised", "raw"])
def test_numbers_far_from_zero_keep_their_spread(backend, adv_norm):
    """Returns around 100, which spread by about a tenth, and values that know a part of them."""
    near = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) / 20
    far = {
        "values": torch.where(batch()["attention_mask"], 100 + near, 0.0),
        "rewards": 100 + torch.tensor([0.1, -0.1, 0.05, -0.05]),
    }
    actor = {"kl_ctl": 0.0, "reward_norm": None, "reward_clip": 1000.0, "reward_scaling": 1.0, "adv_norm": adv_norm}
    rollouts = batch(**far, is_truncated=torch.zeros(4, dtype=torch.bool))
    del rollouts["token_rewards"]
    found, out = stats_of(backend, rollouts, actor=actor)
    expected = by_hand(rollouts, out)["values/explained_variance"]
    assert out["returns"][out["loss_mask"] != 0].mean() == pytest.approx(100, abs=1)
    assert found["values/explained_variance"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("backend", ["reference", "eager", "compiled"])
def test_flipped_and_cleared_compare_the_advantages_before_and_after_process_shaping(backend):
    found, out = stats_of(backend, advantage_shaping_mode="gvpo")
    before = stats_of(backend, {k: v for k, v in batch().items() if k != "token_rewards"})[1]["advantages"]
    active_BT = out["loss_mask"] != 0
    after = out["advantages"]
    flipped = (before * after < 0) & active_BT
    cleared = (before != 0) & (after == 0) & active_BT
    assert found["process/cleared"] == pytest.approx(float(cleared.sum() / active_BT.sum()))
    assert found["process/flipped"] == pytest.approx(float(flipped.sum() / active_BT.sum()))
    assert cleared.any()


@pytest.mark.parametrize("backend", ["reference", "eager", "compiled"])
def test_the_switch_takes_the_measurements_away_and_no_result_depends_on_it(backend):
    measured, out = stats_of(backend)
    plain, same = stats_of(backend, actor={"advantage": {"stats": False}})
    assert {*measured} - {*plain} == {*STATS}
    assert {*out} == {*same}
    assert all(torch.equal(out[name], same[name]) for name in out)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_what_a_batch_lacks_is_nan_under_the_same_names(backend):
    bare = {k: v for k, v in batch().items() if k not in ("ref_logp", "values", "token_rewards")}
    found, _ = stats_of(backend, bare, actor={"kl_ctl": 0.0, "reward_norm": None})
    names = ("kl/mean", "values/explained_variance", "process/flipped", "process/cleared", "groups/zero_spread")
    assert all(math.isnan(found[name]) for name in names)
    assert {*found} == {*stats_of(backend)[0]}
    assert all(isinstance(value, float) for value in found.values())


def test_names_are_there_before_the_first_call():
    compute = compiled_adv.build({"actor": {"advantage": {"backend": "eager", "stats": True}}})
    before = compute.stats()
    compute(batch())
    assert before.keys() == compute.stats().keys() and math.isnan(before["advantage/mean"])


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_rows_of_one_rollout_are_one_voice_in_the_spread_of_a_group(backend):
    meta = {
        "n_trajs": 2,
        "traj_group_sizes": [2, 2],
        "traj_seqlens": [6, 6],
        "rollout_groups": [{"row_counts": (2,), "rewards": (0.5,)}, {"row_counts": (1, 1), "rewards": ()}],
    }
    meta["rollout_groups"] = [compiled_adv.RolloutGroup(**group) for group in meta["rollout_groups"]]
    found, _ = stats_of(backend, meta=meta)
    assert (found["groups"], found["groups/zero_spread"]) == (1.0, 1.0)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_rows_without_a_generated_token_leave_nothing_to_divide_by(backend):
    found, _ = stats_of(backend, batch(loss_mask=torch.zeros(4, 6, dtype=torch.int64)))
    assert found["tokens"] == 0 and math.isnan(found["advantage/mean"]) and math.isnan(found["advantage/max"])


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_where_returns_are_equal_there_is_nothing_to_explain(backend):
    equal = batch(rewards=torch.full((4,), 0.1), is_truncated=torch.zeros(4, dtype=torch.bool))
    found, _ = stats_of(backend, equal, actor={"kl_ctl": 0.0, "adv_norm": None, "reward_norm": None})
    assert math.isnan(found["values/explained_variance"])


def test_a_batch_of_as_many_rows_as_there_are_numbers_keeps_them_apart_from_rows():
    rows = len(STATS)
    wide = {k: v.repeat(rows, *[1] * (v.ndim - 1))[:rows] for k, v in batch().items()}
    assert stats_of("compiled", wide)[0]["rows"] == rows
