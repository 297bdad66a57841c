"""Token GAE in plain torch, one step of the recurrence per token column: the way it is usually written.

The whole default computation: alignment, KL, group reward norm, the loop, batch advantage norm. Dims: B rows,
T tokens, G groups, N rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from perf.peers import Peer, Unsupported
from perf.shapes import Recipe


def prepare(recipe: Recipe, batch: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Peer:
    if recipe.turns is not None or "token_rewards" in batch or "values" not in batch:
        raise Unsupported("written for token GAE with a critic and without process rewards")
    channels = ("advantages", "returns", "kl_rewards", "tot_rewards", "loss_mask", "logprobs", "prox_logp", "ref_logp")
    return Peer(lambda: compute(recipe.actor, batch), channels, "plain torch, a loop over token columns")


def aligned(actor: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mask, log probabilities, KL and the normalised outcome, as the estimator wants them."""
    mask_BT = batch["loss_mask"].float().roll(-1, -1)
    logprobs_BT = torch.where(mask_BT > 0, batch["logprobs"].roll(-1, -1), 0.0)
    ref_logp_BT = torch.where(mask_BT > 0, batch["ref_logp"], 0.0)
    kl_rewards_BT = -actor["kl_ctl"] * (logprobs_BT - ref_logp_BT).clamp(-10, 10)

    score_GN = batch["rewards"].clamp(-20, 20).double().view(-1, actor["reward_norm"]["group_size"])
    centred_GN = score_GN - score_GN.mean(-1, keepdim=True)
    score_B = (centred_GN / (score_GN.std(-1, keepdim=True) + actor["reward_norm"]["eps"])).flatten().float()

    length_B = batch["attention_mask"].sum(-1)
    rows = torch.arange(len(length_B))
    kl_BT = kl_rewards_BT.clone()
    kl_BT[rows, length_B - 1] = 0
    outcome_BT = torch.zeros_like(kl_BT)
    outcome_BT[rows, (length_B - 2).clamp(min=0)] = score_B
    return {
        "loss_mask": mask_BT,
        "logprobs": logprobs_BT,
        "prox_logp": logprobs_BT.clone(),
        "ref_logp": ref_logp_BT,
        "kl_rewards": kl_rewards_BT,
        "kl": kl_BT,
        "outcome": outcome_BT,
        "bootstrap": torch.where(batch["is_truncated"], batch["values"][rows, length_B - 1], 0.0),
    }


def normalised(actor: Mapping[str, Any], advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the active tokens of the batch."""
    x_BT, n = advantages_BT.double(), mask_BT.sum(dtype=torch.float64)
    centred_BT = torch.where(mask_BT > 0, x_BT - (x_BT * mask_BT).sum() / n, 0.0)
    scale = (centred_BT.square().sum() / (n - 1)).sqrt() + actor["adv_norm"]["eps"]
    return (centred_BT / scale).float()


def compute(actor: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    x, values_BT = aligned(actor, batch), batch["values"]
    gamma, decay = actor["discount"], actor["discount"] * actor["gae_lambda"]
    rewards_BT = x["outcome"] + x["kl"]
    active_BT = x["loss_mask"] > 0
    run_B, next_B = torch.zeros(len(values_BT)), x["bootstrap"]
    columns = [run_B]
    for t in range(values_BT.shape[1] - 2, -1, -1):
        step_B = rewards_BT[:, t] + gamma * next_B - values_BT[:, t] + decay * run_B
        run_B = torch.where(active_BT[:, t], step_B, run_B)
        next_B = torch.where(active_BT[:, t], values_BT[:, t], next_B)
        columns.append(run_B)
    advantages_BT = torch.stack(columns[::-1], dim=1)
    return {
        **x,
        "returns": advantages_BT + values_BT,
        "advantages": normalised(actor, advantages_BT, x["loss_mask"]),
        "tot_rewards": rewards_BT,
    }
