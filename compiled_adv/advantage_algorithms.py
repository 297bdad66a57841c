"""Takes nothing but tensors; gives the contract of temporal functions. B rows, T tokens, next-token alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class TemporalInputs:
    """What an estimator gets. Float32 unless said otherwise; the three reward channels are apart."""

    outcome_rewards: Tensor  # [B,T] already placed, scaled, normalised
    kl_rewards: Tensor  # [B,T] zero at each row's last valid token
    process_rewards: Tensor  # [B,T] folded; zeros when there are none
    values: Tensor  # [B,T]
    bootstrap_values: Tensor  # [B] values at each row's last valid token, NOT gated by truncation
    is_truncated: Tensor  # [B] bool
    loss_mask: Tensor  # [B,T]
    turn_ids: Tensor | None  # [B,T] int64, aligned
    discount: float
    config: Any


@dataclass(frozen=True, eq=False)
class TemporalResult:
    """What an estimator returns, each [B,T]. `total_rewards` is for monitoring."""

    advantages: Tensor
    returns: Tensor
    total_rewards: Tensor
