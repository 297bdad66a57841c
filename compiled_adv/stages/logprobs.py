"""Takes log probabilities as they came; gives them next-token aligned and zero outside the loss mask."""

from compiled_adv.stage import Stage
from compiled_adv.stages.forms import copy, roll_left
from compiled_adv.stages.select import fact, select


class BehaviorLogprobs(Stage):
    """The rollout's own log probabilities, rolled by one."""

    reads = ("logprobs", "loss_mask", "facts")
    writes = ("behavior_logprobs",)

    def forward(self, logprobs_BT, mask_BT, facts):
        return select(mask_BT, roll_left(logprobs_BT, fact(facts, "tokens")))


class ProximalLogprobs(Stage):
    """The recomputed log probabilities, which are next-token aligned already."""

    slot = "actor.recompute_logprob"
    reads = ("prox_logp", "loss_mask")
    writes = ("prox_logp",)

    def forward(self, prox_logp_BT, mask_BT):
        return select(mask_BT, prox_logp_BT)


class CopyLogprobs(Stage):
    """The same numbers as a tensor of their own, for a second output."""

    reads = ("logprobs", "lengths")
    writes = ("prox_logp",)

    def forward(self, logprobs_BT, lengths_B):
        return copy(logprobs_BT, lengths_B)


class ReferenceLogprobs(Stage):
    """The reference's log probabilities, next-token aligned already."""

    reads = ("ref_logp", "loss_mask")
    writes = ("ref_logp",)

    def forward(self, ref_logp_BT, mask_BT):
        return select(mask_BT, ref_logp_BT)
