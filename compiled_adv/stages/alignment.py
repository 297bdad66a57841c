"""Takes the batch's masks; gives row lengths, generated tokens, the aligned loss mask and truncation.

Next-token alignment: the choice of token t+1 is made at column t. `actions` are the columns where an advantage can
see something (t <= T-2); `loss_mask` is the trainer's mask, which under default rules wraps (semantics.md, rule 3).
"""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.select import columns, fact, select, shift_left


class Lengths(Stage):
    """Valid tokens of each row; the attention mask must be a prefix.

    The mask comes as int32 words of four tokens, a byte each: nothing else reads it, and so it is read 16 times faster
    than as float32. A row is a prefix if no word has a hole and its last set byte is at its length.
    """

    reads = ("attention_words",)
    writes = ("lengths",)
    flags = ("attention_not_prefix",)

    def forward(self, words_BW):
        set_BW = (words_BW & 1) + (words_BW >> 8 & 1) + (words_BW >> 16 & 1) + (words_BW >> 24 & 1)
        hole_BW = words_BW >> 8 & ~words_BW & 0x00010101
        end_BW = torch.where(words_BW != 0, columns(words_BW) * 4 + set_BW, 0)
        lengths_B = set_BW.sum(1)
        return lengths_B, (hole_BW.amax(1) != 0) | (end_BW.amax(1) != lengths_B)


class GeneratedTokens(Stage):
    """1.0 on each generated token's own position, and how many a row has."""

    reads = ("loss_mask", "lengths")
    writes = ("generated", "n_generated")
    flags = ("loss_mask_outside_attention",)

    def forward(self, loss_mask_BT, lengths_B):
        generated_BT = (loss_mask_BT != 0).to(torch.float32)
        outside_BT = select((columns(loss_mask_BT) >= lengths_B[:, None]).to(torch.float32), generated_BT)
        return generated_BT, generated_BT.sum(1), outside_BT.sum(1) > 0


class Alignment(Stage):
    """The actions, and the loss mask rolled by one: a generated first token makes the last column active."""

    reads = ("generated", "facts")
    writes = ("actions", "loss_mask")
    flags = ("first_token_generated",)

    def forward(self, generated_BT, facts):
        actions_BT = shift_left(generated_BT)
        return actions_BT, self.mask(actions_BT, generated_BT, facts), generated_BT[:, 0] > 0

    def mask(self, actions_BT: Tensor, generated_BT: Tensor, facts: Tensor) -> Tensor:
        last_T = columns(generated_BT) == fact(facts, "tokens") - 1
        return torch.where(last_T, generated_BT[:, :1], actions_BT)


class CountActions(Stage):
    """Active columns of each row: a row's length in tokens for lambda functions."""

    reads = ("loss_mask",)
    writes = ("n_actions",)

    def forward(self, mask_BT):
        return mask_BT.sum(1)


class Truncation(Stage):
    """1.0 on truncated rows: as given, else the rows that fill the caller's width."""

    reads = ("is_truncated", "lengths", "facts")
    writes = ("is_truncated",)
    flags = ("truncated_by_width",)

    def forward(self, given_B, lengths_B, facts):
        given = fact(facts, "truncation_given") > 0
        full_B = lengths_B == fact(facts, "tokens")
        return torch.where(given, given_B != 0, full_B).to(torch.float32), full_B & ~given
