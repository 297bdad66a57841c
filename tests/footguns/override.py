"""A full override for the footgun tests."""

from compiled_adv import AdvantageResult


def as_given(inputs):
    """Zeros and the raw channels."""
    mask = (inputs.data["loss_mask"] != 0).float()
    zero = mask * 0
    rewards = inputs.data["rewards"].float()
    return AdvantageResult(zero, zero, mask, zero, rewards, zero, zero)
