"""Takes the inputs of a stage; gives what recipes need and the configuration has no words for. Used by dotted path.

    group_relative   outcome    GRPO, Dr. GRPO and RLOO as verl and TRL compute them, a prompt's only row included
    lite_ppo         outcome    less the prompt's mean, over the deviation of the whole batch's raw rewards
    opo              outcome    less the prompt's mean weighted by length
    gdpo             outcome    several rewards for each row, each normalised apart
    decoupled_gae    estimator  VAPO: advantages by a lambda of the row's length, returns by the critic's own
    whiten           process    verl's masked_whiten
    mopd             process    a teacher's log ratio for each token beside the outcome's advantage

All are pad-safe, so that the compiled backend makes them part of its Program. B rows, T tokens, K rows of one prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.advantage import OutcomeResult, OutcomeRewardInputs, ProcessAdvantageInputs
from compiled_adv.advantage_algorithms import TemporalInputs, TemporalResult
from compiled_adv.errors import BadKwargs, ConflictingSettings, MissingKey
from compiled_adv.gae import GAELambdaContext, vapo_length_adaptive_gae
from compiled_adv.plugins import pad_safe, per_group, prompts_of

ALONE = ("raw", "zero")  # what a prompt's only row gets: its reward as it is, or nothing


@per_group
def group_relative(
    rewards: Tensor,
    mask: Tensor,
    *,
    std: bool = True,
    unbiased: bool = True,
    eps: float = 1e-6,
    leave_one_out: bool = False,
    alone: str = "raw",
) -> Tensor:
    """Rewards [K] less their mean (of the other rows under leave_one_out), over their deviation + eps with `std`.

    The deviation is around the plain mean. Source: verl's compute_grpo_outcome_advantage (eps 1e-6, raw alone) and
    compute_rloo_outcome_advantage.
    """
    _check_alone(alone)
    rewards, n = rewards.to(torch.float64), mask.sum()
    mean = torch.where(mask, rewards, 0.0).sum() / n.clamp(min=1)
    away = torch.where(mask, rewards - mean, 0.0)
    centred = away * n / (n - 1).clamp(min=1) if leave_one_out else away
    if std:
        centred = centred / ((away.square().sum() / (n - int(unbiased)).clamp(min=1)).sqrt() + eps)
    lone = rewards / (1 + eps if std else 1) if alone == "raw" else torch.zeros_like(rewards)
    return torch.where(n > 1, centred, lone)


@pad_safe
@per_group
def opo(rewards: Tensor, loss_mask: Tensor, mask: Tensor, *, alone: str = "raw") -> Tensor:
    """Rewards [K] less their mean weighted by generated tokens. Source: verl's compute_opo_outcome_advantage, and
    https://arxiv.org/abs/2505.23585."""
    _check_alone(alone)
    rewards = rewards.to(torch.float64)
    length = torch.where(mask, (loss_mask != 0).sum(-1), 0)
    baseline = torch.where(mask, rewards * length, 0.0).sum() / length.sum().clamp(min=1)
    lone = rewards if alone == "raw" else torch.zeros_like(rewards)
    return torch.where(mask.sum() > 1, rewards - baseline, lone)


@pad_safe
def lite_ppo(
    inputs: OutcomeRewardInputs, *, unbiased: bool = True, eps: float = 1e-6, group_size: int | None = None
) -> OutcomeResult:
    """Rewards less their prompt's mean, over the deviation of all raw rewards of the batch + eps. A prompt's only row
    gets 0. Source: https://arxiv.org/abs/2508.08221."""
    centred_B = group_relative(inputs, std=False, alone="zero", group_size=group_size).rewards
    real_B = prompts_of(inputs.meta, group_size, inputs.data["rewards"])[0] >= 0  # padding belongs to no prompt
    rewards_B, n = inputs.data["rewards"].to(torch.float64), real_B.sum()
    mean = torch.where(real_B, rewards_B, 0.0).sum() / n.clamp(min=1)
    squares = torch.where(real_B, rewards_B - mean, 0.0).square().sum()
    return OutcomeResult(centred_B / ((squares / (n - int(unbiased)).clamp(min=1)).sqrt() + eps))


@pad_safe
def gdpo(
    inputs: OutcomeRewardInputs,
    *,
    channels: Sequence[str],
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    alone: str = "raw",
    group_size: int | None = None,
) -> OutcomeResult:
    """The weighted sum of several rewards [B], each normalised by its prompt as in GRPO before.

    `channels` names them as keys of the batch; `rewards` may be one. Source: verl's compute_gdpo_outcome_advantage, and
    https://arxiv.org/abs/2601.05242.
    """
    weights = [1.0] * len(channels) if weights is None else weights
    if not channels or isinstance(channels, str) or len(channels) != len(weights):
        hint = "channels: [accuracy_reward, format_reward]"
        raise BadKwargs("gdpo needs a list of channels, and a weight for each or none", found=channels, hint=hint)
    total_B = torch.zeros_like(inputs.data["rewards"], dtype=torch.float64)
    for name, weight in zip(channels, weights, strict=True):
        if name not in inputs.data:
            at, hint = f"batch['{name}']", "one number for each row [B]"
            raise MissingKey(f"gdpo's channel '{name}' is not in the batch", at=at, hint=hint)
        one = OutcomeRewardInputs({"rewards": inputs.data[name]}, inputs.config, inputs.meta)
        total_B = total_B + weight * group_relative(one, eps=eps, alone=alone, group_size=group_size).rewards
    return OutcomeResult(total_B)


# They ask for the prompt of each row, as what per_group makes does.
gdpo.by_prompt = lite_ppo.by_prompt = True  # type: ignore[attr-defined]


@pad_safe
def decoupled_gae(inputs: TemporalInputs, *, alpha: float, critic_lambda: float = 1.0) -> TemporalResult:
    """Token GAE twice: advantages with lambda max(0, 1 - 1/(alpha * length)) of each row, returns with critic_lambda.

    Source: VAPO, https://arxiv.org/abs/2504.05118.
    """
    mask_BT = inputs.loss_mask
    rewards_BT = inputs.outcome_rewards + inputs.kl_rewards + inputs.process_rewards
    bootstrap_B = torch.where(inputs.is_truncated, inputs.bootstrap_values, 0.0)
    tokens_B = mask_BT.sum(-1).to(torch.int64)
    context = GAELambdaContext(effective_token_lengths=tokens_B, turn_counts=tokens_B * 0, timestep_lengths=tokens_B)

    def gae(lambda_B: Tensor) -> Tensor:
        lambda_B = lambda_B.to(torch.float64)
        return kernels.backward_recurrence(
            rewards_BT, inputs.values, mask_BT, bootstrap_B, inputs.discount, lambda_B, None, False
        )[0]

    advantages_BT = gae(vapo_length_adaptive_gae(context, alpha=alpha))
    returns_BT = gae(torch.full_like(bootstrap_B, critic_lambda)) + inputs.values
    return TemporalResult(advantages_BT, returns_BT, rewards_BT)


@pad_safe
def whiten(inputs: ProcessAdvantageInputs, *, eps: float = 1e-8, everywhere: bool = False) -> Tensor:
    """(A - mean) / sqrt(variance + eps), unbiased, over active tokens; others become 0, or with `everywhere` are moved
    alike. The variance of a single token is 0. Source: verl's masked_whiten."""
    if inputs.token_rewards is not None:
        hint = "adv_norm, and a built-in process shaping; or leave token_rewards out"
        raise ConflictingSettings("whiten would drop token_rewards", at="batch['token_rewards']", hint=hint)
    active_BT = inputs.loss_mask > 0
    n = active_BT.sum()
    mean = torch.where(active_BT, inputs.advantages.to(torch.float64), 0.0).sum() / n.clamp(min=1)
    away_BT = inputs.advantages.to(torch.float64) - mean
    variance = torch.where(active_BT, away_BT, 0.0).square().sum() / (n - 1).clamp(min=1)
    whitened_BT = away_BT * torch.rsqrt(variance + eps)
    return (whitened_BT if everywhere else torch.where(active_BT, whitened_BT, 0.0)).to(torch.float32)


@pad_safe
def mopd(inputs: ProcessAdvantageInputs, *, outcome_weight: float = 1.0) -> Tensor:
    """token_rewards + outcome_weight * A on active tokens. A token's reward is the log ratio of its prompt's teacher to
    the student, log p_teacher - log p_student. Source: MiMo-V2-Flash, multi-teacher on-policy distillation."""
    if inputs.token_rewards is None:
        hint = "token_rewards: the teacher's log probability of each generated token less the student's"
        raise MissingKey("mopd needs the teacher's log ratios", at="batch['token_rewards']", hint=hint)
    mixed_BT = inputs.token_rewards + outcome_weight * inputs.advantages
    return torch.where(inputs.loss_mask > 0, mixed_BT, 0.0)


def _check_alone(alone: str) -> None:
    if alone not in ALONE:
        raise BadKwargs("'alone' says what a prompt's only row gets", found=alone, hint=" or ".join(ALONE))
