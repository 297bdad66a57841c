"""Takes sizes; gives tensors over memory that is used again once the caller has dropped them.

New memory costs a page fault for each 4 KiB, more than computing what goes there. Here a block goes back to a free list
when the last tensor over it (every view, every numpy array) is gone, and never before. CPU only.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # below it, the allocator's own reuse is as good
MOST_SIZES = 16
LINE = 64
PAGE = 4096


class Pool:
    """Blocks by size. A block is lent as the storage of one tensor at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: OrderedDict[int, deque[mmap.mmap]] = OrderedDict()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Small ones come from torch."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        free = self._blocks(size)
        try:
            block = free.pop()  # the newest: most likely still in a cache
        except IndexError:
            block = mmap.mmap(-1, size + PAGE)
        # each size's blocks start at the same place of a page; different channels of a call should not
        offset = LINE * 17 * (id(block) // LINE % 3)
        lent = _Lent.of(size).from_buffer(block, offset)
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype, count=count).view(tuple(shape))

    def _blocks(self, size: int) -> "deque[mmap.mmap]":
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


class _Lent:
    """Array types of a size whose instances can be watched: ctypes' own take no weak references."""

    _types: dict[int, type] = {}

    @classmethod
    def of(cls, size: int) -> type[ctypes.Array[ctypes.c_char]]:
        if size not in cls._types:
            cls._types[size] = type("Lent", (ctypes.c_char * size,), {})
        return cls._types[size]


POOL = Pool()
