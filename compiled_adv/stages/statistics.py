"""Takes count, mean and sum of squared deviations of units; gives the centre and scale that a norm block asks for.

A unit is one logical rollout's score (reward norm) or one row's active tokens (advantage norm). All in float64, merged
in unit order, so a unit that counts nothing changes no digit. Source: semantics.md, "Mean and scale".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_adv import kernels


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations, each float64 [U]; a part's numbers stand at its index."""

    n_U: Tensor
    mean_U: Tensor
    m2_U: Tensor

    def merged(self, part_U: Tensor) -> "Moments":
        """Moments of each part, at index part; units of part -1 are left out."""
        return Moments(*kernels.merge_moments(self.n_U, self.mean_U, self.m2_U, part_U))

    def of(self, part_U: Tensor) -> "Moments":
        """The part's moments at each of its units."""
        at_U = part_U.clamp(min=0)
        return Moments(self.n_U[at_U], self.mean_U[at_U], self.m2_U[at_U])


@dataclass(frozen=True)
class Centre:
    """x becomes spread * (x - mean): a leave-one-out mean moves with x, so its spread is n/(n-1)."""

    mean_U: Tensor
    spread_U: Tensor


def whole(group_U: Tensor) -> Tensor:
    """Every unit in one part."""
    return torch.zeros_like(group_U)


def over(level: str | None, group_U: Tensor) -> Tensor:
    """Part of each unit at a level; units outside every group have -1."""
    return group_U if level == "group" else whole(group_U)


def centre(units: Moments, level: str | None, leave_one_out: bool, group_U: Tensor, alone_U: Tensor) -> Centre:
    """Mean around which each unit is centred; `alone_U` marks units whose part has one member, to be centred on itself.

    level null: 0. Plain: the part's mean, 0 for an empty part or outside every group.
    """
    one_U = torch.ones_like(units.mean_U)
    if level is None:
        return Centre(torch.zeros_like(units.mean_U), one_U)
    part_U = over(level, group_U)
    part = units.merged(part_U).of(part_U)
    inside_U = part_U >= 0
    if not leave_one_out:
        return Centre(torch.where(inside_U & (part.n_U > 0), part.mean_U, 0.0), one_U)
    peers_U = inside_U & (part.n_U > 1)
    spread_U = torch.where(peers_U, part.n_U / (part.n_U - 1).clamp(min=1), 1.0)
    return Centre(torch.where(peers_U, part.mean_U, 0.0), torch.where(alone_U, 0.0, spread_U))


def scale(
    units: Moments, around: Centre, level: str | None, unbiased: bool, eps: float, group_U: Tensor, single_U: Tensor
) -> Tensor:
    """Standard deviation around those means, plus eps; level null: 1. `single_U` marks units of one-member groups."""
    if level is None:
        return torch.ones_like(units.mean_U)
    part_U = over(level, group_U)
    squares_U = around.spread_U**2 * (units.m2_U + units.n_U * (units.mean_U - around.mean_U) ** 2)
    # moments with mean 0 add up: their merged m2 is the plain sum
    part = Moments(units.n_U, torch.zeros_like(squares_U), squares_U).merged(part_U).of(part_U)
    degrees_U = part.n_U - 1 if unbiased else part.n_U
    std_U = torch.sqrt(part.m2_U / degrees_U.clamp(min=1))
    undefined_U = degrees_U < 1
    if unbiased and level == "group":
        undefined_U = undefined_U | single_U
    std_U = torch.where(undefined_U, 1.0, std_U)
    return torch.where(part_U >= 0, std_U, 0.0) + eps
