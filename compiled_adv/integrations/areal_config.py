"""AReaL's configs with an `actor.advantage` block, for an AReaL that has none.

To read a config with these classes is all that a training script does: importing this module enables our computation in
a process, and AReaL, which hands an actor's config to each of its workers, imports it there to make the ActorConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from areal.api import cli_args

from compiled_adv.integrations import areal


@dataclass
class ActorConfig(cli_args.PPOActorConfig):
    """PPOActorConfig with the block; null: our computation with its defaults."""

    advantage: dict[str, Any] | None = field(
        default=None, metadata={"help": "How compiled_adv computes advantages: its `actor.advantage` block."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        areal.check(self.advantage)


@dataclass
class PPOConfig(cli_args.PPOConfig):
    actor: ActorConfig = field(default_factory=ActorConfig)


@dataclass
class GRPOConfig(cli_args.GRPOConfig):
    actor: ActorConfig = field(default_factory=ActorConfig)


areal.patch()
