"""Takes the batch's masks; gives row lengths, generated tokens, the aligned loss mask and truncation.

Next-token alignment: the choice of token t+1 is made at column t. `actions` are the columns where an advantage can
see something (t <= T-2); `loss_mask` is the trainer's mask, which under default rules wraps (semantics.md, rule 3).
"""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.select import columns, fact, shift_left


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
        lengths_B = set_BW.sum(1, dtype=torch.int32)
        return lengths_B, (hole_BW.amax(1) != 0) | (end_BW.amax(1) != lengths_B)


class GeneratedTokens(Stage):
    """1.0 on each generated token's own position, and how many a row has."""

    reads = ("loss_mask",)
    writes = ("generated", "n_generated")

    def forward(self, loss_mask_BT):
        generated_BT = (loss_mask_BT != 0).to(torch.float32)
        return generated_BT, generated_BT.sum(1)


class Alignment(Stage):
    """The actions, and the loss mask rolled by one: a generated first token makes the last column active.

    `n_actions` and `n_active` count the two.
    """

    reads = ("generated", "n_generated", "facts")
    writes = ("actions", "loss_mask", "n_actions", "n_active")
    flags = ("first_token_generated",)

    def forward(self, generated_BT, n_generated_B, facts):
        actions_BT, first_B = shift_left(generated_BT), generated_BT[:, 0]
        n_actions_B = n_generated_B - first_B
        return *self.mask(actions_BT, n_actions_B, generated_BT, n_generated_B, facts), first_B > 0

    def mask(
        self, actions_BT: Tensor, n_actions_B: Tensor, generated_BT: Tensor, n_generated_B: Tensor, facts: Tensor
    ) -> tuple[Tensor, ...]:
        last_T = columns(generated_BT) == fact(facts, "tokens") - 1
        return actions_BT, torch.where(last_T, generated_BT[:, :1], actions_BT), n_actions_B, n_generated_B.clone()


class Truncation(Stage):
    """1.0 on truncated rows: as given, else the rows that fill the caller's width."""

    reads = ("is_truncated", "lengths", "facts")
    writes = ("is_truncated",)
    flags = ("truncated_by_width",)

    def forward(self, given_B, lengths_B, facts):
        given = fact(facts, "truncation_given") > 0
        full_B = lengths_B == fact(facts, "tokens")
        return torch.where(given, given_B != 0, full_B).to(torch.float32), full_B & ~given
