"""A full override and an outcome function for the footgun tests."""

from compiled_adv import AdvantageResult, OutcomeResult


def as_given(inputs):
    """Zeros and the raw channels."""
    mask = (inputs.data["loss_mask"] != 0).float()
    zero = mask * 0
    rewards = inputs.data["rewards"].float()
    return AdvantageResult(zero, zero, mask, zero, rewards, zero, zero)


def not_declared(inputs):
    """An outcome function that does not say whether padding changes it."""
    return OutcomeResult(inputs.data["rewards"] * 1)
