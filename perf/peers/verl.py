"""verl 0.9.1: its own `compute_gae_advantage_return`, the recurrence and the whitening."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from perf.peers import Peer, Unsupported
from perf.shapes import Recipe


def prepare(recipe: Recipe, batch: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Peer:
    if recipe.turns is not None or "values" not in batch:
        raise Unsupported("verl's GAE is per token, with a critic")
    try:
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return
    except ImportError as error:
        raise Unsupported(f"verl is not installed here: {error}") from error
    gamma, lam = recipe.actor["discount"], recipe.actor["gae_lambda"]
    # It never bootstraps: a cut row gets its last value as part of its last reward, which is the same number.
    # Its mask is aligned to the next token, as its responses are.
    rewards_BT, mask_BT = ours["tot_rewards"].clone(), ours["loss_mask"].clone()
    rows = torch.arange(len(rewards_BT))
    last_B = batch["attention_mask"].sum(-1) - 2
    cut_B = torch.where(batch["is_truncated"], batch["values"][rows, last_B + 1], 0.0)
    rewards_BT[rows, last_B] += gamma * cut_B
    values_BT = batch["values"].clone()

    def run() -> dict[str, Tensor]:
        advantages_BT, returns_BT = compute_gae_advantage_return(rewards_BT, values_BT, mask_BT, gamma, lam)
        return {"advantages": advantages_BT, "returns": returns_BT}

    compared = ("returns",) if "token_rewards" in batch else ("advantages", "returns")
    note = (
        "recurrence and whitening only: rewards per token, KL, reward norm, alignment and process rewards are left out;"
        " variance + 1e-8 under the root"
    )
    return Peer(run, compared, note, active_only=True)
