"""Takes what each call found; gives a flat dict of floats for a trainer's logger."""

import math
from collections.abc import Mapping

from torch import Tensor

from compiled_adv.channel import STATS
from compiled_adv.status import WARNINGS


class Stats:
    """Calls so far, and seconds, warnings and measurements of the last one. The names are the same at every step."""

    def __init__(self, *, measures: bool) -> None:
        """`measures`: whether calls bring what STATS names; until the first has, all of it is NaN."""
        self._measures = measures
        self._calls = 0
        self._seconds = 0.0
        self._rows: dict[str, int] = {}
        self._measured: Tensor | None = None

    def count(self, seconds: float, warnings: Mapping[str, list[int]], measured: Tensor | None) -> None:
        """Note one finished call. `measured`: what STATS names, on whatever device; read when it is asked for."""
        self._calls += 1
        self._seconds = seconds
        self._rows = {name: len(rows) for name, rows in warnings.items()}
        self._measured = measured

    def flat(self) -> dict[str, float]:
        rows = {f"warnings/{name}": float(self._rows.get(name, 0)) for name in WARNINGS}
        measured = dict.fromkeys(STATS, math.nan) if self._measures else {}
        if self._measured is not None:
            measured = dict(zip(STATS, self._measured.flatten().tolist(), strict=True))
        return {"calls": float(self._calls), "seconds": self._seconds} | measured | rows
