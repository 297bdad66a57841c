"""What runs in a worker process of AReaL: it knows the config that it was sent, and nothing of us."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from datetime import timedelta
from typing import Any

import torch
from areal.api.engine_api import TrainEngine


def computed_by_a_worker(sent: str | bytes, rollouts: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """The results for these rollouts, and how many calls our computation counts."""
    from areal.infra.rpc.serialization import deserialize_value
    from areal.trainer.ppo.actor import PPOActor

    warnings.simplefilter("ignore")
    actor = PPOActor(deserialize_value(json.loads(sent)) if isinstance(sent, str) else pickle.loads(sent), None)
    computed = actor.compute_advantages(rollouts)

    from compiled_adv.integrations import areal

    return computed, areal.compute_of(actor).stats()["calls"]


class LocalActor(TrainEngine):
    """The least that AReaL's worker server takes for an actor's engine."""

    initialized = False

    def __init__(self, config: Any) -> None:
        from areal.trainer.ppo.actor import PPOActor

        self.actor = PPOActor(config, self)

    def calls_served(self, rollouts: list[dict[str, Any]]) -> float:
        """Compute their advantages; the calls that our computation counts then."""
        self.actor.compute_advantages(rollouts)
        from compiled_adv.integrations import areal

        return areal.compute_of(self.actor).stats()["calls"]


LocalActor.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def on_one_rank(rank: int, store: str, cases: list[tuple[str, dict[str, Any], Any]]) -> list[dict[str, float]]:
    """Of each case (backend, settings, rollouts) how far ours is from its own, among two ranks; and from one rank's.

    As in AReaL the actors are there before torch.distributed is.
    """
    import torch.distributed as dist
    from areal_cases import actor_of, copied, differences

    from compiled_adv.integrations import areal

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.pop("COMPILED_ADV_BACKEND", None)
    actors = [actor_of(settings) for _, settings, _ in cases]
    local = [actor.compute_advantages(copied(case[2])) for actor, case in zip(actors, cases, strict=True)]
    areal.enable()
    served = [actor_of(settings) for _, settings, _ in cases]
    areal.disable()
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    own = [actor.compute_advantages(copied(case[2])) for actor, case in zip(actors, cases, strict=True)]
    seen = []
    for (backend, _, rollouts), actor, alone, want in zip(cases, served, local, own, strict=True):
        areal.enable(backend=backend)
        got = actor.compute_advantages(copied(rollouts))
        seen.append({"own": max(differences(got, want).values()), "alone": max(differences(got, alone).values())})
    dist.destroy_process_group()
    return seen
