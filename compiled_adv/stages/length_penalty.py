"""Takes raw rewards and generated lengths; gives checked rewards, less the penalty for overlong responses."""

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.select import finite


class RawRewards(Stage):
    """Every reward must be a number."""

    reads = ("rewards",)
    flags = ("nonfinite_rewards",)

    def forward(self, rewards_B):
        return ~finite(rewards_B)


class LengthPenalty(Stage):
    """A linear penalty over the last `overlong_tokens` of the budget `max_new_tokens`, without a floor."""

    slot = "actor.overlong_reward_penalty"
    reads = ("rewards", "n_generated")
    writes = ("rewards",)
    flags = ("uncapped_length_penalty", "nonfinite_result")

    overlong_tokens: int
    overlong_penalty_factor: float
    max_new_tokens: int

    def forward(self, rewards_B, n_generated_B):
        exceed_B = n_generated_B.to(torch.float64) - (self.max_new_tokens - self.overlong_tokens)
        penalty_B = (-exceed_B / self.overlong_tokens * self.overlong_penalty_factor).clamp(max=0.0)
        beyond_B = penalty_B < -abs(self.overlong_penalty_factor)
        rewards_B = (rewards_B + self.limit(penalty_B)).to(torch.float32)
        return rewards_B, beyond_B, ~finite(rewards_B)

    def limit(self, penalty_B: Tensor) -> Tensor:
        return penalty_B
