"""Takes a batch's shape; gives the Bucket that serves it, and the way in (padding) and out (cropping).

Whatever depends on the caller's own shape is in the channels already (`facts`), so padding carries no meaning.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from compiled_adv.channel import INPUTS, base
from compiled_adv.errors import NoBucket
from compiled_adv.memory import POOL

LEAST_TOKENS = 128
VECTOR = 16  # tokens; Triton knows a row's start to be aligned if its length is a multiple of this


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one executable."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"

    def shape(self, dims: str) -> tuple[int, ...]:
        """The padded shape of a channel with these dims; a name of `S` keeps its own size."""
        sizes = {"B": self.rows, "U": self.rows, "T": self.tokens, "W": -(-self.tokens // 4)}
        return tuple(sizes[dim] for dim in dims)

    def on(self, device: torch.device) -> "Bucket":
        """The bucket as a device takes it. On a GPU rows are of whole vectors: threads share aligned rows otherwise
        than others, and would add the same numbers in another order."""
        return self if device.type == "cpu" else Bucket(self.rows, -(-self.tokens // VECTOR) * VECTOR)


@dataclass(frozen=True)
class Ladder:
    """The declared bucket boundaries, ascending; None: powers of two and the halves between, without an end."""

    rows: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    overflow: str = "exact"

    def fit(self, rows: int, tokens: int) -> Bucket:
        """The smallest bucket that holds the batch; above the largest: the batch's own shape, or an error."""
        fitted = _fit(self.rows, rows, 1), _fit(self.tokens, tokens, LEAST_TOKENS)
        if None not in fitted:
            return Bucket(*fitted)  # type: ignore[arg-type]
        if self.overflow == "exact":
            return Bucket(rows, tokens)
        raise NoBucket(
            "the batch is larger than every bucket",
            at="actor.advantage.compiled.buckets",
            found=f"{rows} rows x {tokens} tokens",
            hint="larger boundaries, or overflow: exact",
        )

    def buckets(self) -> list[Bucket]:
        """Every declared bucket, largest first; none where the ladder has no end."""
        pairs = [Bucket(b, t) for b in self.rows or () for t in self.tokens or ()]
        return sorted(pairs, key=lambda bucket: -bucket.rows * bucket.tokens)


def _fit(boundaries: Sequence[int] | None, size: int, least: int) -> int | None:
    if boundaries is None:
        return rung(size, least)
    at = bisect.bisect_left(boundaries, size)
    return boundaries[at] if at < len(boundaries) else None


@lru_cache(maxsize=1 << 12)
def rung(size: int, least: int) -> int:
    """The smallest power of two, or half way between two, that is not below `size`."""
    power = 1 << max(0, math.ceil(math.log2(max(size, least))))
    half = power * 3 // 4
    return half if power >= 4 and half >= max(size, least) else power


def rungs(least: int, most: int) -> tuple[int, ...]:
    """All rungs from the one for `least` to the one for `most`."""
    found = [rung(least, least)]
    while found[-1] < most:
        found.append(rung(found[-1] + 1, least))
    return tuple(found)


def pad_channel(version: str, x: Tensor, bucket: Bucket) -> Tensor:
    """An input channel, or a version that a user's function wrote, at the bucket's shape.

    The same tensor where it fits and is contiguous, else a new one.
    """
    known = INPUTS.get(base(version))
    dims = known.dims if known else "BT"[: x.ndim]
    if dims == "S" or tuple(x.shape) == bucket.shape(dims):
        return x.contiguous()
    fill = known.pad if known else 0
    shape = bucket.shape(dims)
    cpu = x.device.type == "cpu"
    padded = POOL.empty(shape, x.dtype) if cpu else torch.empty(shape, dtype=x.dtype, device=x.device)
    padded[len(x) :] = fill
    padded[: len(x)][tuple(slice(size) for size in x.shape)] = x
    if x.ndim > 1:
        padded[: len(x), x.shape[1] :] = fill
    return padded


def crop(x: Tensor, rows: int, tokens: int, bucket: Bucket) -> Tensor:
    """The caller's part of a padded tensor: a view."""
    shape = (rows, tokens)[: x.ndim] if tuple(x.shape) == (bucket.rows, bucket.tokens)[: x.ndim] else tuple(x.shape)
    return x[tuple(slice(size) for size in shape)]


def ascending(values: Iterable[int]) -> tuple[int, ...]:
    """Declared boundaries in order and without repeats."""
    return tuple(sorted(set(values)))
