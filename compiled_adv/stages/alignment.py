"""Takes the batch's masks; gives row lengths, generated tokens, the aligned loss mask and truncation.

Next-token alignment: the choice of token t+1 is made at column t. `actions` are the columns where an advantage can
see something (t <= T-2); `loss_mask` is the trainer's mask, which under default rules wraps (semantics.md, rule 3).
"""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.forms import as_mask, prefix, roll_left
from compiled_adv.stages.select import fact, shift_left


class Lengths(Stage):
    """Valid tokens of each row; the attention mask must be a prefix.

    The mask comes as int32 words of four tokens, a byte each: nothing else reads it, and so it is read 16 times faster
    than as float32.
    """

    reads = ("attention_words",)
    writes = ("lengths",)
    flags = ("attention_not_prefix",)

    def forward(self, words_BW):
        return prefix(words_BW)


class CountGenerated(Stage):
    """Generated tokens of each row."""

    reads = ("loss_mask",)
    writes = ("n_generated",)

    def forward(self, own_mask_BT):
        return as_mask(own_mask_BT).sum(1)


class Alignment(Stage):
    """The actions, and the loss mask rolled by one: a generated first token makes the last column active.

    `n_actions` and `n_active` count the two. Like everything aligned, they are made from the batch's own tensor: to
    shift one that was computed would need it in memory first.
    """

    reads = ("loss_mask", "n_generated", "facts")
    writes = ("actions", "loss_mask", "n_actions", "n_active")
    flags = ("first_token_generated",)

    def forward(self, own_mask_BT, n_generated_B, facts):
        first_B = as_mask(own_mask_BT[:, 0])
        n_actions_B = n_generated_B - first_B
        actions_BT = as_mask(shift_left(own_mask_BT))
        n_active_B = self.n_active(n_actions_B, first_B)
        return actions_BT, self.mask(own_mask_BT, facts), n_actions_B, n_active_B, first_B > 0

    def mask(self, own_mask_BT: Tensor, facts: Tensor) -> Tensor:
        return as_mask(roll_left(own_mask_BT, fact(facts, "tokens")))

    def n_active(self, n_actions_B: Tensor, first_B: Tensor) -> Tensor:
        return n_actions_B + first_B


class Truncation(Stage):
    """1.0 on truncated rows: as given, else the rows that fill the caller's width."""

    reads = ("is_truncated", "lengths", "facts")
    writes = ("is_truncated",)
    flags = ("truncated_by_width",)

    def forward(self, given_B, lengths_B, facts):
        given = fact(facts, "truncation_given") > 0
        full_B = lengths_B == fact(facts, "tokens")
        return torch.where(given, given_B != 0, full_B).to(torch.float32), full_B & ~given
