"""What runs in a worker process of AReaL: it knows the config that it was sent, and nothing of us."""

from __future__ import annotations

import json
import pickle
import warnings
from typing import Any

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
