"""Random actor configs and rollouts in AReaL's own form, and its own actor for them."""

from __future__ import annotations

import random
from typing import Any

import torch
from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.trainer.ppo.actor import PPOActor
from torch import Tensor

NAMES = {"experiment_name": "test", "trial_name": "test"}

Trajectories = list[dict[str, Any]]


def actor_of(settings: dict[str, Any], engine: Any = None) -> PPOActor:
    """The real one; `settings` are keys of its config, norm blocks as mappings."""
    norms = {name: NormConfig(**settings[name]) for name in ("reward_norm", "adv_norm") if settings.get(name)}
    return PPOActor(PPOActorConfig(**NAMES, **settings | norms), engine)


def random_settings(seed: int) -> dict[str, Any]:
    """Every key that the computation reads."""
    r = random.Random(seed)

    def norm() -> dict[str, Any] | None:
        if r.random() < 0.25:
            return None
        levels = ("batch", "group", None)
        return {
            "mean_level": r.choice(levels),
            "std_level": r.choice(levels),
            "mean_leave1out": r.random() < 0.4,
            "std_unbiased": r.random() < 0.6,
            "group_size": r.choice((1, 2, 3)),
            "eps": r.choice((1e-5, 1e-3)),
        }

    settings: dict[str, Any] = {
        "reward_norm": norm(),
        "adv_norm": norm(),
        "reward_bias": r.choice((0.0, -0.5)),
        "reward_scaling": r.choice((1.0, 2.5)),
        "reward_clip": r.choice((20.0, 1.0)),
        "kl_ctl": r.choice((0.0, 0.1)),
        "kl_estimator": r.choice(("k1", "k2", "k3")),
        "discount": r.choice((1.0, 0.9)),
        "gae_lambda": r.choice((1.0, 0.7)),
        "mask_no_eos_with_zero": r.random() < 0.3,
        "use_decoupled_loss": r.random() < 0.3,
        "recompute_logprob": r.random() < 0.4,
        "max_new_tokens": 8,
    }
    if r.random() < 0.3:
        settings |= {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 0.5}
    return settings


def random_trajectories(seed: int) -> Trajectories:
    """One dict per prompt, 1 to 3 rows each, of several widths. With keys that AReaL 1.0.4 does not read."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    critic, reference = r.random() < 0.5, r.random() < 0.7
    return [_trajectory(r.randint(1, 3), r.randint(2, 12), g, critic, reference) for _ in range(r.randint(1, 4))]


def _trajectory(rows: int, width: int, g: torch.Generator, critic: bool, reference: bool) -> dict[str, Any]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    lengths_B = torch.randint(2, width + 1, (rows,), generator=g)
    lengths_B[0] = width  # it fills the width: cut, for AReaL
    valid_BT = (torch.arange(width) < lengths_B[:, None]).long()
    generated_BT = (torch.rand(rows, width, generator=g) < 0.7).long() * valid_BT
    generated_BT[:, 0] = 0
    made: dict[str, Any] = {
        "input_ids": torch.randint(0, 50, (rows, width), generator=g),
        "attention_mask": valid_BT,
        "loss_mask": generated_BT,
        "logprobs": -numbers(rows, width).abs() * generated_BT,
        "prox_logp": -numbers(rows, width).abs(),
        # AReaL keeps the mean of a group in float32: of rewards that are nearly equal its own result has few digits.
        "rewards": torch.randint(-8, 9, (rows,), generator=g) / 4,
        "versions": torch.zeros(rows, width, dtype=torch.long),
        # not read by 1.0.4
        "is_truncated": torch.rand(rows, generator=g) < 0.5,
        "turn_ids": torch.zeros(rows, width, dtype=torch.long),
        "token_rewards": numbers(rows, width),
        "note": "kept",
    }
    if critic:
        made["values"] = numbers(rows, width)
    if reference:
        made["ref_logp"] = -numbers(rows, width).abs()
    return made


def copied(trajectories: Trajectories) -> Trajectories:
    """Since AReaL's own function writes into what it is given."""
    return [{k: x.clone() if isinstance(x, Tensor) else x for k, x in t.items()} for t in trajectories]


def differences(got: Trajectories, expected: Trajectories) -> dict[str, float]:
    """The largest relative difference of each key; AssertionError where keys, shapes or other values differ."""
    worst: dict[str, float] = {}
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, want in theirs.items():
            have = ours[name]
            if not isinstance(want, Tensor):
                assert have == want, name
                continue
            assert have.shape == want.shape, name
            off = (have.double() - want.double()).abs() / (1 + want.double().abs())
            worst[name] = max(worst.get(name, 0.0), float(off.max()))
    return worst
