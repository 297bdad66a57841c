"""Takes aligned log probabilities; gives the KL penalty per token, and the part of it that estimators read.

Estimators k1, k2, k3: http://joschu.net/blog/kl-approx.html
"""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.forms import without
from compiled_adv.stages.select import fact, finite, last_valid

LIMIT = 10.0


class KLRewards(Stage):
    """-kl_ctl * clamp(k, -10, 10); without a reference its log probabilities are zeros."""

    slot = "actor.kl_ctl"
    reads = ("logprobs", "ref_logp?", "n_actions")
    writes = ("kl_rewards",)
    flags = ("kl_without_reference", "nonfinite_result")

    kl_ctl: float
    estimator: str

    def forward(self, logprobs_BT, ref_logp_BT, n_actions_B):
        kl_BT = self.divergence(logprobs_BT, ref_logp_BT).clamp(-LIMIT, LIMIT)
        unanchored_B = torch.zeros_like(n_actions_B, dtype=torch.bool)
        if ref_logp_BT is None and self.kl_ctl != 0:
            unanchored_B = n_actions_B > 0
        kl_rewards_BT = -self.kl_ctl * kl_BT
        fits = abs(self.kl_ctl) * LIMIT <= torch.finfo(torch.float32).max
        return kl_rewards_BT, unanchored_B, torch.zeros_like(unanchored_B) if fits else (~finite(kl_rewards_BT)).any(1)

    def divergence(self, logprobs_BT: Tensor, ref_logp_BT: Tensor | None) -> Tensor:
        d_BT = logprobs_BT if ref_logp_BT is None else logprobs_BT - ref_logp_BT
        if self.estimator == "k1":
            return d_BT
        if self.estimator == "k2":
            return d_BT * d_BT / 2
        d_BT = d_BT.clamp(-2 * LIMIT, 2 * LIMIT)  # beyond it k3 is over the limit, and exp would overflow
        return torch.exp(-d_BT) - 1 + d_BT


class NoKLRewards(Stage):
    """kl_ctl 0: no penalty anywhere."""

    slot = "actor.kl_ctl"
    reads = ("logprobs", "n_actions")
    writes = ("kl_rewards",)
    flags = KLRewards.flags

    def forward(self, logprobs_BT, n_actions_B):
        no_row_B = torch.zeros_like(n_actions_B, dtype=torch.bool)
        return torch.zeros_like(logprobs_BT), no_row_B, no_row_B.clone()


class KLInAdvantage(Stage):
    """The KL reward without the last valid token's, which no action earned."""

    slot = "actor.kl_ctl"
    reads = ("kl_rewards", "lengths", "facts")
    writes = ("kl",)

    def forward(self, kl_rewards_BT, lengths_B, facts):
        last_B = last_valid(lengths_B, fact(facts, "tokens"))
        return without(kl_rewards_BT, last_B)
