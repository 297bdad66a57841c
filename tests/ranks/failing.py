"""Users' functions that raise where a batch carries the sign for it, a number below -1000."""

import torch

from compiled_adv import AdvantageResult, OutcomeResult, TemporalResult


def check(x: torch.Tensor) -> None:
    if bool((x < -1000).any()):
        raise RuntimeError("the sign is there")


def outcome(inputs):
    check(inputs.data["rewards"])
    return OutcomeResult(inputs.data["rewards"] * 2)


def estimator(inputs):
    check(inputs.values)
    total = inputs.outcome_rewards + inputs.kl_rewards
    return TemporalResult(total.flip(1).cumsum(1).flip(1), total, total)


def process(inputs):
    check(inputs.token_rewards)
    return inputs.advantages + inputs.token_rewards


def compute(inputs):
    data = inputs.data
    check(data["rewards"])
    zeros = torch.zeros_like(data["logprobs"])
    mask = data["loss_mask"].float()
    return AdvantageResult(zeros, zeros, mask, data["logprobs"], data["rewards"] * 1, zeros, zeros, {})
