"""Takes raw advantages and the loss mask; gives advantages centred and scaled over active tokens."""

import torch

from compiled_adv import kernels
from compiled_adv.spec import Norm
from compiled_adv.stage import Stage
from compiled_adv.stages.select import select
from compiled_adv.stages.statistics import LEVELS, centre, levels, scale


class AdvantageMoments(Stage):
    """Count, mean and sum of squared deviations of each row's active advantages, float64."""

    slot = "actor.adv_norm"
    reads = ("advantages", "loss_mask", "row_groups")
    writes = ("unit_n", "unit_mean", "unit_m2", "unit_groups")

    def forward(self, advantages_BT, mask_BT, group_B):
        return *kernels.row_moments(advantages_BT, mask_BT), group_B.clone()


class SingleRollouts(Stage):
    """Rows whose group has one member: one row, or one logical rollout however many rows."""

    slot = "actor.adv_norm"
    mixes_rows = True
    reads = ("row_groups", "member_of_row")
    writes = ("single",)

    def forward(self, group_B, member_of_row_B):
        earlier_B = torch.nn.functional.pad(member_of_row_B[:-1], (1, 0), value=-1)
        starts_B = (member_of_row_B != earlier_B).to(torch.float64)
        zeros_B = torch.zeros_like(starts_B)
        members_G, *_ = kernels.merge_moments(starts_B, zeros_B, zeros_B, group_B)
        return (group_B >= 0) & (members_G[group_B.clamp(min=0)] == 1)


class AdvantageScale(Stage):
    """What the norm block makes of those moments: x becomes (x - mean) * factor, and whether any token is active."""

    slot = "actor.adv_norm"
    mixes_rows = True
    reads = ("unit_n", "unit_groups", *LEVELS)
    writes = ("adv_centre", "adv_factor", "adv_active")

    norm: Norm

    def forward(self, n_B, group_B, *read):
        norm = self.norm
        group, batch, single_B = levels(n_B, *read)
        itself_B = single_B if norm.mean_level == "group" else torch.zeros_like(single_B)
        mean_B, spread_B = centre(norm, group, batch, itself_B)
        divisor_B = scale(norm, mean_B, spread_B, group, batch, group_B >= 0, single_B)
        factor_B = spread_B / divisor_B
        # Beyond float32 it would make a NaN of what has no spread; a divisor of 0 is to do so.
        factor_B = torch.where(divisor_B == 0, factor_B, factor_B.clamp(max=torch.finfo(torch.float32).max))
        active = (n_B.sum() if batch is None else batch.n) > 0
        factor_B = torch.where(active, factor_B, 1.0)
        return mean_B.expand(n_B.shape), factor_B.expand(n_B.shape), active


class ActiveAdvantages(Stage):
    """A norm block without levels: inactive columns become 0, unless none is active in the batch."""

    slot = "actor.adv_norm"
    mixes_rows = True
    reads = ("advantages", "loss_mask", "n_active")
    writes = ("advantages",)

    def forward(self, advantages_BT, mask_BT, n_active_B):
        keep = n_active_B.sum() == 0
        return torch.where((mask_BT > 0) | keep, advantages_BT, 0.0)


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
        return select(torch.maximum(mask_BT, torch.where(active, 0.0, 1.0)), scaled_BT)
