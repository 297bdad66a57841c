"""Takes what torchrun started; gives each rank its part of a list, and what every rank found. Alone: all of it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from compiled_adv.errors import RankFailed

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the work."""

    rank: int = 0
    size: int = 1

    def part(self, items: list[T]) -> list[T]:
        """This rank's items, neighbours in their order: as many as any other rank's, or one more or less."""
        return items[len(items) * self.rank // self.size : len(items) * (self.rank + 1) // self.size]

    def gather(self, find: Callable[[], T]) -> list[T]:
        """What every rank found. An error on one is an error on all."""
        if self.size == 1:
            return [find()]
        found: list[tuple[Any, str | None]] = [(None, None)] * self.size
        try:
            mine: tuple[Any, str | None] = find(), None
        except Exception as error:
            dist.all_gather_object(found, (None, str(error)))
            raise
        dist.all_gather_object(found, mine)
        for rank, (_, error_text) in enumerate(found):
            if error_text is not None:
                raise RankFailed(f"rank {rank} failed", found=" ".join(error_text.split()))
        return [value for value, _ in found]


@contextmanager
def torchrun() -> Iterator[Shard]:
    """This process among those of torchrun."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Shard()
        return
    with _stdout_to_stderr():  # Gloo of torch 2.9 prints there whom it met
        dist.init_process_group("gloo")
    try:
        yield Shard(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What C++ prints meanwhile goes to stderr: stdout belongs to the command's result."""
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
