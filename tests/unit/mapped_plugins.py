"""Functions of one row or one prompt for test_plugins.py, by dotted path."""

import torch

from compiled_adv import TemporalResult, pad_safe, per_group, per_trajectory


@per_trajectory
def plus_length(rewards, loss_mask, *, weight=1.0):
    return rewards + weight * loss_mask.sum()


@per_trajectory
def needs_scores(rewards, scores):
    return rewards + scores.sum()


@per_trajectory
def may_have_scores(rewards, scores=None):
    return rewards if scores is None else rewards + scores.sum()


@per_trajectory
def total_as_advantage(outcome_rewards, kl_rewards, discount, turn_ids):
    assert turn_ids is None
    total = outcome_rewards + kl_rewards
    return total * discount, total, total


@per_trajectory
def as_a_result(outcome_rewards):
    return TemporalResult(outcome_rewards, outcome_rewards + 1, outcome_rewards + 2)


@per_trajectory
def two_parts(outcome_rewards):
    return outcome_rewards, outcome_rewards


@per_trajectory
def without_mean(advantages, loss_mask, token_rewards):
    assert token_rewards is None
    return advantages - (advantages * loss_mask).sum() / loss_mask.sum().clamp(min=1)


@per_trajectory
def random_sign(advantages):
    return advantages * (torch.rand(()) < 0.5)


@per_trajectory
def branches(advantages):
    return advantages if advantages.sum() > 0 else -advantages


@per_trajectory
def reads_nonsense(advantage):
    return advantage


@pad_safe
@per_trajectory
def declared(advantages, loss_mask):
    return advantages * loss_mask


@per_trajectory
@pad_safe
def declared_inside(advantages, loss_mask):
    return advantages * loss_mask


@per_group
def without_group_mean(rewards, mask):
    return rewards - (rewards * mask).sum() / mask.sum()


@per_group
def size_of_group(mask):
    return mask.sum().float()


@per_group
def by_longest(rewards, loss_mask, mask, *, weight):
    lengths = loss_mask.sum(1) * mask
    return rewards - weight * (lengths == lengths.max())
