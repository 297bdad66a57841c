"""Takes the flags that a computation raised on rows; gives the named error, or the named warnings.

This table is the one place where a flag gets its meaning; every backend raises the same flags.
"""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_adv.errors import (
    AdvantageWarning,
    BadMask,
    BadTurnIds,
    BatchError,
    NonFinite,
    OutOfRange,
    RowsDiffer,
)

# flag -> (error, what is wrong, the config key or batch field, what would work). The first in this order is raised.
ERRORS: dict[str, tuple[type[BatchError], str, str, str]] = {
    "attention_not_prefix": (
        BadMask,
        "attention_mask is not a prefix of the row",
        "batch['attention_mask']",
        "right-padded rows without holes",
    ),
    "loss_mask_outside_attention": (
        BadMask,
        "loss_mask is set outside attention_mask",
        "batch['loss_mask']",
        "loss_mask * attention_mask",
    ),
    "nonfinite_rewards": (NonFinite, "a reward is not finite", "batch['rewards']", "drop the row, or give it a number"),
    "nonfinite_logprobs": (
        NonFinite,
        "logprobs of a generated token is not finite",
        "batch['logprobs'] (alignment)",
        "finite log probabilities where loss_mask is set",
    ),
    "nonfinite_prox_logp": (
        NonFinite,
        "prox_logp of an active token is not finite",
        "batch['prox_logp'] (recompute_logprob)",
        "finite log probabilities where the rolled loss_mask is set",
    ),
    "nonfinite_ref_logp": (
        NonFinite,
        "ref_logp of an active token is not finite",
        "batch['ref_logp'] (KL)",
        "finite log probabilities where the rolled loss_mask is set",
    ),
    "nonfinite_values": (
        NonFinite,
        "a value that the estimator reads is not finite",
        "batch['values'] (estimator)",
        "finite values on active tokens, and at the last valid token of truncated rows",
    ),
    "nonfinite_token_rewards": (
        NonFinite,
        "token_rewards of a generated token is not finite",
        "batch['token_rewards'] (process rewards)",
        "finite process rewards where loss_mask is set",
    ),
    "turn_id_out_of_range": (
        BadTurnIds,
        "the turn id of an active token is negative or not below the number of tokens",
        "batch['turn_ids']",
        "turns numbered from 0 on generated tokens; a row whose first token is generated has no turn for it",
    ),
    "turn_ids_decrease": (
        BadTurnIds,
        "turn ids go back within a row",
        "batch['turn_ids']",
        "turns numbered in the order of their tokens",
    ),
    "nonuniform_folded_rewards": (
        RowsDiffer,
        "tokens of one turn carry different process rewards",
        "batch['token_rewards'] (actor.token_rewards_as_adv: false)",
        "the turn's whole reward on each of its tokens",
    ),
    "process_reward_out_of_range": (
        OutOfRange,
        "process_weighted needs process rewards in [0, 1]",
        "batch['token_rewards'] (actor.advantage.process_adv_shaping)",
        "rewards rescaled to [0, 1]",
    ),
    "split_rows_differ": (
        RowsDiffer,
        "rows of one logical rollout carry different rewards and it has no reference",
        "batch['rewards'] (actor.reward_norm)",
        "one reference per logical rollout in rollout_group.rewards",
    ),
    "nonfinite_lambda": (NonFinite, "gae_lambda of a row is not finite", "actor.gae_lambda", "a finite lambda"),
    "nonfinite_result": (
        NonFinite,
        "the result overflowed float32",
        "actor.advantage.estimator",
        "rewards, values, discount and gae_lambda of moderate size",
    ),
}

WARNINGS: dict[str, str] = {
    "outcome_on_masked_token": "the outcome sits on a token that no advantage sees: it does not train these rows",
    "first_token_generated": "the first token is generated: the rolled mask makes the last column active",
    "truncated_by_width": "no is_truncated: rows that fill the padded width count as truncated",
    "rows_outside_groups": "rows beyond the last full group have no group: they are divided by eps",
    "kl_without_reference": "kl_ctl is set but there is no ref_logp: the log probability itself is the penalty",
    "zero_spread_groups": "all scores of a group are equal: its rows carry no signal",
    "uncapped_length_penalty": "the length penalty goes beyond overlong_penalty_factor",
    "loo_alone": "leave-one-out over a batch of one leaves the raw score",
    "discarded_rows_counted": "truncated rows lose their outcome but enter the reward statistics",
    "weighted_flip": "process_weighted turned negative advantages positive",
}


def raise_errors(flags: Mapping[str, list[int]]) -> None:
    """The first error among the flags, if there is one."""
    for name, (error, what, at, hint) in ERRORS.items():
        if rows := flags.get(name):
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            raise error(what, at=at, found=f"rows {rows[:8]}{more}", hint=hint)


def warn(flags: Mapping[str, list[int]], known: set[str]) -> dict[str, list[int]]:
    """The warnings among the flags, by name; a Python warning for each name that is not in `known` yet."""
    found: dict[str, list[int]] = {name: flags[name] for name in WARNINGS if flags.get(name)}
    for name, rows in found.items():
        if name not in known:
            known.add(name)
            text = f"{name}: {WARNINGS[name]} ({len(rows)} rows, first {rows[0]})"
            warnings.warn(text, AdvantageWarning, stacklevel=_callers_level())
    return found


def _callers_level() -> int:
    """The stacklevel, for `warn` above, of the first caller outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        frame, level = frame.f_back, level + 1
    return level


def union(*parts: Mapping[str, Any]) -> dict[str, list[int]]:
    """Flags of several sources as one: the union of the rows of each name."""
    rows: dict[str, set[int]] = {}
    for part in parts:
        for name, found in part.items():
            rows.setdefault(name, set()).update(found)
    return {name: sorted(found) for name, found in rows.items()}
