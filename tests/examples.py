"""The worked examples of README.md: one function for each slot that can be written for a single row or prompt."""

import torch

from compiled_adv import discounted_sum, pad_safe, per_group, per_trajectory


@pad_safe
@per_trajectory
def overlong(rewards, loss_mask, *, budget, ramp, factor):
    """Less reward for each generated token beyond budget - ramp."""
    beyond = loss_mask.sum() - (budget - ramp)
    return rewards - factor * (beyond / ramp).clamp(min=0)


@per_group
def leave_one_out(rewards, mask):
    """Each reward less the mean of the prompt's other ones; 0 where there is no other one."""
    others = (rewards.sum() - rewards) / (mask.sum() - 1).clamp(min=1)
    return torch.where(mask.sum() > 1, rewards - others, 0.0)


@pad_safe
@per_trajectory
def td_lambda(outcome_rewards, kl_rewards, process_rewards, values, bootstrap_values, is_truncated, loss_mask,
              discount, *, decay, at_turn_end):  # fmt: skip
    rewards = outcome_rewards + kl_rewards + process_rewards
    gamma = torch.where(process_rewards != 0, at_turn_end, discount)  # one number for each token
    last = (bootstrap_values * is_truncated)[None]
    following = discounted_sum(torch.cat([loss_mask * values, last]), torch.cat([1 - loss_mask, 0 * last]))[1:]
    delta = loss_mask * (rewards + gamma * following - values)
    advantages = discounted_sum(delta, torch.where(loss_mask > 0, gamma * decay, 1.0))
    return advantages, advantages + values, rewards


@pad_safe
@per_trajectory
def centred(advantages, token_rewards, loss_mask, *, weight):
    """Adds process rewards less their mean over the row, so that no row gains by them in all."""
    mean = (token_rewards * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    return torch.where(loss_mask > 0, advantages + weight * (token_rewards - mean), advantages)
