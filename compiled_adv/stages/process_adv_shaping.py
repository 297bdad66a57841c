"""Takes normalised advantages and aligned process rewards; gives shaped advantages on active tokens.

Returns are out of reach. Where the batch has no process rewards, none of these is wired.
"""

import torch

from compiled_adv.channel import GVPO as NUMBERS
from compiled_adv.stage import Stage


class Additive(Stage):
    """A + r."""

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct")
    writes = ("advantages",)

    def forward(self, advantages_BT, direct_BT):
        return advantages_BT + direct_BT  # direct rewards are 0 off the mask


class GVPO(Stage):
    """Failed tokens (r < 0): a positive advantage is cleared, a negative one grows, a zero one becomes a penalty.

    A number left None is the call's own, from the `gvpo` channel.
    """

    slot = "actor.advantage.process_adv_shaping"
    reads = ("advantages", "direct", "gvpo")
    writes = ("advantages",)

    negative_scale: float | None = None
    zero_penalty: float | None = None
    zero_eps: float | None = None

    def forward(self, advantages_BT, direct_BT, call):
        negative_scale, zero_penalty, zero_eps = (
            call[i] if (fixed := getattr(self, name)) is None else fixed for i, name in enumerate(NUMBERS)
        )
        failed_BT = torch.where(advantages_BT < -zero_eps, advantages_BT * (1 + negative_scale), -zero_penalty)
        failed_BT = torch.where(advantages_BT > zero_eps, 0.0, failed_BT)
        return torch.where(direct_BT < 0, failed_BT, advantages_BT)


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
