"""Gives the table of channels: every tensor that may enter a Program or leave it, with its dims.

Dims: B rows, T tokens, W words of four tokens, U statistics units (a row or a logical rollout, padded to B),
S scalars in one small tensor.
A name with a dot and a number (`rewards.1`) is a later version of a channel; each version is written once.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Channel:
    """One named tensor: its dims, its dtype inside a Program, what padding holds, and what it means."""

    name: str
    dims: str
    dtype: torch.dtype
    about: str
    pad: float = 0
    size: int = 0  # numbers of a channel with dims S


# Positions in the `facts` channel: what depends on the caller's shape or metadata, as numbers a Program reads.
FACTS = ("rows", "tokens", "members", "truncation_given", "groups_given", "rollouts_given")

# Positions in the `gvpo` channel: the per-call values of the GVPO process shaping.
GVPO = ("negative_scale", "zero_penalty", "zero_eps")

_F, _I = torch.float32, torch.int64

INPUTS: dict[str, Channel] = {
    c.name: c
    for c in (
        Channel("attention_words", "BW", torch.int32, "valid tokens, a prefix: a byte for each, four to a word"),
        Channel("loss_mask", "BT", _F, "nonzero on generated tokens, at the token's own position"),
        Channel("rewards", "B", _F, "raw outcome reward"),
        Channel("logprobs", "BT", _F, "behaviour log probability, at the token's own position"),
        Channel("prox_logp", "BT", _F, "recomputed log probability, next-token aligned"),
        Channel("ref_logp", "BT", _F, "reference log probability, next-token aligned"),
        Channel("values", "BT", _F, "critic value of the state after the token"),
        Channel("token_rewards", "BT", _F, "process reward, at the token's own position"),
        Channel("turn_ids", "BT", _I, "turn number of generated tokens, at the token's own position", pad=-1),
        Channel("is_truncated", "B", _F, "nonzero where generation was cut; zeros when not given"),
        Channel("member_of_row", "B", _I, "statistics unit (logical rollout or row) of each row", pad=-1),
        Channel("first_row", "U", _I, "first row of each unit"),
        Channel("references", "U", _F, "raw reference reward of each unit, NaN where none is given", pad=float("nan")),
        Channel("group_of_row", "B", _I, "prompt of each row by metadata, -1 without", pad=-1),
        Channel("facts", "S", torch.int32, "caller's shape and what it gave: " + ", ".join(FACTS), size=len(FACTS)),
        Channel("gvpo", "S", _F, "per-call values: " + ", ".join(GVPO), size=len(GVPO)),
    )
}

# Channels that admit.py makes of Python objects: on the host, wherever the batch is.
HOST = ("member_of_row", "first_row", "references", "group_of_row", "facts", "gvpo")

# Keys of a batch that a Program may leave out; all other inputs always enter.
OPTIONAL = ("prox_logp", "ref_logp", "values", "token_rewards", "turn_ids")

# Computed channels, in the order in which results and tables list them.
OUTPUTS = (
    "advantages",
    "returns",
    "loss_mask",
    "logprobs",
    "prox_logp",
    "mopd_behavior_logprobs",
    "ref_logp",
    "rewards",
    "tot_rewards",
    "kl_rewards",
    "is_truncated",
)

# What compute.stats() says of a batch, in the order of the `stats` channel. The docstring there says what each is.
STATS = (
    "rows",
    "tokens",
    "groups",
    "groups/zero_spread",
    "truncated",
    "padding",
    *(f"reward/{name}" for name in ("mean", "std", "min", "max")),
    *(f"advantage/{name}" for name in ("mean", "std", "min", "max")),
    *(f"response_length/{name}" for name in ("mean", "std", "min", "max")),
    "kl/mean",
    "values/explained_variance",
    "process/flipped",
    "process/cleared",
)


def base(version: str) -> str:
    """The channel of a version: `rewards.1` -> `rewards`."""
    return version.split(".", 1)[0]
