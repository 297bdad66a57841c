"""Takes outcome rewards, logical rollouts and prompt groups; gives one normalised score per row.

Three stages: the score of each row and unit, the units that count, and the normalisation. A unit is a logical rollout
(its reference, else its rows' common reward) or, without rollout metadata, a row. Source: semantics.md.
"""

import torch
from torch import Tensor

from compiled_adv.spec import Norm
from compiled_adv.stage import Stage
from compiled_adv.stages.select import fact
from compiled_adv.stages.statistics import Centre, Moments, centre, over, scale


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
    """Score of each unit, and whether it counts (under default rules every unit does)."""

    slot = "actor.reward_norm"
    reads = ("rewards", "references", "member_of_row", "first_row", "row_groups", "is_truncated", "facts")
    writes = ("unit_scores", "unit_counts", "unit_groups")
    flags = ("split_rows_differ",)

    score: Score
    mask_no_eos: bool

    def forward(self, rewards_B, references_U, member_of_row_B, first_row_U, group_B, is_truncated_B, facts):
        member_B = member_of_row_B.clamp(min=0)
        inferred_U = torch.isnan(references_U)
        differs_B = inferred_U[member_B] & (rewards_B != rewards_B[first_row_U][member_B])
        value_U = torch.where(inferred_U, rewards_B[first_row_U], references_U)
        real_U = torch.arange(len(first_row_U), device=first_row_U.device) < fact(facts, "members")
        counts_U = (real_U & self.kept(member_of_row_B, is_truncated_B)).to(torch.float64)
        group_U = torch.where(real_U, group_B[first_row_U], -1)
        return self.score.forward(value_U), counts_U, group_U, differs_B

    def kept(self, member_of_row_B: Tensor, is_truncated_B: Tensor) -> Tensor:
        return torch.ones_like(member_of_row_B, dtype=torch.bool)


class SameRawRewards(Stage):
    """With a length penalty, the rows of a split rollout must agree before it too."""

    slot = "actor.reward_norm"
    reads = ("rewards", "references", "member_of_row", "first_row")
    flags = ("split_rows_differ",)

    def forward(self, rewards_B, references_U, member_of_row_B, first_row_U):
        member_B = member_of_row_B.clamp(min=0)
        return torch.isnan(references_U)[member_B] & (rewards_B != rewards_B[first_row_U][member_B])


class RewardNorm(Stage):
    """(score - mean of its unit) / scale of its unit."""

    slot = "actor.reward_norm"
    reads = ("scores", "unit_scores", "unit_counts", "unit_groups", "member_of_row", "is_truncated", "facts")
    writes = ("scores",)
    flags = ("zero_spread_groups", "loo_alone", "discarded_rows_counted")

    norm: Norm
    mask_no_eos: bool

    def forward(self, scores_B, score_U, counts_U, group_U, member_of_row_B, is_truncated_B, facts):
        norm = self.norm
        units = Moments(counts_U, torch.where(counts_U > 0, score_U, 0.0), torch.zeros_like(score_U))
        group = units.merged(group_U).of(group_U)
        single_U = (group_U >= 0) & (group.n_U == 1)
        one_in_batch = counts_U.sum() == 1
        itself_U = single_U if norm.mean_level == "group" else self.alone_in_batch(one_in_batch) & (counts_U > 0)
        around = centre(units, norm.mean_level, norm.mean_leave1out, group_U, itself_U)
        divisor_U = scale(units, around, norm.std_level, norm.std_unbiased, norm.eps, group_U, single_U)
        if norm.std_level is not None:
            small_U = (fact(facts, "rollouts_given") > 0) & (divisor_U <= 2 * norm.eps)
            divisor_U = torch.where(small_U, 1.0, divisor_U)
        mean_U = own_mean(score_U, around) if norm.mean_leave1out else around.mean_U
        member_B = member_of_row_B.clamp(min=0)
        return (
            (scores_B - mean_U[member_B]) / divisor_U[member_B],
            self.without_spread(units, group_U)[member_B],
            self.left_alone(one_in_batch) & (counts_U > 0)[member_B],
            (is_truncated_B > 0) & self.mask_no_eos,
        )

    def alone_in_batch(self, one_in_batch: Tensor) -> Tensor:
        """Whether the only unit of a batch is centred on itself."""
        return torch.zeros_like(one_in_batch)

    def left_alone(self, one_in_batch: Tensor) -> Tensor:
        return one_in_batch & (self.norm.mean_leave1out and self.norm.mean_level == "batch")

    def without_spread(self, units: Moments, group_U: Tensor) -> Tensor:
        """Units of a part whose counting units all have one value: exactly then is m2 exactly 0."""
        level = "group" if "group" in (self.norm.mean_level, self.norm.std_level) else "batch"
        part_U = over(level, group_U)
        part = units.merged(part_U).of(part_U)
        return (part_U >= 0) & (part.n_U > 0) & (part.m2_U == 0)


def own_mean(score_U: Tensor, around: Centre) -> Tensor:
    """Mean that a unit is compared with under leave-one-out: score - spread * (score - mean), exact where equal."""
    return around.mean_U + (1 - around.spread_U) * (score_U - around.mean_U)


