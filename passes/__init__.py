"""Gives the graph passes of the compiled backend, in order, a reason beside each. Imported as compiled_adv.passes."""

from compiled_adv.passes.broadcast_outcome import broadcast_outcome
from compiled_adv.passes.drop_idle import drop_idle
from compiled_adv.passes.fuse_advantages import fuse_advantages
from compiled_adv.passes.fuse_reward_norm import fuse_reward_norm
from compiled_adv.passes.one_check import one_check
from compiled_adv.passes.share import share

from compiled_adv.rewrite import Pass

DEFAULT: tuple[Pass, ...] = (
    drop_idle,  # first: the others see only what is left
    share,  # before anything hides stages inside a fused one
    broadcast_outcome,  # after drop_idle, which takes the KL away
    fuse_reward_norm,
    fuse_advantages,
    one_check,  # last: what earlier passes drop needs no check
)
