"""Takes keys of programs and buckets; gives their executables: made once, bounded in number, counted."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheInfo:
    """What the cache did so far. `padding` is the share of computed slots that held no row or token of a batch."""

    hits: int
    misses: int
    compiles: int
    evictions: int
    fallbacks: int
    compile_seconds: float
    padding: float
    executables: int


class Cache:
    """Executables by key, the least recently used one going first when there are more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._executables: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()
        self._counts = dict.fromkeys(("hits", "misses", "compiles", "evictions", "fallbacks"), 0)
        self._compile_seconds = 0.0
        self._slots = [0, 0]  # used, computed

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The executable of a key. A second thread that asks for one in the making waits for it.

        None, where `make` has none to give, is not kept.
        """
        with self._lock:
            if key in self._executables:
                self._counts["hits"] += 1
                self._executables.move_to_end(key)
                return self._executables[key]
            self._counts["misses"] += 1
            start = time.perf_counter()
            executable = make()
            if executable is None:
                return None
            self._compile_seconds += time.perf_counter() - start
            self._counts["compiles"] += 1
            self._executables[key] = executable
            while len(self._executables) > self.limit:
                self._executables.popitem(last=False)
                self._counts["evictions"] += 1
            return executable

    def forget(self, wanted: Callable[[Any], bool]) -> None:
        """Drop the executables of these keys."""
        with self._lock:
            for key in [key for key in self._executables if wanted(key)]:
                del self._executables[key]

    def served(self, used: int, computed: int) -> None:
        """Count the slots of one call."""
        with self._lock:
            self._slots[0] += used
            self._slots[1] += computed

    def fell_back(self) -> None:
        """Count one call that ran eager instead."""
        with self._lock:
            self._counts["fallbacks"] += 1

    def info(self) -> CacheInfo:
        with self._lock:
            used, computed = self._slots
            padding = 1 - used / computed if computed else 0.0
            return CacheInfo(
                **self._counts,
                compile_seconds=self._compile_seconds,
                padding=padding,
                executables=len(self._executables),
            )
