"""Takes outcome rewards, logical rollouts and prompt groups; gives one normalised score per row.

Three stages: the score of each row and unit, the units that count, and the normalisation. A unit is a logical rollout
(its reference, else its rows' common reward) or, without rollout metadata, a row. Source: semantics.md.
"""

import torch
from torch import Tensor

from compiled_adv.spec import Norm
from compiled_adv.stage import Stage
from compiled_adv.stages.select import fact
from compiled_adv.stages.statistics import LEVELS, centre, levels, scale


class Score(Stage):
    """Bias, scaling and clipping of one reward per row, float64."""

    slot = "actor.reward_scaling"
    reads = ("rewards",)
    writes = ("scores",)

    bias: float
    scaling: float
    clip: float

    def forward(self, rewards_B):
        return ((rewards_B.to(torch.float64) + self.bias) * self.scaling).clamp(-self.clip, self.clip)


class RowGroups(Stage):
    """Prompt of each row: by metadata, else by slices of `group_size`; rows beyond the last full slice have none."""

    mixes_rows = True
    reads = ("group_of_row", "facts")
    writes = ("row_groups",)
    flags = ("rows_outside_groups",)

    group_size: int

    def forward(self, group_of_row_B, facts):
        sliced, rows = fact(facts, "groups_given") == 0, fact(facts, "rows")
        order_B = torch.arange(len(group_of_row_B), device=group_of_row_B.device)
        real_B = order_B < rows
        outside_B = sliced & real_B & (order_B >= rows - rows % self.group_size)
        group_B = torch.where(sliced, self.by_position(order_B, outside_B), group_of_row_B)
        return torch.where(real_B, group_B, -1), outside_B

    def by_position(self, order_B: Tensor, outside_B: Tensor) -> Tensor:
        return torch.where(outside_B, -1, order_B // self.group_size)


class Units(Stage):
    """Score of each unit as moments of one cell, its group, and whether it counts (by default every unit does)."""

    slot = "actor.reward_norm"
    mixes_rows = True
    reads = ("rewards", "references", "member_of_row", "first_row", "row_groups", "is_truncated", "facts")
    writes = ("unit_n", "unit_mean", "unit_m2", "unit_groups")
    flags = ("split_rows_differ",)

    score: Score
    mask_no_eos: bool

    def forward(self, rewards_B, references_U, member_of_row_B, first_row_U, group_B, is_truncated_B, facts):
        member_B = member_of_row_B.clamp(min=0)
        inferred_U = torch.isnan(references_U)
        differs_B = inferred_U[member_B] & (rewards_B != rewards_B[first_row_U][member_B])
        value_U = torch.where(inferred_U, rewards_B[first_row_U], references_U)
        real_U = torch.arange(len(first_row_U), device=first_row_U.device) < fact(facts, "members")
        counts_U = real_U & self.kept(member_of_row_B, is_truncated_B)
        score_U = torch.where(counts_U, self.score.forward(value_U), 0.0)
        group_U = torch.where(real_U, group_B[first_row_U], -1)
        return counts_U.to(torch.float64), score_U, torch.zeros_like(score_U), group_U, differs_B

    def kept(self, member_of_row_B: Tensor, is_truncated_B: Tensor) -> Tensor:
        return torch.ones_like(member_of_row_B, dtype=torch.bool)


class SameRawRewards(Stage):
    """With a length penalty, the rows of a split rollout must agree before it too."""

    slot = "actor.reward_norm"
    mixes_rows = True
    reads = ("rewards", "references", "member_of_row", "first_row")
    flags = ("split_rows_differ",)

    def forward(self, rewards_B, references_U, member_of_row_B, first_row_U):
        member_B = member_of_row_B.clamp(min=0)
        return torch.isnan(references_U)[member_B] & (rewards_B != rewards_B[first_row_U][member_B])


class SingleUnits(Stage):
    """Units whose group has one member."""

    slot = "actor.reward_norm"
    reads = ("group_n",)
    writes = ("single",)

    def forward(self, group_n_U):
        return group_n_U == 1


class RewardNorm(Stage):
    """(score - mean of its unit) / scale of its unit."""

    slot = "actor.reward_norm"
    mixes_rows = True
    reads = ("scores", "unit_n", "unit_mean", "unit_groups", "member_of_row", "is_truncated", "facts", *LEVELS)
    writes = ("scores",)
    flags = ("zero_spread_groups", "loo_alone", "discarded_rows_counted")

    norm: Norm
    mask_no_eos: bool

    def forward(self, scores_B, n_U, score_U, group_U, member_of_row_B, is_truncated_B, facts, *read):
        norm = self.norm
        group, batch, single_U = levels(n_U, *read)
        lone = norm.mean_leave1out and norm.mean_level == "batch"
        lone_U = (n_U > 0) & (batch.n == 1) if lone else torch.zeros_like(single_U)
        itself_U = single_U if norm.mean_level == "group" else self.on_itself(lone_U)
        mean_U, spread_U = centre(norm, group, batch, itself_U)
        divisor_U = scale(norm, mean_U, spread_U, group, batch, group_U >= 0, single_U)
        if norm.std_level is not None:
            small_U = (fact(facts, "rollouts_given") > 0) & (divisor_U <= 2 * norm.eps)
            divisor_U = torch.where(small_U, 1.0, divisor_U)
        # what a unit is compared with: score - spread * (score - mean), exact where they are equal
        against_U = mean_U + (1 - spread_U) * (score_U - mean_U)
        part = group if "group" in (norm.mean_level, norm.std_level) else batch
        flat_U = (part.n > 0) & (part.m2 == 0) & torch.ones_like(single_U)  # equal scores have exactly no spread
        member_B = member_of_row_B.clamp(min=0)
        return (
            (scores_B - against_U.expand(n_U.shape)[member_B]) / divisor_U.expand(n_U.shape)[member_B],
            flat_U[member_B],
            lone_U[member_B],
            (is_truncated_B > 0) & self.mask_no_eos,
        )

    def on_itself(self, lone_U: Tensor) -> Tensor:
        """Whether the only unit of a batch is centred on itself under leave-one-out."""
        return torch.zeros_like(lone_U)
