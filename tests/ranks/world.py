"""A world of spawned Gloo ranks that go through scenarios together; what each rank saw comes back.

`go` starts the ranks and `main` is one of them. Everything ends: by the group's timeout, or the parent's.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds for a whole world


@dataclass(frozen=True)
class Call:
    """One call: for each rank its batch, metadata and per-call values; None: the rank joins without a batch."""

    ranks: tuple[Any, ...]


@dataclass(frozen=True)
class Scenario:
    """One configuration on all ranks, called several times.

    backends: by rank, in turns; `interpreted` is the compiled backend without its compiler. group: world, halves (each
    half of the ranks by itself), impatient (with a timeout of 2 seconds) or none. A rank's part of a call may also be
    "late" (past that timeout) or "die".
    """

    name: str
    config: dict[str, Any]
    calls: tuple[Call, ...]
    backends: tuple[str, ...] = ("eager",)
    compiled: dict[str, Any] = field(default_factory=dict)
    warm: bool = False  # rank 0 warms up first, and alone
    group: str = "world"


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one call."""

    out: dict[str, Any] | None
    warnings: dict[str, list[int]]
    error: tuple[str, str] | None  # class, message
    collectives: tuple[str, ...]
    stats: dict[str, float] = field(default_factory=dict)


def go(size: int, scenarios: Sequence[Scenario], folder: Path) -> list[dict[str, list[Seen]]]:
    """By rank, what it saw of each scenario's calls."""
    import torch

    torch.save(list(scenarios), folder / "scenarios.pt")
    ranks = [start(rank, size, folder) for rank in range(size)]
    dies = any("die" in call.ranks for scenario in scenarios for call in scenario.calls)
    end = time.monotonic() + PATIENCE
    try:
        said = [rank.communicate(timeout=max(1, end - time.monotonic()))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * (size - dies) + [-signal.SIGKILL] * dies, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def start(rank: int, size: int, folder: Path) -> "subprocess.Popen[str]":
    script = "import sys; from tests.ranks.world import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    command = [sys.executable, "-c", script, str(rank), str(size), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("COMPILED_ADV_BACKEND", None)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


# ---- one rank ----


def main(rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    counted = Counted(dist)
    scenarios = torch.load(Path(folder) / "scenarios.pt", weights_only=False)
    groups = {"world": "world", "none": None}
    groups["impatient"] = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), groups["impatient"])  # setting it up may take longer
    halves = [dist.new_group([*range(size // 2)]), dist.new_group([*range(size // 2, size)])]
    groups["halves"] = halves[rank >= size // 2]
    seen: dict[str, list[Seen]] = {}
    for scenario in scenarios:
        seen[scenario.name] = run(scenario, rank, groups[scenario.group], counted)
        torch.save(seen, Path(folder) / f"{rank}.pt")


class Counted:
    """Counts the collectives of torch.distributed."""

    def __init__(self, dist: Any) -> None:
        self.calls: list[str] = []
        for name in ("all_reduce", "all_gather"):
            setattr(dist, name, self._wrapped(name, getattr(dist, name)))

    def _wrapped(self, name: str, collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return collective(*args, **kwargs)

        return call

    def taken(self) -> tuple[str, ...]:
        calls, self.calls = tuple(self.calls), []
        return calls


def run(scenario: Scenario, rank: int, group: Any, counted: Counted) -> list[Seen]:
    import compiled_adv
    import compiled_adv.executable

    backend = scenario.backends[rank % len(scenario.backends)]
    ordinary = compiled_adv.executable.compile_graph
    if backend == "interpreted":
        compiled_adv.executable.compile_graph = lambda module, example, **_: lambda *channels: module(*channels)  # type: ignore[assignment]
    chosen = {"backend": "compiled" if backend == "interpreted" else backend, "compiled": scenario.compiled}
    actor = scenario.config
    compute = compiled_adv.build(actor | {"advantage": actor.get("advantage", {}) | chosen}, reduce_group=group)
    try:
        if scenario.warm and rank == 0:
            compute.warmup(example=scenario.calls[0].ranks[0][0])
            assert not counted.taken(), "warming up meets nobody"
        return [one(compute, call.ranks[rank], counted) for call in scenario.calls]
    finally:
        compiled_adv.executable.compile_graph = ordinary


def one(compute: Any, given: Any, counted: Counted) -> Seen:
    import torch

    out, error = None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if given is None:
                compute.join()
            elif given == "late":
                time.sleep(4)
            elif given == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif isinstance(given[0], list):
                compute.compute_advantages(given[0])
            else:
                batch, meta, call = given
                result = compute(batch, meta, **call)
                out = {k: x for k, x in result.items() if isinstance(x, torch.Tensor) and x is not batch.get(k)}
        except Exception as raised:
            error = type(raised).__name__, str(raised)
    return Seen(out, compute.last_warnings, error, counted.taken(), compute.stats())
