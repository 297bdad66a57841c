"""Takes sizes; gives tensors over memory that is used again once the caller has dropped them.

New memory costs a page fault for each 4 KiB, more than computing what goes there. Here a block goes back to a free list
when the last tensor over it (every view, every numpy array) is gone, and never before. Blocks come in few sizes, so
that batches of nearly one shape share them. CPU only.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # below it, the allocator's own reuse is as good
MOST_SIZES = 16
MOST_SETS = 2  # the free lists hold at most as often as much as was ever lent at once
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
        self._free: OrderedDict[int, deque[Block]] = OrderedDict()
        self._all: weakref.WeakSet[Block] = weakref.WeakSet()
        self._most_lent = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Small ones come from torch."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        size = block_size(size)
        free = self._blocks(size)
        try:
            block = free.pop()  # the newest: most likely still in a cache
        except IndexError:
            block = self._made(size)
        lent = _lent_type(size).from_buffer(block.memory, block.offset)
        lent.give_back = lambda: free.append(block)
        return torch.frombuffer(lent, dtype=dtype, count=count).view(tuple(shape))

    def _made(self, size: int) -> "Block":
        """A new block. Blocks start at different places of a page: at 4 KiB apart, stores hold up loads."""
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with a fork
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        with self._lock:
            self._count += 1
            block = Block(memory, self._count * 9 * LINE % PAGE, size)
            self._all.add(block)
            held = self.held_bytes()
            self._most_lent = max(self._most_lent, sum(each.size for each in self._all) - held)
            while self._free and held > MOST_SETS * self._most_lent:  # sizes asked for longest ago go first
                oldest, blocks = self._free.popitem(last=False)
                held -= oldest * len(blocks)
        return block

    def _blocks(self, size: int) -> "deque[Block]":
        """The free list of a size. The sizes asked for longest ago lose theirs."""
        with self._lock:
            free = self._free.setdefault(size, deque())
            self._free.move_to_end(size)
            while len(self._free) > MOST_SIZES:
                self._free.popitem(last=False)
            return free

    def held_bytes(self) -> int:
        """Bytes on the free lists."""
        return sum(size * len(blocks) for size, blocks in [*self._free.items()])

    def trim(self) -> None:
        """Give all free blocks back to the system."""
        for blocks in [*self._free.values()]:
            blocks.clear()


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
