"""torchrl 0.14.1: its own `vec_generalized_advantage_estimate`, the recurrence alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from perf.peers import Peer, Unsupported
from perf.shapes import Recipe


def prepare(recipe: Recipe, batch: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Peer:
    if recipe.turns is not None or "values" not in batch:
        raise Unsupported("torchrl's GAE is per step, with a critic")
    mask_BT = ours["loss_mask"] > 0
    if (mask_BT.long().diff(dim=-1) > 0).sum(-1).max() > 1:
        raise Unsupported("torchrl knows no mask: tokens between actions would be steps of their own")
    try:
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate
    except ImportError as error:
        raise Unsupported(f"torchrl is not installed here: {error}") from error

    rows = torch.arange(len(mask_BT))
    last_B = batch["attention_mask"].sum(-1) - 2
    done_BT = torch.zeros_like(mask_BT)
    done_BT[rows, last_B] = True
    terminated_BT = done_BT & ~batch["is_truncated"][:, None]  # a cut row ends, but bootstraps
    arguments = {
        "state_value": batch["values"].clone(),
        "next_state_value": batch["values"].roll(-1, -1),
        "reward": ours["tot_rewards"].clone(),
        "done": done_BT,
        "terminated": terminated_BT,
    }
    arguments = {name: x[..., None] for name, x in arguments.items()}
    gamma, lam = recipe.actor["discount"], recipe.actor["gae_lambda"]

    def run() -> dict[str, Tensor]:
        advantages_BT1, returns_BT1 = vec_generalized_advantage_estimate(gamma, lam, **arguments)
        return {"returns": returns_BT1[..., 0]}

    note = "recurrence only, a convolution that drops weights under 1e-7; no masks, KL, norms or process rewards"
    return Peer(run, ("returns",), note, active_only=True)
