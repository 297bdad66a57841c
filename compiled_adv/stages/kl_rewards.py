"""Takes aligned log probabilities; gives the KL penalty per token, and the part of it that estimators read.

Estimators k1, k2, k3: http://joschu.net/blog/kl-approx.html
"""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.select import columns, fact, last_valid

LIMIT = 10.0


class KLRewards(Stage):
    """-kl_ctl * clamp(k, -10, 10); without a reference its log probabilities are zeros."""

    slot = "actor.kl_ctl"
    reads = ("logprobs", "ref_logp?", "actions")
    writes = ("kl_rewards",)
    flags = ("kl_without_reference",)

    kl_ctl: float
    estimator: str

    def forward(self, logprobs_BT, ref_logp_BT, actions_BT):
        kl_BT = self.divergence(logprobs_BT, ref_logp_BT).clamp(-LIMIT, LIMIT)
        unanchored_B = (actions_BT.sum(1) > 0) & (ref_logp_BT is None and self.kl_ctl != 0)
        return -self.kl_ctl * kl_BT, unanchored_B

    def divergence(self, logprobs_BT: Tensor, ref_logp_BT: Tensor | None) -> Tensor:
        d_BT = logprobs_BT if ref_logp_BT is None else logprobs_BT - ref_logp_BT
        if self.estimator == "k1":
            return d_BT
        if self.estimator == "k2":
            return d_BT * d_BT / 2
        d_BT = d_BT.clamp(-2 * LIMIT, 2 * LIMIT)  # beyond it k3 is over the limit, and exp would overflow
        return torch.exp(-d_BT) - 1 + d_BT


class KLInAdvantage(Stage):
    """The KL reward without the last valid token's, which no action earned."""

    slot = "actor.kl_ctl"
    reads = ("kl_rewards", "lengths", "facts")
    writes = ("kl",)

    def forward(self, kl_rewards_BT, lengths_B, facts):
        last_B = last_valid(lengths_B, fact(facts, "tokens"))
        return torch.where(columns(kl_rewards_BT) == last_B[:, None], 0.0, kl_rewards_BT)
