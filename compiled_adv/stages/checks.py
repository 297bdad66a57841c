"""Takes channels as they came; gives one flag for each thing that must hold on every active slot.

A check says where it is violated, as numbers [B,T]: 0 where all is well, positive or NaN where it is not. A row is
flagged if their sum is not 0. So several checks can be summed and read in one pass (passes/one_check.py).
"""

from typing import ClassVar

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.select import columns, fact, select, shift_left


class Check(Stage):
    """A property of one [B,T] channel, `of`."""

    of: ClassVar[str]

    def violations(self, *channels, **_) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no violations")

    def forward(self, *channels):
        return self.violations(*channels).sum(1) != 0


def unless_finite(mask_BT: Tensor, x_BT: Tensor) -> Tensor:
    """NaN on set slots that hold inf or NaN (0 * inf and 0 * NaN are NaN), else 0."""
    return select(mask_BT, x_BT) * 0.0


def where_true(condition_BT: Tensor) -> Tensor:
    return torch.where(condition_BT, 1.0, 0.0)


class OneCheck(Stage):
    """Several checks read in one pass. Its flag says that one of them failed; the eager path says which."""

    flags = ("invalid",)

    checks: tuple[tuple[Check, tuple[int, ...]], ...]  # a check, and which of our channels it reads (-1: absent)

    def forward(self, *channels):
        first, *others = (check.violations(*(None if i < 0 else channels[i] for i in at)) for check, at in self.checks)
        return sum(others, first).sum(1) != 0


class InsideAttention(Check):
    """Tokens are generated inside attention_mask."""

    of = "generated"
    reads = ("generated", "lengths")
    flags = ("loss_mask_outside_attention",)

    def violations(self, generated_BT, lengths_B):
        return torch.where(columns(generated_BT) >= lengths_B[:, None], generated_BT, 0.0)


class FiniteLogprobs(Check):
    """Of generated tokens."""

    of = "logprobs"
    reads = ("generated", "logprobs")
    flags = ("nonfinite_logprobs",)

    def violations(self, generated_BT, logprobs_BT):
        return unless_finite(generated_BT, logprobs_BT)


class FiniteProxLogp(Check):
    """On active columns."""

    slot = "actor.recompute_logprob"
    of = "prox_logp"
    reads = ("loss_mask", "prox_logp")
    flags = ("nonfinite_prox_logp",)

    def violations(self, mask_BT, prox_logp_BT):
        return unless_finite(mask_BT, prox_logp_BT)


class FiniteRefLogp(Check):
    """On active columns."""

    of = "ref_logp"
    reads = ("loss_mask", "ref_logp")
    flags = ("nonfinite_ref_logp",)

    def violations(self, mask_BT, ref_logp_BT):
        return unless_finite(mask_BT, ref_logp_BT)


class FiniteValues(Check):
    """On active columns; the bootstrap slot of truncated rows is BootstrapValues' own."""

    of = "values"
    reads = ("loss_mask", "values")
    flags = ("nonfinite_values",)

    def violations(self, mask_BT, values_BT):
        return unless_finite(mask_BT, values_BT)


class FiniteTokenRewards(Check):
    """Of generated tokens."""

    slot = "actor.token_rewards_as_adv"
    of = "token_rewards"
    reads = ("generated", "token_rewards")
    flags = ("nonfinite_token_rewards",)

    def violations(self, generated_BT, token_rewards_BT):
        return unless_finite(generated_BT, token_rewards_BT)


class UniformTurns(Check):
    """Neighbouring generated tokens of one turn carry one process reward, where it is to be folded."""

    slot = "actor.token_rewards_as_adv"
    of = "token_rewards"
    reads = ("generated", "token_rewards", "turn_ids?")
    flags = ("nonuniform_folded_rewards",)

    def violations(self, generated_BT, own_BT, turn_ids_BT):
        neighbours_BT = (generated_BT > 0) & (shift_left(generated_BT) > 0)
        if turn_ids_BT is not None:
            neighbours_BT = neighbours_BT & (turn_ids_BT == shift_left(turn_ids_BT, -1))
        return where_true(neighbours_BT & (own_BT != shift_left(own_BT)))


class TurnRange(Check):
    """Active turn ids lie in [0, tokens)."""

    slot = "actor.gae_timestep_unit"
    of = "aligned_turn_ids"
    reads = ("loss_mask", "aligned_turn_ids", "facts")
    flags = ("turn_id_out_of_range",)

    def violations(self, mask_BT, ids_BT, facts):
        return select(mask_BT, where_true((ids_BT < 0) | (ids_BT >= fact(facts, "tokens"))))


class WeightRange(Check):
    """process_weighted needs process rewards in [0, 1]; inactive ones are 0."""

    slot = "actor.advantage.process_adv_shaping"
    of = "direct"
    reads = ("direct",)
    flags = ("process_reward_out_of_range",)

    def violations(self, direct_BT):
        return where_true((direct_BT < 0) | (direct_BT > 1))


class FiniteResult(Check):
    """Nothing overflowed float32."""

    of = "advantages"
    reads = ("advantages", "returns", "tot_rewards")
    flags = ("nonfinite_result",)

    def violations(self, advantages_BT, returns_BT, tot_rewards_BT):
        # each by itself: two large numbers may overflow in a sum that nobody asked for
        return advantages_BT * 0.0 + returns_BT * 0.0 + tot_rewards_BT * 0.0
