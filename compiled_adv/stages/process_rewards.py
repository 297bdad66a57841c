"""Takes process rewards per generated token; gives them aligned, for direct shaping or folded into turns."""

import torch

from compiled_adv.stage import Stage
from compiled_adv.stages.select import columns, fact, roll_left, select, shift_left


class ProcessRewards(Stage):
    """Process rewards on generated tokens, at their own positions; rows without EOS lose theirs if asked."""

    slot = "actor.token_rewards_as_adv"
    reads = ("token_rewards", "generated", "is_truncated")
    writes = ("token_rewards",)

    mask_no_eos: bool

    def forward(self, token_rewards_BT, generated_BT, is_truncated_B):
        own_BT = select(generated_BT, token_rewards_BT)
        return torch.where(is_truncated_B[:, None] > 0, 0.0, own_BT) if self.mask_no_eos else own_BT


class DirectRewards(Stage):
    """Process rewards aligned with the actions that earned them."""

    slot = "actor.token_rewards_as_adv"
    reads = ("token_rewards", "loss_mask", "facts")
    writes = ("direct",)

    def forward(self, own_BT, mask_BT, facts):
        return select(mask_BT, roll_left(own_BT, fact(facts, "tokens")))


class FoldedRewards(Stage):
    """Each turn's process reward once, at the turn's end.

    Without turn ids every run of active columns is a turn; a turn with a gap inside is folded once per run.
    """

    slot = "actor.token_rewards_as_adv"
    reads = ("token_rewards", "loss_mask", "turn_ids?", "facts")
    writes = ("folded",)

    def forward(self, own_BT, mask_BT, turn_ids_BT, facts):
        tokens = fact(facts, "tokens")
        aligned_BT = roll_left(own_BT, tokens)
        goes_on_BT = shift_left(mask_BT) > 0
        if turn_ids_BT is not None:
            ids_BT = align_turn_ids(turn_ids_BT, tokens)
            goes_on_BT = goes_on_BT & (ids_BT == shift_left(ids_BT, -1))
        return torch.where((mask_BT > 0) & ~goes_on_BT, aligned_BT, 0.0)


def align_turn_ids(turn_ids_BT, tokens):
    """Turn ids of the next token; the caller's last column has none."""
    inside_T = columns(turn_ids_BT) < tokens - 1
    return torch.where(inside_T, shift_left(turn_ids_BT, -1), -1)
