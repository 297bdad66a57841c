"""Takes minutes, and names of properties (all if none is given); fuzzes them in turn with new examples each time.

    FUZZ_BACKENDS=eager,compiled python -m tests.fuzz 30 fuzz_compute

Exit code 1 if a property failed; hypothesis prints the smallest example that it found.
"""

import sys
import time
import traceback

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.properties import LONG

ROUND = 100  # examples


def main(minutes: float, names: list[str]) -> int:
    """Rounds until the time is over; a property that failed rests."""
    found = DirectoryBasedExampleDatabase(".hypothesis/fuzz")
    every = list(HealthCheck)
    limits = settings(max_examples=ROUND, deadline=None, database=found, suppress_health_check=every)
    running = [limits(fuzz) for fuzz in LONG if not names or fuzz.__name__ in names]
    failed: list[str] = []
    end, counts = time.monotonic() + 60 * minutes, dict.fromkeys((fuzz.__name__ for fuzz in running), 0)
    while running and time.monotonic() < end:
        for fuzz in [*running]:
            try:
                fuzz()
                counts[fuzz.__name__] += ROUND
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                traceback.print_exc()
                failed.append(fuzz.__name__)
                running.remove(fuzz)
            if time.monotonic() > end:
                break
        print(f"{(end - time.monotonic()) / 60:.1f} minutes left, examples {counts}, failed {failed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0, sys.argv[2:]))
