"""Takes log probabilities as they came; gives them next-token aligned and zero outside the loss mask."""

from compiled_adv.stage import Stage
from compiled_adv.stages.select import bad_rows, fact, roll_left, select


class BehaviorLogprobs(Stage):
    """The rollout's own log probabilities, rolled by one."""

    reads = ("logprobs", "generated", "loss_mask", "facts")
    writes = ("behavior_logprobs",)
    flags = ("nonfinite_logprobs",)

    def forward(self, logprobs_BT, generated_BT, mask_BT, facts):
        own_BT = select(generated_BT, logprobs_BT)
        return select(mask_BT, roll_left(own_BT, fact(facts, "tokens"))), bad_rows(own_BT)


class ProximalLogprobs(Stage):
    """The recomputed log probabilities, which are next-token aligned already."""

    slot = "actor.recompute_logprob"
    reads = ("prox_logp", "loss_mask")
    writes = ("prox_logp",)
    flags = ("nonfinite_prox_logp",)

    def forward(self, prox_logp_BT, mask_BT):
        prox_logp_BT = select(mask_BT, prox_logp_BT)
        return prox_logp_BT, bad_rows(prox_logp_BT)


class ReferenceLogprobs(Stage):
    """The reference's log probabilities, next-token aligned already."""

    reads = ("ref_logp", "loss_mask")
    writes = ("ref_logp",)
    flags = ("nonfinite_ref_logp",)

    def forward(self, ref_logp_BT, mask_BT):
        ref_logp_BT = select(mask_BT, ref_logp_BT)
        return ref_logp_BT, bad_rows(ref_logp_BT)
