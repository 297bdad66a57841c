"""Functions of test_plugins.py, by dotted path."""

import torch

import compiled_adv
from compiled_adv import OutcomeResult, TemporalResult
from compiled_adv.gae import compute_gae_lambda

SCALE = 1.0
SHAPES: list[tuple[int, ...]] = []


@compiled_adv.pad_safe
def scaled(inputs):
    return inputs.advantages * SCALE


def undeclared(inputs):
    return inputs.advantages * inputs.loss_mask


def notes_its_shape(inputs):
    SHAPES.append(tuple(inputs.advantages.shape))
    return inputs.advantages * 1


@compiled_adv.pad_safe
def branches(inputs):
    if inputs.advantages.sum() > 0:
        return inputs.advantages * 2
    return inputs.advantages * 1


@compiled_adv.pad_safe
def with_process_rewards(inputs):
    return inputs.advantages + (0.0 if inputs.token_rewards is None else inputs.token_rewards)


@compiled_adv.pad_safe
def lengths(inputs, *, weight):
    return OutcomeResult(inputs.data["rewards"] - weight * inputs.data["loss_mask"].sum(1))


@compiled_adv.pad_safe
def raw(inputs):
    return OutcomeResult(inputs.data["rewards"] * 0.5)


@compiled_adv.pad_safe
def half_lambda(context, *, q):
    return 1 - q / context["timestep_lengths"].clamp(min=2).float()


@compiled_adv.pad_safe
def with_lambda(inputs):
    """An estimator that asks for the configured lambda."""
    total = inputs.outcome_rewards + inputs.kl_rewards + inputs.process_rewards
    factor = torch.full_like(total, inputs.discount * compute_gae_lambda(inputs, "token"))
    advantages = compiled_adv.discounted_sum(total * inputs.loss_mask, torch.where(inputs.loss_mask > 0, factor, 1.0))
    return TemporalResult(advantages, advantages + inputs.values, total)


@compiled_adv.pad_safe
def gvpo_of_its_own(inputs):
    mask = torch.nn.functional.pad(inputs.data["loss_mask"][:, 1:], (0, 1)).float()
    advantages = (inputs.data["rewards"][:, None] - inputs.gvpo_zero_penalty) * mask
    zeros = torch.zeros_like(mask)
    return compiled_adv.AdvantageResult(advantages, zeros, mask, zeros, inputs.data["rewards"], zeros, zeros)
