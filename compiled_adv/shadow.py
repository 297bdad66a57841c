"""Takes a computed batch and a second way to compute it; gives the largest difference of each channel.

A result is never touched, and what goes wrong here never reaches the caller: it is warned of once, and counted.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_adv.admit import Admitted
from compiled_adv.channel import OUTPUTS
from compiled_adv.errors import ResultsDiffer
from compiled_adv.resolve import Resolved
from compiled_adv.spec import Spec
from compiled_adv.stages.plugin import call
from compiled_adv.status import raise_errors

# (batch, backend) -> what the backend computes of it, and its flags
Run = Callable[[Admitted, str], tuple[dict[str, Tensor], dict[str, list[int]]]]


def shadow_of(spec: Spec, resolved: Resolved, run: Run) -> "Shadow | None":
    """The configured second opinion."""
    chosen = spec.advantage.shadow
    if chosen is None:
        return None
    plugin = resolved.shadow
    if plugin is not None:
        return Shadow(chosen.against, chosen.every, lambda admitted: _fields(call(plugin, admitted.inputs)), True)

    def ours(admitted: Admitted) -> Mapping[str, Any]:
        computed, flags = run(admitted, chosen.against)
        raise_errors(flags)
        return computed

    return Shadow(chosen.against, chosen.every, ours, False)


class Shadow:
    """A second opinion on the first batch and every N-th after it."""

    def __init__(
        self, name: str, every: int, opinion: Callable[[Admitted], Mapping[str, Any]], active_only: bool
    ) -> None:
        """`active_only`: compare [B,T] channels where the loss mask is set. A trainer's function may leave anything
        elsewhere."""
        self._name, self._every, self._opinion, self._active_only = name, every, opinion, active_only
        self._seen = self._calls = self._errors = 0
        self._seconds = 0.0
        self._last: dict[str, float] = {}
        self._most: dict[str, float] = {}

    def see(self, admitted: Admitted, computed: Mapping[str, Tensor]) -> None:
        """Compare one batch, if it is its turn."""
        turn, self._seen = self._seen % self._every == 0, self._seen + 1
        if not turn:
            return
        start = time.perf_counter()
        self._calls += 1
        try:
            with _same_random_numbers(admitted.device):
                self._last = self._differences(computed, self._opinion(admitted))
            self._most = {k: max(x, self._most.get(k, 0.0)) for k, x in (self._most | self._last).items()}
        except (Exception, SystemExit) as error:  # whatever a user's function does
            self._errors += 1
            if self._errors == 1:
                with contextlib.suppress(RuntimeWarning):  # where warnings are errors
                    warnings.warn(f"the shadow ({self._name}) failed: {error}", RuntimeWarning, stacklevel=3)
        self._seconds += time.perf_counter() - start

    def flat(self) -> dict[str, float]:
        """Calls, errors and seconds of the shadow, and per channel the difference of the last batch and the largest."""
        found = {"shadow/calls": float(self._calls), "shadow/errors": float(self._errors)}
        found["shadow/seconds"] = self._seconds
        for name, most in self._most.items():
            found[f"shadow/{name}/max_abs"] = most
            found[f"shadow/{name}/last_abs"] = self._last.get(name, 0.0)
        return found

    def _differences(self, computed: Mapping[str, Tensor], other: Mapping[str, Any]) -> dict[str, float]:
        names = [name for name in OUTPUTS if name in computed and isinstance(other.get(name), Tensor)]
        if not names:
            what = "the second opinion has no channel to compare"
            raise ResultsDiffer(what, found=", ".join(map(str, other)) or "nothing", hint=", ".join(computed))
        active_BT = computed["loss_mask"] != 0
        found = {}
        for name in names:
            mine, theirs = computed[name], other[name]
            if theirs.shape != mine.shape:
                shapes = f"{list(theirs.shape)}, not {list(mine.shape)}"
                raise ResultsDiffer(f"'{name}' of the second opinion has another shape", found=shapes)
            masked = self._active_only and name != "loss_mask" and mine.shape == active_BT.shape
            found[name] = largest(mine, theirs, active_BT if masked else None)
        return found


def largest(mine: Tensor, theirs: Tensor, where: Tensor | None = None) -> float:
    """The largest absolute difference, inf where only one of two numbers is finite; 0 where there is nothing."""
    a, b = mine.detach().to(torch.float64), theirs.detach().to(mine.device, torch.float64)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(math.inf, math.inf))
    gap = gap if where is None else gap[where]
    return float(gap.max()) if gap.numel() else 0.0


def _fields(result: Any) -> Mapping[str, Any]:
    """A plain dict of tensors as it is; the fields and extras of an AdvantageResult, or of one that looks like it."""
    if isinstance(result, Mapping):
        return result
    extras = getattr(result, "extras", None)
    named = {name: getattr(result, name, None) for name in OUTPUTS}
    return {**(extras if isinstance(extras, Mapping) else {}), **{k: v for k, v in named.items() if v is not None}}


@contextlib.contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """What a second opinion draws does not change what later batches draw."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
