"""Takes the stages of the default computation; gives those that `rules: strict` puts in their place.

Each class changes one method of the stage that it replaces; STRICT is the whole list. Source: strict.md. That a batch
must carry is_truncated is checked where batches are admitted.
"""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.alignment import Alignment
from compiled_adv.stages.estimator import PlaceOutcome
from compiled_adv.stages.forms import as_mask
from compiled_adv.stages.kl_rewards import KLRewards
from compiled_adv.stages.length_penalty import LengthPenalty
from compiled_adv.stages.reward_norm import RewardNorm, RowGroups, Units
from compiled_adv.stages.select import columns, shift_left


class ShiftAlignment(Alignment):
    """The mask shifts: the last column is never active."""

    def mask(self, own_mask_BT: Tensor, facts: Tensor) -> Tensor:
        return as_mask(shift_left(own_mask_BT))

    def n_active(self, n_actions_B: Tensor, first_B: Tensor) -> Tensor:
        return n_actions_B.clone()


class CappedLengthPenalty(LengthPenalty):
    """The penalty stops at its factor."""

    def limit(self, penalty_B: Tensor) -> Tensor:
        return penalty_B.clamp(min=-abs(self.overlong_penalty_factor))


class TailGroups(RowGroups):
    """Rows beyond the last full slice are one more group."""

    def by_position(self, order_B: Tensor, outside_B: Tensor) -> Tensor:
        return order_B // self.group_size


class KeptUnits(Units):
    """A unit counts if one of its rows keeps its outcome."""

    def kept(self, member_of_row_B: Tensor, is_truncated_B: Tensor) -> Tensor:
        if not self.mask_no_eos:
            return super().kept(member_of_row_B, is_truncated_B)
        stays_B = ((is_truncated_B == 0) & (member_of_row_B >= 0)).to(torch.int64)
        rows_U = torch.zeros_like(member_of_row_B).index_add(0, member_of_row_B.clamp(min=0), stays_B)
        return rows_U > 0


class LoneRewardNorm(RewardNorm):
    """Leave-one-out over a batch with one unit compares the unit with itself."""

    def on_itself(self, lone_U: Tensor) -> Tensor:
        return lone_U


class PlaceOutcomeOnAction(PlaceOutcome):
    """The outcome sits at the row's last action; a row without one places nothing."""

    def column(self, last_B: Tensor, actions_BT: Tensor) -> Tensor:
        return torch.where(actions_BT > 0, columns(actions_BT), -1).amax(1)


class AnchoredKLRewards(KLRewards):
    """Without a reference there is no KL."""

    def divergence(self, logprobs_BT: Tensor, ref_logp_BT: Tensor | None) -> Tensor:
        return torch.zeros_like(logprobs_BT) if ref_logp_BT is None else super().divergence(logprobs_BT, ref_logp_BT)


STRICT: dict[type[Stage], type[Stage]] = {
    Alignment: ShiftAlignment,
    LengthPenalty: CappedLengthPenalty,
    RowGroups: TailGroups,
    Units: KeptUnits,
    RewardNorm: LoneRewardNorm,
    PlaceOutcome: PlaceOutcomeOnAction,
    KLRewards: AnchoredKLRewards,
}
