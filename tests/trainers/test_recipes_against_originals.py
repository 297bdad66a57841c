"""Recipes against the functions that they stand for: AReaL's actor, verl's estimators and torchrl's GAE, on seeded
batches. Those that none of the three has (turns, process rewards, a teacher) have their tables in tests/recipes/."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import compiled_adv
from compiled_adv import config_file
from perf import peers
from perf.peers import areal
from perf.shapes import Recipe, make_batch

SHAPE = (32, 96)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "eager")


def recipe(name: str, **change: Any) -> dict[str, Any]:
    """The actor block of a recipe with other keys; `advantage` is added to the recipe's own."""
    actor = config_file.read(config_file.find(name))[0]["actor"]
    return actor | change | {"advantage": actor.get("advantage", {}) | change.get("advantage", {})}


def stage(slot: str, name: str, **kwargs: Any) -> dict[str, Any]:
    return {slot: {"implementation": f"compiled_adv.recipes.{name}", "kwargs": kwargs}}


# ---- AReaL ----


@pytest.mark.parametrize("name", ["ppo_token_gae", "grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce_plus_plus"])
def test_areals_actor_gives_the_recipes_numbers(name: str) -> None:
    from areal.api.cli_args import PPOActorConfig

    channels = ("values", "ref_logp") if name == "ppo_token_gae" else ("ref_logp",)
    batch, meta = make_batch(*SHAPE, channels=channels)
    ours = compiled_adv.build({"actor": recipe(name)})(batch, meta)
    known = {f.name for f in dataclasses.fields(PPOActorConfig)} - {"advantage"}
    actor = {key: x for key, x in recipe(name).items() if key in known}
    peer = areal.prepare(Recipe(actor, channels), batch, ours)
    assert peers.check(peer, ours) < 1e-5


# ---- verl ----


def responses(seed: int) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """A rollout with prompts of one to six responses, its metadata, and the label of each response's prompt."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, *torch.randint(1, 7, (5,), generator=generator).tolist()]
    batch, _ = make_batch(sum(sizes), 48, channels=(), seed=seed)
    batch["rewards"] = torch.randint(0, 3, (sum(sizes),), generator=generator).float()
    batch["form"] = torch.rand(sum(sizes), generator=generator)
    meta = {"n_trajs": len(sizes), "traj_group_sizes": sizes, "traj_seqlens": [48] * len(sizes), "rollout_groups": None}
    return batch, meta, np.repeat(np.arange(len(sizes)), sizes).astype(str).astype(object)


def as_verl(batch: dict[str, torch.Tensor], rewards_B: torch.Tensor) -> dict[str, torch.Tensor]:
    """Its token-level rewards and its mask, by action as in ours."""
    mask_BT = batch["loss_mask"].roll(-1, -1)
    at_B = (mask_BT * torch.arange(mask_BT.shape[1])).argmax(-1)  # the last action
    rewards_BT = torch.zeros(mask_BT.shape).scatter_(1, at_B[:, None], rewards_B[:, None])
    return {"token_level_rewards": rewards_BT, "response_mask": mask_BT}


def by_prompt(name: str, **kwargs: Any) -> dict[str, Any]:
    """A recipe of groups by verl's conventions, as its first lines say to switch."""
    shaping = stage("outcome_reward_shaping", "group_relative", **kwargs)
    return recipe(name, reward_norm=None, reward_clip=float("inf"), advantage=shaping)


def whitened(name: str, **advantage: Any) -> dict[str, Any]:
    return recipe(name, kl_ctl=0.0, adv_norm=None, advantage=stage("process_adv_shaping", "whiten") | advantage)


CHANNELS = ["rewards", "form"]
GDPO = stage("outcome_reward_shaping", "gdpo", channels=CHANNELS, weights=[1.0, 0.5])
VERL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("compute_grpo_outcome_advantage", by_prompt("grpo"), {}),
    "dr_grpo": ("compute_grpo_outcome_advantage", by_prompt("dr_grpo", std=False), {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("compute_rloo_outcome_advantage", by_prompt("rloo", std=False, leave_one_out=True), {}),
    "opo": ("compute_opo_outcome_advantage", recipe("opo"), {}),
    "gdpo": ("compute_gdpo_outcome_advantage", whitened("gdpo", **GDPO), {}),
    "reinforce_plus_plus": (
        "compute_reinforce_plus_plus_outcome_advantage",
        whitened("reinforce_plus_plus") | {"discount": 0.97},
        {},
    ),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", VERL)
def test_verls_function_gives_the_recipes_numbers(name: str, seed: int) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    function, actor, more = VERL[name]
    batch, meta, uid = responses(seed)
    out = compiled_adv.build({"actor": actor})(batch, meta)
    config = AlgoConfig(gamma=0.97, gdpo_reward_keys=CHANNELS, gdpo_reward_weights=[1.0, 0.5])
    given = as_verl(batch, batch["rewards"]) | {"index": uid, "config": config} | more
    if name == "gdpo":  # its rewards come from beside the batch, and lie at the last token of the response
        tokens = {"prompts": torch.zeros(len(uid), 0), "attention_mask": given["response_mask"]}
        given |= {"batch": tokens, "non_tensor_batch": {key: batch[key].numpy() for key in CHANNELS}}
    wanted_BT = getattr(core_algos, function)(**given)[0]
    actions_BT = out["loss_mask"] > 0
    torch.testing.assert_close(out["advantages"][actions_BT], wanted_BT[actions_BT], atol=1e-5, rtol=1e-5)


def test_verls_gae_gives_the_numbers_of_ppo_with_its_whitening() -> None:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    batch, meta = make_batch(*SHAPE, channels=("values",))
    batch["is_truncated"] = torch.zeros_like(batch["is_truncated"])  # verl has no bootstrap
    out = compiled_adv.build({"actor": whitened("ppo_token_gae")})(batch, meta)
    given = as_verl(batch, batch["rewards"])
    wanted = compute_gae_advantage_return(**given, values=batch["values"], gamma=1.0, lam=0.95)
    actions_BT = out["loss_mask"] > 0
    for key, wanted_BT in zip(("advantages", "returns"), wanted, strict=True):
        torch.testing.assert_close(out[key][actions_BT], wanted_BT[actions_BT], atol=1e-5, rtol=1e-5)


# ---- torchrl ----


def test_torchrls_gae_gives_the_numbers_of_vapo_row_by_row() -> None:
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    batch, meta = make_batch(8, 64, channels=("values",))
    out = compiled_adv.build({"actor": recipe("vapo", adv_norm=None)})(batch, meta)
    for row in range(8):
        at = out["loss_mask"][row] > 0
        n = int(at.sum())
        last = batch["attention_mask"][row].sum() - 1
        values = torch.cat([batch["values"][row][at], batch["values"][row, last][None]])
        end = (torch.arange(n) == n - 1)[:, None]
        reward = torch.where(end, batch["rewards"][row], 0.0)
        cut = bool(batch["is_truncated"][row])
        step = {"state_value": values[:-1, None], "next_state_value": values[1:, None], "reward": reward}
        ends = {"done": end, "terminated": torch.zeros_like(end) if cut else end}
        advantages = generalized_advantage_estimate(1.0, max(0.0, 1 - 1 / (0.05 * n)), **step, **ends)[0][:, 0]
        returns = generalized_advantage_estimate(1.0, 1.0, **step, **ends)[1][:, 0]
        torch.testing.assert_close(out["advantages"][row][at], advantages, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out["returns"][row][at], returns, atol=1e-5, rtol=1e-5)
