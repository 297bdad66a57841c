"""Turn GAE in plain torch: rewards and first values are scattered to turns, a loop runs over turns, and the
advantages are gathered back. The whole computation, GVPO included. Dims: B rows, T tokens, U turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from perf.peers import Peer, Unsupported
from perf.peers.column_loop import aligned, normalised
from perf.shapes import Recipe

CHANNELS = ("advantages", "returns", "kl_rewards", "tot_rewards", "loss_mask", "logprobs", "prox_logp", "ref_logp")


def prepare(recipe: Recipe, batch: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Peer:
    if recipe.turns is None or recipe.per_call.get("advantage_shaping_mode") != "gvpo":
        raise Unsupported("written for turn GAE with GVPO")
    run = lambda: compute(recipe.actor, recipe.per_call, batch)  # noqa: E731
    return Peer(run, CHANNELS, "plain torch, scatter to turns and a loop over turns")


def compute(actor: Mapping[str, Any], call: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    x, values_BT = aligned(actor, batch), batch["values"]
    gamma, decay = actor["discount"], actor["discount"] * actor["gae_lambda"]
    active_BT = x["loss_mask"] > 0
    rows, tokens = active_BT.shape
    turn_BT = torch.where(active_BT, batch["turn_ids"].roll(-1, -1), -1)
    wrong_BT = active_BT & ((turn_BT < 0) | (turn_BT >= tokens) | (turn_BT < turn_BT.cummax(-1).values))
    if wrong_BT.any():
        raise ValueError("turn ids of generated tokens lie in [0, T) and never decrease")
    turns = int(turn_BT.max()) + 1
    slot_BT = torch.where(active_BT, turn_BT, turns)  # inactive tokens share a slot of their own

    reward_BU = torch.zeros(rows, turns + 1).scatter_add_(1, slot_BT, x["outcome"])
    at_BT = torch.arange(tokens).expand(rows, tokens)
    first_BU = torch.full((rows, turns + 1), tokens).scatter_reduce_(1, slot_BT, at_BT, "amin")
    present_BU = first_BU < tokens
    value_BU = torch.where(present_BU, values_BT.gather(1, first_BU.clamp(max=tokens - 1)), 0.0)

    run_B, next_B = torch.zeros(rows), x["bootstrap"]
    columns = [torch.zeros(rows)]
    for u in range(turns - 1, -1, -1):
        step_B = reward_BU[:, u] + gamma * next_B - value_BU[:, u] + decay * run_B
        run_B = torch.where(present_BU[:, u], step_B, run_B)
        next_B = torch.where(present_BU[:, u], value_BU[:, u], next_B)
        columns.append(run_B)
    run_BU = torch.stack(columns[::-1], dim=1)
    run_BT = run_BU.gather(1, slot_BT)

    returns_BT = torch.where(active_BT, run_BT + value_BU.gather(1, slot_BT), values_BT)
    advantages_BT = normalised(actor, run_BT + x["kl"], x["loss_mask"])
    direct_BT = torch.where(active_BT, batch["token_rewards"].roll(-1, -1), 0.0)
    return {
        **x,
        "returns": returns_BT,
        "advantages": gvpo(advantages_BT, direct_BT, call),
        "tot_rewards": x["outcome"] + x["kl"],
    }


def gvpo(advantages_BT: Tensor, direct_BT: Tensor, call: Mapping[str, Any]) -> Tensor:
    """A failed step takes a gain away, deepens a loss, and costs a little where there was neither."""
    eps = call.get("gvpo_zero_eps", 1e-6)
    failed_BT = torch.where(
        advantages_BT > eps,
        torch.zeros_like(advantages_BT),
        torch.where(
            advantages_BT < -eps,
            advantages_BT * (1 + call["gvpo_negative_scale"]),
            torch.full_like(advantages_BT, -call["gvpo_zero_penalty"]),
        ),
    )
    return torch.where(direct_BT < 0, failed_BT, advantages_BT)
