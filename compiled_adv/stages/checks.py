"""Takes channels as they came; gives one flag for each thing that must hold on every active slot.

A check says where it is violated, as numbers [B,T]: 0 where all is well, positive or NaN where it is not. A row is
flagged if their sum is not 0. So several checks can be summed and read in one pass (passes/one_check.py).
"""

from typing import ClassVar

import torch
from torch import Tensor

from compiled_adv.stage import Stage
from compiled_adv.stages.forms import some
from compiled_adv.stages.select import columns, fact, finite, select, shift_left


class Check(Stage):
    """A property of one [B,T] channel, `of`."""

    of: ClassVar[str]

    def violations(self, *channels, **_) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no violations")

    def forward(self, *channels):
        return some(self.violations(*channels))


def unless_finite(mask_BT: Tensor, x_BT: Tensor) -> Tensor:
    """NaN on set slots that hold inf or NaN (0 * inf and 0 * NaN are NaN), else 0."""
    return select(mask_BT, x_BT) * 0.0


def where_true(condition_BT: Tensor) -> Tensor:
    return torch.where(condition_BT, 1.0, 0.0)


class OneCheck(Stage):
    """Several checks read in one pass. Its flag says that one of them failed; the eager path says which.

    The last channel, if it is to be `held`, is passed on: what reads it then waits for the checks, and so they are
    computed where their channels are read first.
    """

    checks: tuple[tuple[Check, tuple[int, ...]], ...]  # a check, and which of our channels it reads (-1: absent)
    held: bool

    def forward(self, *channels):
        first, *others = (check.violations(*(None if i < 0 else channels[i] for i in at)) for check, at in self.checks)
        failed_B = some(sum(others, first))
        return (torch.where(failed_B, float("nan"), channels[-1]), failed_B) if self.held else failed_B


class InsideAttention(Check):
    """Tokens are generated inside attention_mask; the first token, which may have wrapped, is FirstToken's own."""

    of = "loss_mask"
    reads = ("loss_mask", "lengths", "facts")
    flags = ("loss_mask_outside_attention",)

    def violations(self, mask_BT, lengths_B, facts):
        column_T = columns(mask_BT)
        # positive where a column is beyond the row's last action and before the last column
        outside_BT = torch.minimum(column_T - (lengths_B[:, None] - 2), fact(facts, "tokens") - 1 - column_T)
        return select(outside_BT.to(torch.float32), mask_BT)


class FiniteLogprobs(Check):
    """Of generated tokens: after alignment the same ones, but for a first token that strict rules shift out."""

    of = "behavior_logprobs"
    reads = ("behavior_logprobs",)
    flags = ("nonfinite_logprobs",)

    def violations(self, logprobs_BT):
        return logprobs_BT * 0.0


class FirstToken(Stage):
    """The same for the first column's own slots, which alignment wraps or shifts out."""

    reads = ("loss_mask", "lengths", "logprobs", "token_rewards?")
    flags = ("loss_mask_outside_attention", "nonfinite_logprobs", "nonfinite_token_rewards")

    def forward(self, own_mask_BT, lengths_B, logprobs_BT, token_rewards_BT):
        first_B = own_mask_BT[:, 0] != 0
        rewards_B = torch.zeros_like(logprobs_BT[:, 0]) if token_rewards_BT is None else token_rewards_BT[:, 0]
        return first_B & (lengths_B == 0), first_B & ~finite(logprobs_BT[:, 0]), first_B & ~finite(rewards_B)


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
    """Of generated tokens: after alignment the same ones, but for a first token that strict rules shift out."""

    of = "aligned_rewards"
    reads = ("aligned_rewards",)
    flags = ("nonfinite_token_rewards",)

    def violations(self, rewards_BT):
        return rewards_BT * 0.0


class UniformTurns(Check):
    """Neighbouring generated tokens of one turn carry one process reward, where it is to be folded."""

    slot = "actor.token_rewards_as_adv"
    of = "token_rewards"
    reads = ("token_rewards", "loss_mask", "turn_ids?", "is_truncated")
    flags = ("nonuniform_folded_rewards",)

    mask_no_eos: bool

    def violations(self, own_BT, own_mask_BT, turn_ids_BT, is_truncated_B):
        neighbours_BT = (own_mask_BT != 0) & (shift_left(own_mask_BT) != 0)
        if turn_ids_BT is not None:
            neighbours_BT = neighbours_BT & (turn_ids_BT == shift_left(turn_ids_BT, -1))
        differs_BT = where_true(neighbours_BT & (own_BT != shift_left(own_BT)))
        return torch.where(is_truncated_B[:, None] > 0, 0.0, differs_BT) if self.mask_no_eos else differs_BT


class TurnRange(Check):
    """Active turn ids lie in [0, tokens)."""

    slot = "actor.gae_timestep_unit"
    of = "aligned_turn_ids"
    reads = ("loss_mask", "aligned_turn_ids", "facts")
    flags = ("turn_id_out_of_range",)

    def violations(self, mask_BT, ids_BT, facts):
        ids_BT = ids_BT.to(torch.float32)  # rounding keeps them on their side of 0 and of the number of tokens
        return select(mask_BT, torch.maximum(-ids_BT, ids_BT - (fact(facts, "tokens") - 1)).clamp(min=0))


class WeightRange(Check):
    """process_weighted needs process rewards in [0, 1]; inactive ones are 0."""

    slot = "actor.advantage.process_adv_shaping"
    of = "direct"
    reads = ("direct",)
    flags = ("process_reward_out_of_range",)

    def violations(self, direct_BT):
        return where_true((direct_BT < 0) | (direct_BT > 1))


class FiniteResult(Check):
    """Nothing overflowed float32. Total rewards that overflow on an action show in its advantage."""

    of = "advantages"
    reads = ("advantages", "returns")
    flags = ("nonfinite_result",)

    def violations(self, advantages_BT, returns_BT):
        return advantages_BT * 0.0 + returns_BT * 0.0
