"""Takes what each call found; gives a flat dict of floats for a trainer's logger."""

from collections.abc import Mapping

from compiled_adv.status import WARNINGS


class Stats:
    """Calls so far, and seconds and warnings of the last one. The names are the same at every step."""

    def __init__(self) -> None:
        self._calls = 0
        self._seconds = 0.0
        self._rows: dict[str, int] = {}

    def count(self, seconds: float, warnings: Mapping[str, list[int]]) -> None:
        """Note one finished call."""
        self._calls += 1
        self._seconds = seconds
        self._rows = {name: len(rows) for name, rows in warnings.items()}

    def flat(self) -> dict[str, float]:
        rows = {f"warnings/{name}": float(self._rows.get(name, 0)) for name in WARNINGS}
        return {"calls": float(self._calls), "seconds": self._seconds} | rows
