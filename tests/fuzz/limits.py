"""Gives the bounds that nothing which arrives from outside may break: seconds, and memory held on to."""

import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_SECONDS = 20.0  # of this process, so that a busy machine fails nothing
SECONDS = 120.0  # for what waits without computing
MEGABYTES = 1000


class TooSlow(BaseException):
    """No `except Exception` may swallow it."""


class TooLarge(BaseException):
    """The peak of resident memory rose by more than MEGABYTES."""


TIMERS = ((signal.ITIMER_PROF, signal.SIGPROF, CPU_SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, SECONDS))


@contextmanager
def bounded(times: float = 1.0) -> Iterator[None]:
    """Raises where the block takes longer, or more memory, than any example should. Warnings are not shown.

    times: how many times as long it may take.
    """

    def late(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"still running at {signal.Signals(signum).name}")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handlers = [(number, signal.signal(number, late)) for _, number, _ in TIMERS]
    for timer, _, seconds in TIMERS:
        signal.setitimer(timer, seconds * times)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for timer, _, _ in TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in handlers:
            signal.signal(number, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MEGABYTES:
        raise TooLarge(f"{grown:.0f} MB")
