"""Takes nothing but tensors and metadata; gives the contracts of outcome, process and whole-computation functions.

B rows, T tokens, N logical rollouts. Float32 unless a field says otherwise. Inputs must not be written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from compiled_adv.batch import TrajBatchMeta

# The only names an AdvantageResult may carry in `extras`.
EXTRAS = ("input_token_loss_mask", "is_truncated", "mopd_behavior_logprobs", "prox_logp", "ref_logp")


@dataclass(frozen=True, eq=False)
class OutcomeRewardInputs:
    """What an outcome function gets."""

    data: Mapping[str, Any]  # rollout tensors after the length penalty, read-only
    config: Any  # the actor's configuration
    meta: TrajBatchMeta | None


@dataclass(frozen=True, eq=False)
class OutcomeResult:
    """What an outcome function returns."""

    rewards: Tensor  # [B]
    # [N] one shaped reference per logical rollout, before bias, scaling and clipping
    normalization_rewards: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ProcessAdvantageInputs:
    """What a process function gets; it returns advantages [B,T]."""

    advantages: Tensor  # [B,T] normalised
    token_rewards: Tensor | None  # [B,T] direct ones, aligned and masked
    loss_mask: Tensor  # [B,T]
    config: Any


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What a replacement of the whole computation gets."""

    data: Mapping[str, Any]  # the raw rollout, before the length penalty, read-only
    config: Any
    meta: TrajBatchMeta | None
    advantage_shaping_mode: str
    gvpo_negative_scale: float
    gvpo_zero_penalty: float
    gvpo_zero_eps: float


@dataclass(frozen=True, eq=False)
class AdvantageResult:
    """What a replacement of the whole computation returns."""

    advantages: Tensor  # [B,T]
    returns: Tensor  # [B,T]
    loss_mask: Tensor  # [B,T] binary
    logprobs: Tensor  # [B,T] aligned
    rewards: Tensor  # [B]
    tot_rewards: Tensor  # [B,T]
    kl_rewards: Tensor  # [B,T]
    extras: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))  # names in EXTRAS only
