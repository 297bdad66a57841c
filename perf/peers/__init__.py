"""Other implementations of the same computation: three trainers' own functions, and two plain torch programs.

Each file gives `prepare(recipe, batch, ours) -> Peer`: config and inputs in the peer's own form are made there, outside
the timing; `ours` is our result on the batch, for what a peer expects to be given (the rewards per token).
A peer that cannot do a recipe raises Unsupported with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

NAMES = ("areal", "verl", "torchrl", "column_loop", "turn_scatter")


class Unsupported(Exception):
    """Why a peer cannot compute a recipe, or cannot run here."""


@dataclass(frozen=True)
class Peer:
    """What is timed, which of its channels are ours too, and what it does otherwise."""

    run: Callable[[], Mapping[str, Tensor]]
    compared: tuple[str, ...]
    note: str
    active_only: bool = False  # its numbers between actions follow another rule


def check(peer: Peer, ours: Mapping[str, Tensor], tolerance: float = 1e-4) -> float:
    """The largest relative difference over the channels that both compute; AssertionError beyond the tolerance.

    Process shaping jumps where an advantage is 0, so rounding may carry one number in a million across.
    """
    theirs, worst = peer.run(), 0.0
    for name in peer.compared:
        x_BT, y_BT = ours[name].double(), theirs[name].double()
        off_BT = (x_BT - y_BT).abs() / (1 + x_BT.abs())
        if peer.active_only:
            off_BT = off_BT[ours["loss_mask"] > 0]
        wrong_BT = ~(off_BT <= tolerance)
        assert int(wrong_BT.sum()) <= off_BT.numel() // 1_000_000, f"{name} differs by {off_BT.max():.3g}"
        worst = max(worst, float(off_BT[~wrong_BT].max()))
    return worst
