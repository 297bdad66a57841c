"""AReaL 1.0.4: the real PPOActor, built from its own config with engine=None, and its `_compute_advantages`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from perf.peers import Peer, Unsupported
from perf.shapes import Recipe

CHANNELS: tuple[str, ...] = ("advantages", "returns", "kl_rewards", "tot_rewards", "loss_mask", "logprobs", "prox_logp")


def prepare(recipe: Recipe, batch: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Peer:
    if recipe.turns is not None:
        raise Unsupported("AReaL 1.0.4 has no turn GAE")
    try:
        from areal.api.cli_args import NormConfig, PPOActorConfig
        from areal.trainer.ppo.actor import PPOActor
    except ImportError as error:
        raise Unsupported(f"AReaL is not installed here: {error}") from error
    logging.getLogger("PPOActor").setLevel(logging.WARNING)
    settings = dict(recipe.actor)
    for name in ("reward_norm", "adv_norm"):
        if settings.get(name):
            settings[name] = NormConfig(**settings[name])
    actor = PPOActor(PPOActorConfig(experiment_name="perf", trial_name="perf", **settings), engine=None)

    # It writes into ref_logp (the same numbers on every call) and puts its results into the dict that it is given.
    own = {name: x.clone() for name, x in batch.items()}
    note = "ignores is_truncated: a row is cut if it fills the width"
    compared = CHANNELS
    if "token_rewards" in batch:
        note += "; no process rewards: it does less, and its advantages are not compared"
        compared = CHANNELS[1:]
    return Peer(lambda: actor._compute_advantages(dict(own)), compared, note)
