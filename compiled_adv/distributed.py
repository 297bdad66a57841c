"""Takes a process group; gives the meetings of its ranks: batch-level moments over all, and each other's errors.

The collectives of a call depend on the configuration alone: one all_reduce at each point where moments are due (count,
mean and sum of squared deviations travel together, with a status), and an all_gather of a status at the end. A rank
that fails joins the next of them with its error, and all stop there; a rank whose computation passes a point by, or
that has no rows, joins it with nothing. Whoever computes the same call again reads what the first computation was told,
with its own moments in place: it joins no collective.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_adv.errors import InvalidValue, NonFinite, RankFailed, RanksLost, shown

TEXT = 1000  # bytes of an error that other ranks are told

Row = list[float]  # count, mean and sum of squared deviations: of one rank, or of all
NOTHING = torch.zeros(3, dtype=torch.float64)  # the moments of no rows


class Ranks:
    """The ranks of one group, and the points of a call at which they meet."""

    def __init__(self, group: dist.ProcessGroup, points: Sequence[str]) -> None:
        self.group, self.points = group, tuple(points)
        self.size, self.rank = group.size(), group.rank()
        self.names = dist.get_process_group_ranks(group)  # not asked for later: a destroyed group still meets, unnamed
        # By the group alone, so that all ranks agree even where one has no batch to look at.
        self._on_cpu = dist.get_backend(group) in ("gloo", "mpi") or not torch.cuda.is_available()
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where what ranks exchange lies; asked for at each call, since set_device may come after build."""
        return torch.device("cpu") if self._on_cpu else torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def meeting(self) -> Iterator["Meeting"]:
        """One call of all ranks. Whatever is raised in here is raised on every rank, on the others as RankFailed."""
        with self._lock:
            meeting = Meeting(self)
            try:
                yield meeting
            except Exception as error:
                meeting.fail(error)
                raise
            meeting.close()


def ranks_of(reduce_group: Any, points: Sequence[str]) -> Ranks | None:
    """The ranks of "world" or of a process group; None where there is nobody to meet."""
    if reduce_group is None:
        return None
    if isinstance(reduce_group, str) and reduce_group != "world":
        hint = "None, 'world' or a process group"
        raise InvalidValue("unknown reduce_group", at="build(reduce_group=...)", found=shown(reduce_group), hint=hint)
    if not dist.is_available() or not dist.is_initialized():
        what, hint = "there is no process group yet", "torch.distributed.init_process_group(...) first, under torchrun"
        raise InvalidValue(what, at="build(reduce_group=...)", found=shown(reduce_group), hint=hint)
    group = dist.group.WORLD if isinstance(reduce_group, str) else reduce_group
    if not isinstance(group, dist.ProcessGroup):
        what, hint = "reduce_group is no process group of this rank", "None, 'world' or a group that this rank is in"
        raise InvalidValue(what, at="build(reduce_group=...)", found=shown(reduce_group), hint=hint)
    return Ranks(group, points) if group.size() > 1 else None


class Meeting:
    """One call of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._due = [*ranks.points]
        self._told: dict[str, list[Row]] = {}  # by point, a row of each rank
        self._over = False

    def merged(self, point: str, own: Tensor) -> Tensor:
        """Moments [3] over all ranks; `own`: this rank's, float64."""
        return torch.tensor(merge(self.rows(point, own)), dtype=torch.float64, device=own.device)

    def rows(self, point: str, own: Tensor) -> list[Row]:
        """The moments of every rank."""
        if point not in self._told:
            assert not self._over and self._due[:1] == [point], "ranks meet at each point once, in order"
            self._told[point] = [row[1:] for row in self._reduced(own)]
        else:
            self._told[point][self.ranks.rank] = own.tolist()
        return self._told[point]

    def close(self) -> None:
        """Meet at what is left, and learn whether every rank has its result."""
        while self._due:
            self.rows(self._due[0], NOTHING)
        self._stop_if(self._gathered(torch.zeros(1, dtype=torch.uint8)))
        self._over = True

    def fail(self, error: Exception) -> None:
        """Tell the others, where they are."""
        if not self._over:
            with suppress(Exception):  # this rank has an error of its own, which its caller gets whatever happens here
                if self._due:
                    self._reduced(NOTHING, error)
                else:
                    self._stop_if(self._gathered(torch.ones(1, dtype=torch.uint8)), error)

    def _reduced(self, own: Tensor, error: Exception | None = None) -> list[Row]:
        """Status, then moments, of every rank: each adds them into a slot of its own.

        So the sum is a gather: nothing cancels before the merge, and every rank merges the same numbers in one order.
        """
        ranks = self.ranks
        table = torch.zeros(ranks.size, 1 + len(own), dtype=torch.float64, device=ranks.device)
        table[ranks.rank, 0] = float(error is not None)
        table[ranks.rank, 1:] = own
        with self._reaching():
            dist.all_reduce(table, group=ranks.group)
            rows: list[Row] = table.tolist()
        self._due = self._due[1:]
        finite = [all(map(math.isfinite, row)) for row in rows]
        if error is None and not finite[ranks.rank]:
            what, hint = (
                "advantages to normalise overflowed float32",
                "values, discount and gae_lambda of moderate size",
            )
            error = NonFinite(what, at="actor.advantage.estimator", hint=hint)
        self._stop_if([bool(row[0]) or not good for row, good in zip(rows, finite, strict=True)], error)
        return rows

    def _stop_if(self, failed: Sequence[Any], error: Exception | None = None) -> None:
        """Where a rank failed, all tell their errors and stop: it by its own error, the others by RankFailed."""
        if not any(failed):
            return
        said = (str(error) or type(error).__name__).encode(errors="replace")[:TEXT] if error is not None else b""
        texts = self._gathered(torch.tensor([*said.ljust(TEXT, b"\0")], dtype=torch.uint8))
        self._over = True
        if error is not None:
            raise error
        why = [" ".join(bytes(text).rstrip(b"\0").decode(errors="replace").split()) for text in texts]
        bad = [i for i, each in enumerate(failed) if each]
        ranks = [self.ranks.names[i] for i in bad]
        found = "; ".join(f"rank {r}: {why[i]}" for r, i in zip(ranks, bad, strict=True) if why[i])
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        raise RankFailed(f"{named} failed, so no rank has a result", found=found, hint="the next call works again")

    def _gathered(self, x: Tensor) -> list[Any]:
        """A small tensor of every rank, as lists or numbers."""
        x = x.to(self.ranks.device)
        parts = [torch.empty_like(x) for _ in range(self.ranks.size)]
        with self._reaching():
            dist.all_gather(parts, x, group=self.ranks.group)
            return [part.tolist() if len(part) > 1 else part.item() for part in parts]

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._over = True
            what, hint = "the ranks cannot reach each other", "one has died, or took longer than the group's timeout"
            raise RanksLost(what, found=error, hint=hint) from error


def merge(rows: Sequence[Row]) -> Row:
    """Moments of all ranks together; equal means have exactly no spread between them."""
    counted = [row for row in rows if row[0] > 0]
    if not counted:
        return [0.0, 0.0, 0.0]
    n, pivot = math.fsum(row[0] for row in counted), counted[0][1]
    mean = pivot + math.fsum(row[0] * (row[1] - pivot) for row in counted) / n
    return [n, mean, math.fsum(x for row in counted for x in (row[2], row[0] * (row[1] - mean) ** 2))]
