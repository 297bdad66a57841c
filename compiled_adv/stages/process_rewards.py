"""Takes process rewards per generated token; gives them aligned, for direct shaping or folded into turns."""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.forms import roll_left
from compiled_adv.stages.select import fact, select, shift_left


class AlignedRewards(Stage):
    """Process rewards aligned with the actions that earned them."""

    slot = "actor.token_rewards_as_adv"
    reads = ("token_rewards", "loss_mask", "facts")
    writes = ("aligned_rewards",)

    def forward(self, own_BT, mask_BT, facts):
        return select(mask_BT, roll_left(own_BT, fact(facts, "tokens")))


class DirectRewards(Stage):
    """What shapes advantages directly; rows without EOS lose theirs if asked."""

    slot = "actor.token_rewards_as_adv"
    reads = ("aligned_rewards", "is_truncated")
    writes = ("direct",)

    mask_no_eos: bool

    def forward(self, aligned_BT, is_truncated_B):
        return kept(aligned_BT, is_truncated_B, self.mask_no_eos)


class FoldedRewards(Stage):
    """Each turn's process reward once, at the turn's end; rows without EOS lose theirs if asked.

    Without turn ids every run of active columns is a turn; a turn with a gap inside is folded once per run.
    """

    slot = "actor.token_rewards_as_adv"
    reads = ("aligned_rewards", "loss_mask", "turn_ids?", "is_truncated")
    writes = ("folded",)

    mask_no_eos: bool

    def forward(self, aligned_BT, mask_BT, turn_ids_BT, is_truncated_B):
        goes_on_BT = shift_left(mask_BT) > 0
        if turn_ids_BT is not None:
            ids_BT = align_turn_ids(turn_ids_BT)
            goes_on_BT = goes_on_BT & (ids_BT == shift_left(ids_BT, -1))
        folded_BT = torch.where((mask_BT > 0) & ~goes_on_BT, aligned_BT, 0.0)
        return kept(folded_BT, is_truncated_B, self.mask_no_eos)


def kept(rewards_BT: Tensor, is_truncated_B: Tensor, mask_no_eos: bool) -> Tensor:
    """Process rewards, without those of truncated rows if they are to go."""
    return torch.where(is_truncated_B[:, None] > 0, 0.0, rewards_BT) if mask_no_eos else rewards_BT.clone()


def align_turn_ids(turn_ids_BT: Tensor) -> Tensor:
    """Turn ids of the next token; the caller's last column and padding have none."""
    return shift_left(turn_ids_BT, -1)
