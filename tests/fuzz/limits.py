"""Gives the bounds that nothing which arrives from outside may break: seconds, and memory held on to."""

import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 20.0  # far above what an example takes, on a busy machine too
MEGABYTES = 1000


class TooSlow(BaseException):
    """No `except Exception` may swallow it."""


class TooLarge(BaseException):
    """The peak of resident memory rose by more than MEGABYTES."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raises where the block takes longer, or more memory, than any example should. Warnings are not shown."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"still running after {SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MEGABYTES:
        raise TooLarge(f"{grown:.0f} MB")
