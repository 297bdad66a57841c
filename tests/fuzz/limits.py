"""Gives the bounds that nothing which arrives from outside may break: seconds, and memory held on to."""

import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_SECONDS = 20.0  # of this process, so that a busy machine fails nothing
SECONDS = 120  # for what waits without computing, counted one by one: none passes while the process is stopped
MEGABYTES = 1000


class TooSlow(BaseException):
    """No `except Exception` may swallow it."""


class TooLarge(BaseException):
    """The peak of resident memory rose by more than MEGABYTES."""


@contextmanager
def bounded(times: float = 1.0) -> Iterator[None]:
    """Raises where the block takes longer, or more memory, than any example should. Warnings are not shown.

    times: how many times as long it may take.
    """

    waited = 0

    def computed(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"{CPU_SECONDS * times:.0f} seconds of computing")

    def second(signum: int, frame: FrameType | None) -> None:
        nonlocal waited
        waited += 1
        if waited >= SECONDS * times:
            raise TooSlow(f"{waited} seconds")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handlers = [
        (number, signal.signal(number, late)) for number, late in ((signal.SIGPROF, computed), (signal.SIGALRM, second))
    ]
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS * times)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in handlers:
            signal.signal(number, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MEGABYTES:
        raise TooLarge(f"{grown:.0f} MB")
