"""One ladder of batch shapes, the recipes that are timed on them, and seeded batches that look like rollouts.

Takes (rows, tokens), gives (batch, meta) as a trainer would hand them over. Dim suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_adv import config_file

GROUP = 8  # rows of one prompt

LADDERS: dict[str, tuple[tuple[int, int], ...]] = {
    "small": ((16, 256), (64, 1024)),
    "medium": ((16, 256), (64, 1024), (128, 2048), (256, 4096)),
    "large": ((16, 256), (64, 1024), (128, 2048), (256, 4096), (512, 8192)),
}
MASKS = ("contiguous", "random90")

_NORM = {"mean_leave1out": False, "std_unbiased": True, "group_size": GROUP, "eps": 1e-5}
_GROUP_NORM = {"mean_level": "group", "std_level": "group", **_NORM}
_BATCH_NORM = {"mean_level": "batch", "std_level": "batch", **_NORM}
_PPO = {
    "discount": 1.0,
    "gae_lambda": 0.95,
    "kl_ctl": 0.1,
    "reward_norm": _GROUP_NORM,
    "adv_norm": _BATCH_NORM,
}
_GVPO = {"advantage_shaping_mode": "gvpo", "gvpo_negative_scale": 0.2, "gvpo_zero_penalty": 0.4}


@dataclass(frozen=True)
class Recipe:
    """An actor block, the optional channels its batches carry, and the per-call values."""

    actor: Mapping[str, Any]
    channels: tuple[str, ...]
    turns: int | None = None
    per_call: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, rows: int, tokens: int, mask: str = "contiguous") -> tuple[dict[str, Tensor], dict[str, Any]]:
        return make_batch(rows, tokens, mask=mask, turns=self.turns, channels=self.channels)


def _shipped(name: str) -> Mapping[str, Any]:
    actor: Mapping[str, Any] = config_file.read(config_file.find(name))[0]["actor"]
    return actor


RECIPES: dict[str, Recipe] = {
    # What AReaL 1.0.4 computes too: critic, KL, group reward norm, batch advantage norm.
    "token_gae": Recipe(_PPO, ("ref_logp", "values")),
    "token_gae_gvpo": Recipe(_PPO, ("ref_logp", "values", "token_rewards"), per_call=_GVPO),
    "turn_gae_gvpo": Recipe(
        {**_PPO, "gae_timestep_unit": "turn"}, ("ref_logp", "values", "token_rewards"), turns=8, per_call=_GVPO
    ),
    "grpo": Recipe(_shipped("grpo"), ()),
}

_CRITIC, _PROCESS = ("ref_logp", "values"), ("token_rewards",)

# The other shipped recipes, and two places where a pass fires.
MORE: dict[str, Recipe] = {
    "default": Recipe(_shipped("default"), ("ref_logp",)),
    "ppo_token_gae": Recipe(_shipped("ppo_token_gae"), _CRITIC),
    "ppo_turn_gae": Recipe(_shipped("ppo_turn_gae"), _CRITIC, turns=8),
    "vapo": Recipe(_shipped("vapo"), ("values",)),
    "reinforce_plus_plus": Recipe(_shipped("reinforce_plus_plus"), ("ref_logp",)),
    **{name: Recipe(_shipped(name), ()) for name in ("dr_grpo", "rloo", "lite_ppo", "opo", "gdpo")},
    **{name: Recipe(_shipped(name), _PROCESS) for name in ("prm_additive", "gvpo", "mopd")},
    "process_weighted": Recipe(_shipped("process_weighted"), ("token_weights",)),
    "grpo_with_ref": Recipe(_shipped("grpo"), ("ref_logp",)),
    "both_norms_by_group": Recipe({**_PPO, "adv_norm": _GROUP_NORM}, _CRITIC),
}
EVERY = RECIPES | MORE


def make_batch(
    rows: int,
    tokens: int,
    *,
    mask: str = "contiguous",
    turns: int | None = None,
    channels: tuple[str, ...] = ("ref_logp", "values", "token_rewards"),
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A prompt of up to a quarter of the width, then a response of skewed length; about one row in sixteen is cut.

    mask "contiguous": every response token is generated. "random90": nine in ten, at random.
    turns: the response is that many turns with short environment text between them, and turn_ids are given.
    """
    if mask not in MASKS:
        raise ValueError(f"mask {mask!r} is none of {MASKS}")
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n_prompts = -(-rows // GROUP)
    prompt_B1 = (1 + uniform(n_prompts, 1) * (tokens // 4)).long().repeat_interleave(GROUP, 0)[:rows]
    room_B1 = tokens - prompt_B1
    response_B1 = (room_B1 * torch.exp(0.6 * normal(rows, 1) - 0.7)).long()
    response_B1 = torch.where(uniform(rows, 1) < 1 / 16, room_B1, response_B1).clamp(min=2 * (turns or 1) + 2)
    length_B1 = prompt_B1 + torch.minimum(response_B1, room_B1)
    length_B1[0] = tokens  # a batch is padded to its longest row

    at_1T = torch.arange(tokens)[None]
    valid_BT = at_1T < length_B1
    generated_BT = valid_BT & (at_1T >= prompt_B1)
    turn_BT = torch.zeros(rows, tokens, dtype=torch.int64)
    if turns is not None:
        # The last eighth of every turn but the last is environment text.
        place_BT = (at_1T - prompt_B1).clamp(min=0).double() / (length_B1 - prompt_B1) * turns
        turn_BT = place_BT.long().clamp(max=turns - 1)
        generated_BT &= (place_BT - turn_BT < 0.875) | (turn_BT == turns - 1)
    if mask == "random90":
        last_BT = at_1T == length_B1 - 1  # kept, so that the outcome stays on an action
        generated_BT &= (uniform(rows, tokens) < 0.9) | last_BT

    def where_valid(x_BT: Tensor, last: int = 1) -> Tensor:
        return torch.where(at_1T <= length_B1 - last, x_BT, 0.0)

    logprobs_BT = torch.where(generated_BT, -0.5 * normal(rows, tokens).square(), 0.0)
    batch = {
        "input_ids": torch.where(valid_BT, (uniform(rows, tokens) * 32000).long(), 0),
        "attention_mask": valid_BT,
        "loss_mask": generated_BT.long(),
        "logprobs": logprobs_BT,
        "rewards": (uniform(rows) < 0.4).float(),
        "is_truncated": length_B1[:, 0] == tokens,
    }
    if turns is not None:
        batch["turn_ids"] = torch.where(generated_BT, turn_BT, -1)
    for name in channels:
        if name == "ref_logp":  # next-token: entry t is about token t+1, so column L-1 is empty
            batch[name] = where_valid(logprobs_BT.roll(-1, -1) + 0.1 * normal(rows, tokens), last=2)
        elif name == "values":
            batch[name] = where_valid(0.4 + 0.3 * normal(rows, tokens))
        elif name == "token_rewards":  # constant over a turn, or over runs of 64 tokens
            block_BT = turn_BT if turns is not None else (at_1T // 64).expand(rows, tokens)
            choice = torch.tensor([0.5, 0.0, -0.2])
            per_block = choice[(uniform(rows, int(block_BT.max()) + 1) * 3).long()]
            batch[name] = torch.where(generated_BT, per_block.gather(1, block_BT), 0.0)
        elif name == "token_weights":  # process rewards in [0, 1]
            batch["token_rewards"] = torch.where(generated_BT, uniform(rows, tokens), 0.0)
        else:
            raise ValueError(f"no channel {name!r}")

    sizes = [min(GROUP, rows - first) for first in range(0, rows, GROUP)]
    meta = {
        "n_trajs": len(sizes),
        "traj_group_sizes": sizes,
        "traj_seqlens": [tokens] * len(sizes),
        "rollout_groups": None,
    }
    return batch, meta
