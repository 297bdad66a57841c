"""Takes scores, KL, folded rewards, values and masks; gives advantages, returns and total rewards.

Token GAE: https://arxiv.org/abs/1506.02438 over generated tokens. Turn GAE: one step per turn. Both are the masked
two-state recurrence of kernels/. Source: semantics.md, "token GAE" and "turn GAE".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.stage import Stage
from compiled_adv.stages.forms import clean, either, put
from compiled_adv.stages.process_rewards import align_turn_ids
from compiled_adv.stages.select import at_column, columns, fact, finite, last_valid, select


class PlaceOutcome(Stage):
    """The score at the column that chose the row's last valid token, whether or not that token was generated."""

    slot = "actor.mask_no_eos_with_zero"
    reads = ("scores", "lengths", "actions", "is_truncated")
    writes = ("outcome",)
    flags = ("outcome_on_masked_token", "nonfinite_result")

    mask_no_eos: bool

    def forward(self, scores_B, lengths_B, actions_BT, is_truncated_B):
        last_B = (lengths_B - 2).clamp(min=0)
        kept_B = ~((is_truncated_B > 0) & self.mask_no_eos)
        lost_B = kept_B & (at_column(actions_BT, last_B) == 0)
        column_B = self.column(last_B, actions_BT)
        score_B = torch.where(kept_B, scores_B.to(torch.float32), 0.0)
        return put(score_B, column_B, actions_BT), lost_B, ~finite(score_B) & (column_B >= 0)

    def column(self, last_B: Tensor, actions_BT: Tensor) -> Tensor:
        return last_B


class OutcomeEverywhere(Stage):
    """Token GAE where it is a broadcast: nothing but the outcome, undiminished, on every column up to its own."""

    slot = "actor.advantage.estimator"
    reads = ("scores", "lengths", "actions", "is_truncated")
    writes = ("advantages", "returns")

    place: PlaceOutcome

    def forward(self, scores_B, lengths_B, actions_BT, is_truncated_B):
        column_B = self.place.column((lengths_B - 2).clamp(min=0), actions_BT)
        seen_B = (column_B >= 0) & (at_column(actions_BT, column_B.clamp(min=0)) > 0)
        seen_B = seen_B & ~((is_truncated_B > 0) & self.place.mask_no_eos)
        score_B = torch.where(seen_B, scores_B.to(torch.float32), 0.0)
        advantages_BT = torch.where(columns(actions_BT) <= column_B[:, None], score_B[:, None], 0.0)
        return advantages_BT, advantages_BT.clone()


class BootstrapValues(Stage):
    """The value after each row's last valid token."""

    reads = ("values", "lengths", "is_truncated", "facts")
    writes = ("bootstrap_values",)
    flags = ("nonfinite_values",)

    def forward(self, values_BT, lengths_B, is_truncated_B, facts):
        bootstrap_B = at_column(values_BT, last_valid(lengths_B, fact(facts, "tokens")))
        bad_B = (is_truncated_B > 0) & ~finite(bootstrap_B)
        return clean(bootstrap_B), bad_B


class AlignTurnIds(Stage):
    """Turn ids of the next token."""

    reads = ("turn_ids",)
    writes = ("aligned_turn_ids",)

    def forward(self, turn_ids_BT):
        return align_turn_ids(turn_ids_BT)


class TurnCounts(Stage):
    """Number of turns of each row; ids of active tokens must not go back."""

    slot = "actor.gae_timestep_unit"
    reads = ("aligned_turn_ids", "loss_mask")
    writes = ("turn_counts",)
    flags = ("turn_ids_decrease",)

    def forward(self, ids_BT, mask_BT):
        counts_B, ordered_B = kernels.turn_counts(ids_BT, mask_BT)
        return counts_B, ~ordered_B


class LambdaByLength(Stage):
    """A built-in lambda function of each row's length in the estimator's unit."""

    slot = "actor.gae_lambda"
    reads = ("n_active", "turn_counts?")
    writes = ("gae_lambda",)
    flags = ("nonfinite_lambda",)

    fn: Callable[..., Tensor]
    kwargs: tuple[tuple[str, Any], ...]
    unit: str

    def forward(self, n_active_B, turn_counts_B):
        tokens_B = n_active_B.to(torch.int64)
        turns_B = torch.zeros_like(tokens_B) if turn_counts_B is None else turn_counts_B.to(torch.int64)
        context = {
            "effective_token_lengths": tokens_B,
            "turn_counts": turns_B,
            "timestep_lengths": turns_B if self.unit == "turn" else tokens_B,
        }
        lambda_B = self.fn(context, **dict(self.kwargs)).to(torch.float64)
        return lambda_B, ~finite(lambda_B)


class ConstantLambda(Stage):
    """The same lambda for every row, float64: rounded to float32, 0.99999 ** 100_000 is off by a thousandth."""

    slot = "actor.gae_lambda"
    reads = ("lengths",)
    writes = ("gae_lambda",)

    value: float

    def forward(self, lengths_B):
        return torch.full_like(lengths_B, self.value, dtype=torch.float64)


class TotalRewards(Stage):
    """All rewards of each column: outcome, KL and folded process rewards."""

    reads = ("outcome", "kl?", "folded?")
    writes = ("tot_rewards",)

    def forward(self, outcome_BT, kl_BT, folded_BT):
        if kl_BT is None and folded_BT is None:
            return outcome_BT.clone()
        total_BT = outcome_BT if kl_BT is None else outcome_BT + kl_BT
        return total_BT if folded_BT is None else total_BT + folded_BT


class TokenGAE(Stage):
    """One step per active column; every other column shows the state carried back to it."""

    slot = "actor.advantage.estimator"
    reads = ("tot_rewards", "values?", "bootstrap_values?", "loss_mask", "is_truncated", "gae_lambda", "facts")
    writes = ("advantages", "returns")

    discount: float

    def forward(self, rewards_BT, values_BT, bootstrap_B, mask_BT, is_truncated_B, lambda_B, facts):
        after_B = bootstrap(bootstrap_B, is_truncated_B)
        end = fact(facts, "tokens") - 1  # a mask that wrapped into the last column is no step
        advantages_BT, _ = kernels.backward_recurrence(
            rewards_BT, values_BT, mask_BT, after_B, self.discount, lambda_B, end, False
        )
        returns_BT = advantages_BT.clone() if values_BT is None else advantages_BT + clean(values_BT)
        return advantages_BT, returns_BT


class TurnGAE(Stage):
    """One step per turn, shared by the turn's tokens; KL enters advantages token by token and never the returns.

    A turn's reward is the sum over its active columns, its value that of its first one.
    """

    slot = "actor.advantage.estimator"
    reads = (
        "outcome",
        "folded?",
        "kl?",
        "values?",
        "bootstrap_values?",
        "turn_ids",
        "loss_mask",
        "is_truncated",
        "gae_lambda",
        "facts",
    )
    writes = ("advantages", "returns")
    flags = ("turn_ids_decrease", "turn_id_out_of_range")

    discount: float

    def forward(
        self,
        outcome_BT,
        folded_BT,
        kl_BT,
        values_BT,
        bootstrap_B,
        turn_ids_BT,
        mask_BT,
        is_truncated_B,
        lambda_B,
        facts,
    ):
        rewards_BT = outcome_BT if folded_BT is None else outcome_BT + folded_BT
        after_B, tokens = bootstrap(bootstrap_B, is_truncated_B), fact(facts, "tokens")
        running_BT, value_BT, ordered_B, inside_B = kernels.turn_recurrence(
            rewards_BT, values_BT, turn_ids_BT, mask_BT, after_B, self.discount, lambda_B, tokens
        )
        run_BT = select(mask_BT, running_BT)
        if values_BT is None:
            returns_BT = run_BT.clone()
        else:
            returns_BT = either(mask_BT, running_BT + value_BT, clean(values_BT))
        advantages_BT = run_BT if kl_BT is None else run_BT + kl_BT
        return advantages_BT, returns_BT, ~ordered_B, ~inside_B


def bootstrap(bootstrap_B: Tensor | None, is_truncated_B: Tensor) -> Tensor:
    """The value after the last token, for rows that were cut."""
    return torch.zeros_like(is_truncated_B) if bootstrap_B is None else select(is_truncated_B, bootstrap_B)
