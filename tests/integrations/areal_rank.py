"""What runs in each of two processes: one rank of an AReaL whose torch.distributed starts after the first call."""

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_adv.integrations import areal


class ActorConfig(SimpleNamespace):
    """An actor's config that two processes can import."""


def advantages(rank: int, store: str, by_batch: Any, by_group: Any) -> dict[str, Tensor]:
    """Alone; then of two ranks; then by group, which the second rank does not come to. Inputs are AdvantageInputs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seen = {"alone": areal.compute(by_batch).advantages}
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    seen["together"] = areal.compute(by_batch).advantages
    if rank == 0:
        seen["by_group"] = areal.compute(by_group).advantages
    dist.barrier()
    dist.destroy_process_group()
    return seen
