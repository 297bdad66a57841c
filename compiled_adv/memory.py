"""Takes sizes; gives tensors over memory that is used again once the caller has dropped them.

New memory costs a page fault for each 4 KiB, more than computing what goes there. Here a block goes back to a free list
when the last tensor over it (every view, every numpy array) is gone, and never before. A smaller tensor may take a
larger block, so that batches of ever other shapes share them. CPU only.
"""

import bisect
import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # below it, the allocator's own reuse is as good
MOST_SETS = 2  # the free list holds at most so many times what was ever lent at once
ROOM = 2  # a tensor takes a block of at most so many times its size
LINE = 64
PAGE = 4096


@dataclass(frozen=True, eq=False)
class Block:
    """Memory, and where in it tensors start."""

    memory: mmap.mmap
    offset: int
    size: int


class Pool:
    """Blocks by size. A block is lent as the storage of one tensor at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._returned: deque[Block] = deque()  # no lock: a tensor may end within any call, this one included
        self._free: list[Block] = []  # by size; of one size the latest is last
        self._all: weakref.WeakSet[Block] = weakref.WeakSet()
        self._most_lent = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Small ones come from torch."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        size = block_size(size)
        with self._lock:
            block = self._fitting(size) or self._made(size)
        lent = _lent_type(size).from_buffer(block.memory, block.offset)
        lent.give_back = lambda: self._returned.append(block)
        return torch.frombuffer(lent, dtype=dtype, count=count).view(tuple(shape))

    def _fitting(self, size: int) -> "Block | None":
        """The smallest free block that holds so much; of those the newest, which is most likely still in a cache."""
        self._sort_returned()
        least = bisect.bisect_left(self._free, size, key=_size)
        if least == len(self._free) or self._free[least].size > ROOM * size:
            return None
        return self._free.pop(bisect.bisect_right(self._free, self._free[least].size, key=_size) - 1)

    def _sort_returned(self) -> None:
        while self._returned:
            bisect.insort_right(self._free, self._returned.popleft(), key=_size)

    def _made(self, size: int) -> "Block":
        """A new block. Blocks start at different places of a page: at 4 KiB apart, stores hold up loads."""
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with a fork
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._count += 1
        block = Block(memory, self._count * 9 * LINE % PAGE, size)
        self._all.add(block)
        held = sum(each.size for each in self._free)
        self._most_lent = max(self._most_lent, sum(each.size for each in self._all) - held)
        while self._free and held > MOST_SETS * self._most_lent:  # the smallest are missed least
            held -= self._free.pop(0).size
        return block

    def held_bytes(self) -> int:
        """Bytes that are free to lend."""
        with self._lock:
            self._sort_returned()
            return sum(block.size for block in self._free)

    def trim(self) -> None:
        """Give all free blocks back to the system."""
        with self._lock:
            self._sort_returned()
            self._free.clear()


def _size(block: Block) -> int:
    return block.size


def block_size(size: int) -> int:
    """Eight sizes between a power of two and the next."""
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step


@cache
def _lent_type(size: int) -> Any:
    """Array types of a size whose instances give their block back when the last tensor over them is gone."""

    class Lent(ctypes.c_char * size):  # type: ignore[misc]
        give_back: Callable[[], None]

        def __del__(self) -> None:
            self.give_back()

    return Lent


POOL = Pool()
