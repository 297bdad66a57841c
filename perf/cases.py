"""What is timed: a case is (recipe, shape, mask); its contenders are our backends, the compiled one with fewer passes
or with stats, the floor and the peers.

Every answer is compared before it counts: a backend with eager, a peer with ours. `stamp` says on what it ran.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from compiled_adv.passes import DEFAULT
from torch import Tensor

import compiled_adv
from compiled_adv.channel import OPTIONAL
from compiled_adv.errors import AdvantageWarning, ConfigError
from compiled_adv.memory import POOL
from perf import peers
from perf.floor import Floor, channels
from perf.memory import peak_memory
from perf.shapes import EVERY, Recipe

BACKENDS = ("eager", "compiled")
PASSES = ("all", *(each.name for each in DEFAULT))
STATS = "with stats"
VARIANTS: Mapping[str, Mapping[str, Any]] = {  # settings of the compiled backend: less a pass, or all; and with stats
    **{
        f"without {name}": {"compiled": {"passes": [each.name for each in DEFAULT if name not in ("all", each.name)]}}
        for name in PASSES
    },
    STATS: {"stats": True},
}
TOLERANCE = 1e-4  # of the answers, against 1 + |expected|


@dataclass(frozen=True)
class Contender:
    """A callable to time. note: how it differs from our own computation; difference: the largest one found between
    the answers, relative; bytes_moved: of the floor."""

    run: Callable[[], Any]
    note: str = ""
    difference: float | None = None
    bytes_moved: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What a record of a timing holds beside the times."""
        return {name: x for name, x in vars(self).items() if name != "run" and x not in ("", None)}


@dataclass(frozen=True)
class Case:
    recipe: str
    shape: tuple[int, int]
    mask: str

    def __str__(self) -> str:
        return f"{self.recipe} {self.shape[0]}x{self.shape[1]} {self.mask}"

    def backend(self, name: str) -> Contender:
        return _contender(self, name)

    def extra_channels(self, name: str) -> float | None:
        """What a call of a backend needs at its peak beside inputs and outputs, in [B,T] float32 channels; outputs that
        were dropped are not used again."""
        _, batch, _, ours = _prepared(self)
        run = _contender(self, name).run
        POOL.trim()
        peak = peak_memory(run)
        outputs = channels(batch, ours)[1]
        return None if peak is None else (peak - sum(x.nbytes for x in outputs)) / (4 * batch["input_ids"].numel())

    def floor(self, *, fresh: bool = False, threads: int = 1) -> Contender:
        return _floor(self, fresh, threads)

    def peer(self, name: str) -> Contender:
        recipe, batch, _, ours = _prepared(self)
        peer = importlib.import_module(f"perf.peers.{name}").prepare(recipe, batch, ours)
        note = f"{peer.note}; compared {', '.join(peer.compared)}{' of actions' if peer.active_only else ''}"
        return Contender(peer.run, note, peers.check(peer, ours, TOLERANCE))


@lru_cache(maxsize=1)
def _prepared(case: Case) -> tuple[Recipe, dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Recipe, batch, meta and the eager result."""
    recipe = EVERY[case.recipe]
    batch, meta = recipe.batch(*case.shape, case.mask)
    return recipe, batch, meta, _backend(recipe, "eager", batch, meta)()


@lru_cache(maxsize=3)
def _contender(case: Case, name: str) -> Contender:
    recipe, batch, meta, ours = _prepared(case)
    run = _backend(recipe, name, batch, meta)
    return Contender(run, difference=checked(run, batch, ours))


def checked(run: Callable[[], Any], batch: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference between what `run` computes of a batch and what is expected; too large a one raises."""
    outputs = channels(batch, expected)[1]
    computed = tuple(name for name, x in expected.items() if any(x is y for y in outputs))
    return peers.check(peers.Peer(run, computed, ""), expected, TOLERANCE)


@lru_cache(maxsize=1)
def _floor(case: Case, fresh: bool, threads: int) -> Contender:
    _, batch, _, ours = _prepared(case)
    floor = Floor(batch, ours, fresh=fresh, threads=threads)
    note = f"{floor.way}, {'fresh' if fresh else 'reused'} outputs"
    return Contender(floor, note, bytes_moved=floor.moved)


def _backend(recipe: Recipe, name: str, batch: Mapping[str, Tensor], meta: Any) -> Callable[[], dict[str, Tensor]]:
    try:
        compute = _built(recipe, {"backend": "compiled" if name in VARIANTS else name})
        if name in VARIANTS:
            every, compute = compute, _built(recipe, VARIANTS[name])
            if _program(every, batch, recipe) == _program(compute, batch, recipe):
                raise peers.Unsupported("the same program")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AdvantageWarning)  # of the batch, once per instance
            compute(batch, meta, **recipe.per_call)
    except ConfigError as error:
        raise peers.Unsupported(f"backend {name}: {error}") from error
    return lambda: compute(batch, meta, **recipe.per_call)


def _built(recipe: Recipe, advantage: Mapping[str, Any]) -> compiled_adv.Compute:
    advantage = {**recipe.actor.get("advantage", {}), **advantage}
    return compiled_adv.build({"actor": {**recipe.actor, "advantage": advantage}})


def _program(compute: compiled_adv.Compute, batch: Mapping[str, Tensor], recipe: Recipe) -> Any:
    mode = recipe.per_call.get("advantage_shaping_mode", "additive")
    return compute.explain("json", [key for key in batch if key in OPTIONAL], mode)["program"]


def stamp(threads: int) -> dict[str, Any]:
    """Where and on what a figure was measured."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": threads,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "commit": _commit(),
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The checkout's commit, with a + where files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
