"""Takes count, mean and sum of squared deviations of units; gives the centre and scale that a norm block asks for.

A unit is one logical rollout's score (reward norm) or one row's active tokens (advantage norm). All in float64, merged
in unit order, so a unit that counts nothing changes no digit. Each norm block merges a batch at most once: that is
where ranks meet. Source: semantics.md, "Mean and scale".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.spec import Norm
from compiled_adv.stage import Stage

if TYPE_CHECKING:
    from compiled_adv.admit import Admitted


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations, float64: of each unit, of each unit's group, or of the batch."""

    n: Tensor
    mean: Tensor
    m2: Tensor

    def around(self, centre: Tensor) -> Tensor:
        """Sum of squared deviations from another centre."""
        return self.m2 + self.n * (self.mean - centre) ** 2


class GroupMoments(Stage):
    """Moments of each unit's group, at the unit; zeros outside every group."""

    mixes_rows = True
    reads = ("unit_n", "unit_mean", "unit_m2", "unit_groups")
    writes = ("group_n", "group_mean", "group_m2")

    def forward(self, n_U, mean_U, m2_U, group_U):
        at_U, inside_U = group_U.clamp(min=0), group_U >= 0
        merged = kernels.merge_moments(n_U, mean_U, m2_U, group_U)
        return tuple(torch.where(inside_U, x_G[at_U], 0.0) for x_G in merged)


class BatchMoments(Stage):
    """Moments of all units."""

    mixes_rows = True
    reads = ("unit_n", "unit_mean", "unit_m2")
    writes = ("batch_n", "batch_mean", "batch_m2")

    def forward(self, n_U, mean_U, m2_U):
        whole_U = torch.zeros(n_U.shape, dtype=torch.int64, device=n_U.device)
        return tuple(x_U[0] for x_U in kernels.merge_moments(n_U, mean_U, m2_U, whole_U))


# What a norm block reads of them, as `levels` takes it.
LEVELS = (*(f"{name}?" for name in GroupMoments.writes + BatchMoments.writes), "single?")


def levels(
    n_U: Tensor,
    group_n: Tensor | None,
    group_mean: Tensor,
    group_m2: Tensor,
    batch_n: Tensor | None,
    batch_mean: Tensor,
    batch_m2: Tensor,
    single_U: Tensor | None,
) -> tuple[Moments | None, Moments | None, Tensor]:
    """Moments of each unit's group and of the batch, each if the block needs it, and units of one-member groups."""
    group = None if group_n is None else Moments(group_n, group_mean, group_m2)
    batch = None if batch_n is None else Moments(batch_n, batch_mean, batch_m2)
    return group, batch, torch.zeros_like(n_U, dtype=torch.bool) if single_U is None else single_U


class AcrossRanks(Stage):
    """The batch moments of a norm block over all ranks: count, mean and sum of squared deviations in one collective.

    Two blocks meet twice: the moments of advantages wait for the rewards that those are made of.
    """

    reads = ("batch_n", "batch_mean", "batch_m2")
    writes = ("batch_n", "batch_mean", "batch_m2")

    opaque = True
    mixes_rows = True

    block: str

    def call(self, admitted: "Admitted", moments: Sequence[Tensor]) -> Sequence[Tensor]:
        assert admitted.meeting is not None
        return admitted.meeting.merged(self.block, torch.stack([*moments])).unbind()


class GroupCentred(Stage):
    """Units as deviations from their group's centre: what a batch scale beside a group mean is made of."""

    reads = ("unit_n", "unit_mean", "unit_m2", "group_n", "group_mean", "group_m2", "single")
    writes = ("unit_mean", "unit_m2")

    leave_one_out: bool

    def forward(self, n_U, mean_U, m2_U, group_n_U, group_mean_U, group_m2_U, single_U):
        group = Moments(group_n_U, group_mean_U, group_m2_U)
        centre_U, spread_U = centre_of(group, self.leave_one_out, single_U)
        # with mean 0 everywhere, merged m2 is the plain sum
        return torch.zeros_like(mean_U), spread_U**2 * Moments(n_U, mean_U, m2_U).around(centre_U)


def centre_of(part: Moments, leave_one_out: bool, alone: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, spread): x becomes spread * (x - mean). A leave-one-out mean moves with x, so its spread is n/(n-1).

    An empty part has mean 0, and so has one of one cell under leave-one-out unless it is `alone`: centred on itself.
    """
    if not leave_one_out:
        return torch.where(part.n > 0, part.mean, 0.0), torch.ones_like(part.mean)
    peers = part.n > 1
    spread = torch.where(peers, part.n / (part.n - 1).clamp(min=1), 1.0)
    return torch.where(peers, part.mean, 0.0), torch.where(alone, 0.0, spread)


def centre(norm: Norm, group: Moments | None, batch: Moments | None, alone: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, spread) at the block's mean level; level null: 0."""
    part = group if norm.mean_level == "group" else batch
    if norm.mean_level is None:
        return torch.zeros_like(alone, dtype=torch.float64), torch.ones_like(alone, dtype=torch.float64)
    assert part is not None
    return centre_of(part, norm.mean_leave1out, alone)


def scale(
    norm: Norm,
    mean: Tensor,
    spread: Tensor,
    group: Moments | None,
    batch: Moments | None,
    inside_U: Tensor,
    single_U: Tensor,
) -> Tensor:
    """Standard deviation around those means, plus eps, at the block's std level; level null: 1.

    `inside_U` marks units of some group; outside, the deviation is 0. `single_U` marks units of one-member groups.
    """
    if norm.std_level is None:
        return torch.ones_like(single_U, dtype=torch.float64)
    part = group if norm.std_level == "group" else batch
    assert part is not None
    centred = norm.std_level == "batch" and norm.mean_level == "group"  # GroupCentred has done it
    squares = part.m2 if centred else spread**2 * part.around(mean)
    degrees = part.n - 1 if norm.std_unbiased else part.n
    std = torch.where(degrees < 1, 1.0, torch.sqrt(squares / degrees.clamp(min=1)))
    if norm.std_level == "group":
        std = torch.where(single_U, 1.0, std) if norm.std_unbiased else std
        std = torch.where(inside_U, std, 0.0)
    return std + norm.eps
