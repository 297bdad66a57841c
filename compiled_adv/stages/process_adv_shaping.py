"""Takes normalised advantages and aligned process rewards; gives shaped advantages on active tokens.

Returns are out of reach. Where the batch has no process rewards, none of these is wired.
"""

import torch

from compiled_adv.channel import GVPO as NUMBERS
from compiled_adv.stage import Stage


class Additive(Stage):
    """A + r."""

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct", "loss_mask")
    writes = ("advantages",)

    def forward(self, advantages_BT, direct_BT, mask_BT):
        return torch.where(mask_BT > 0, advantages_BT + direct_BT, advantages_BT)


class GVPO(Stage):
    """Failed tokens (r < 0): a positive advantage is cleared, a negative one grows, a zero one becomes a penalty.

    A number left None is the call's own, from the `gvpo` channel.
    """

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct", "loss_mask", "gvpo")
    writes = ("advantages",)

    negative_scale: float | None = None
    zero_penalty: float | None = None
    zero_eps: float | None = None

    def forward(self, advantages_BT, direct_BT, mask_BT, call):
        negative_scale, zero_penalty, zero_eps = (
            call[i] if (fixed := getattr(self, name)) is None else fixed for i, name in enumerate(NUMBERS)
        )
        failed_BT = torch.where(advantages_BT < -zero_eps, advantages_BT * (1 + negative_scale), -zero_penalty)
        failed_BT = torch.where(advantages_BT > zero_eps, 0.0, failed_BT)
        return torch.where((mask_BT > 0) & (direct_BT < 0), failed_BT, advantages_BT)


class ProcessWeighted(Stage):
    """A * r where A >= 0; where A < 0, a positive r replaces it."""

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct", "loss_mask")
    writes = ("advantages",)
    flags = ("weighted_flip",)

    def forward(self, advantages_BT, direct_BT, mask_BT):
        flips_BT = (mask_BT > 0) & (advantages_BT < 0) & (direct_BT > 0)
        weighted_BT = torch.where(advantages_BT >= 0, advantages_BT * direct_BT, advantages_BT)
        weighted_BT = torch.where(flips_BT, direct_BT, weighted_BT)
        return torch.where(mask_BT > 0, weighted_BT, advantages_BT), flips_BT.any(1)


class WeightRange(Stage):
    """process_weighted needs process rewards in [0, 1]; inactive ones are 0."""

    slot = "actor.advantage.process_adv_shaping"
    reads = ("direct",)
    flags = ("process_reward_out_of_range",)

    def forward(self, direct_BT):
        return ((direct_BT < 0) | (direct_BT > 1)).any(1)


class FiniteResult(Stage):
    """Rows whose result overflowed."""

    reads = ("advantages", "returns", "tot_rewards")
    flags = ("nonfinite_result",)

    def forward(self, advantages_BT, returns_BT, tot_rewards_BT):
        return ((advantages_BT + returns_BT + tot_rewards_BT) * 0.0).sum(1) != 0
