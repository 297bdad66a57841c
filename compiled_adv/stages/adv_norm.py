"""Takes raw advantages and the loss mask; gives advantages centred and scaled over active tokens."""

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.spec import Norm
from compiled_adv.stage import Stage
from compiled_adv.stages.statistics import Moments, centre, scale


class AdvantageMoments(Stage):
    """Count, mean and sum of squared deviations of each row's active advantages, float64."""

    slot = "actor.adv_norm"
    reads = ("advantages", "loss_mask")
    writes = ("adv_n", "adv_mean", "adv_m2")

    def forward(self, advantages_BT, mask_BT):
        return kernels.row_moments(advantages_BT, mask_BT)


class AdvantageScale(Stage):
    """What the norm block makes of those moments: x becomes (x - mean) * factor, and whether any token is active."""

    slot = "actor.adv_norm"
    reads = ("adv_n", "adv_mean", "adv_m2", "row_groups", "member_of_row")
    writes = ("adv_centre", "adv_factor", "adv_active")

    norm: Norm

    def forward(self, n_B, mean_B, m2_B, group_B, member_of_row_B):
        norm = self.norm
        rows = Moments(n_B, mean_B, m2_B)
        single_B = one_rollout(group_B, member_of_row_B)
        itself_B = single_B & (norm.mean_level == "group")
        around = centre(rows, norm.mean_level, norm.mean_leave1out, group_B, itself_B)
        divisor_B = scale(rows, around, norm.std_level, norm.std_unbiased, norm.eps, group_B, single_B)
        return around.mean_U, around.spread_U / divisor_B, n_B.sum() > 0


class AdvNorm(Stage):
    """(A - mean) * factor on active tokens and 0 elsewhere; a batch without active tokens is left as it is."""

    slot = "actor.adv_norm"
    reads = ("advantages", "loss_mask", "adv_centre", "adv_factor", "adv_active")
    writes = ("advantages",)

    def forward(self, advantages_BT, mask_BT, centre_B, factor_B, active):
        # the mean as two float32 parts: subtracting them in turn loses nothing to cancellation
        high_B = centre_B.to(torch.float32)
        low_B = (centre_B - high_B).to(torch.float32)
        scaled_BT = ((advantages_BT - high_B[:, None]) - low_B[:, None]) * factor_B.to(torch.float32)[:, None]
        return torch.where(mask_BT > 0, scaled_BT, torch.where(active, 0.0, advantages_BT))


def one_rollout(group_B: Tensor, member_of_row_B: Tensor) -> Tensor:
    """Rows whose group has one member: one row, or one logical rollout however many rows."""
    earlier_B = torch.nn.functional.pad(member_of_row_B[:-1], (1, 0), value=-1)
    starts_B = (member_of_row_B != earlier_B).to(torch.float64)
    zeros_B = torch.zeros_like(starts_B)
    members_B = Moments(starts_B, zeros_B, zeros_B).merged(group_B).of(group_B).n_U
    return (group_B >= 0) & (members_B == 1)
