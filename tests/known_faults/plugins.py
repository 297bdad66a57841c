"""Functions that the known-fault tests name by dotted path: they put a case's own numbers where a stage gives them."""

import torch

from compiled_adv import OutcomeResult, TemporalResult
from compiled_adv.gae import compute_gae_lambda


def values_as_advantages(inputs):
    """An estimator whose advantages are the batch's values."""
    return TemporalResult(inputs.values, inputs.values, inputs.outcome_rewards)


def expanded_ones(inputs):
    """An estimator whose advantages are one number, expanded over the row without memory of their own."""
    ones = torch.ones(1, 1).expand_as(inputs.values)
    return TemporalResult(ones, ones, ones)


def lambda_as_advantages(inputs):
    """An estimator whose advantages are each row's lambda, in every column."""
    lambda_B = compute_gae_lambda(inputs, "token")
    x = lambda_B[:, None].expand_as(inputs.values)
    return TemporalResult(x, x, x)


def given_lambda(context, *, values):
    """Lambdas as listed in the configuration."""
    return torch.tensor(values, dtype=torch.float32)


def scale_outcome(inputs, *, factor):
    return OutcomeResult(inputs.data["rewards"].float() * factor)


def wrong_outcome(inputs, *, how):
    """A result that no outcome function may return."""
    rewards_B = inputs.data["rewards"].float()
    ways = {
        "shape": rewards_B[:-1],
        "dtype": rewards_B.long(),
        "nan": rewards_B * float("nan"),
        "device": rewards_B.to("meta"),
    }
    return OutcomeResult(ways[how])


def writing_outcome(inputs):
    return OutcomeResult(inputs.data["rewards"].mul_(0.5))
