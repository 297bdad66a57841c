"""Takes a computed batch; gives its counts, times, moments of each channel and warnings, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_adv.channel import OUTPUTS
from compiled_adv.status import WARNINGS

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class ChannelNumbers:
    """One output channel over the active tokens, or over the rows; None where there are none."""

    over: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None


@dataclass(frozen=True)
class Summary:
    """What one batch was, how long it took, and what came out."""

    name: str
    rows: int
    active_tokens: int
    groups: int
    seconds: float
    channels: dict[str, ChannelNumbers]
    warnings: dict[str, int]  # name -> number of rows

    @property
    def tokens_per_second(self) -> float:
        return self.active_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def summarise(
    name: str,
    batch: Mapping[str, Any],
    out: Mapping[str, Any],
    *,
    groups: int,
    seconds: float,
    warnings: Mapping[str, list[int]],
) -> Summary:
    """`out` is what was computed of `batch`; a channel that passed through is the same object in both."""
    active_BT = out["loss_mask"] != 0
    computed = [key for key, value in out.items() if isinstance(value, Tensor) and value is not batch.get(key)]
    computed.sort(key=[*OUTPUTS, *computed].index)
    return Summary(
        name=name,
        rows=len(active_BT),
        active_tokens=int(active_BT.sum()),
        groups=groups,
        seconds=seconds,
        channels={key: _numbers(out[key], active_BT) for key in computed},
        warnings={warning: len(rows) for warning, rows in warnings.items()},
    )


def together(parts: Sequence[Summary]) -> Summary:
    """One batch that was computed in parts, at once."""
    first = parts[0]
    return Summary(
        name=first.name,
        rows=sum(part.rows for part in parts),
        active_tokens=sum(part.active_tokens for part in parts),
        groups=sum(part.groups for part in parts),
        seconds=max(part.seconds for part in parts),
        channels={name: _merged([(part, part.channels[name]) for part in parts]) for name in first.channels},
        warnings={
            name: sum(part.warnings.get(name, 0) for part in parts)
            for name in WARNINGS
            if any(name in part.warnings for part in parts)
        },
    )


def _merged(parts: Sequence[tuple[Summary, ChannelNumbers]]) -> ChannelNumbers:
    """Numbers of one channel over all parts."""
    over = parts[0][1].over
    known = [(part.active_tokens if over == "tokens" else part.rows, m) for part, m in parts if m.mean is not None]
    if not known:
        return ChannelNumbers(over, None, None, None, None)
    n_P = torch.tensor([n for n, _ in known], dtype=torch.float64)
    mean_P, std_P, min_P, max_P = torch.tensor([(m.mean, m.std, m.min, m.max) for _, m in known], dtype=torch.float64).T
    mean = (n_P * mean_P).sum() / n_P.sum()
    std = ((n_P * (std_P**2 + (mean_P - mean) ** 2)).sum() / n_P.sum()).sqrt()
    return ChannelNumbers(over, *(float(x) for x in (mean, std, min_P.min(), max_P.max())))


def _numbers(channel: Tensor, active_BT: Tensor) -> ChannelNumbers:
    per_token = channel.shape == active_BT.shape
    numbers = (channel[active_BT] if per_token else channel).to(torch.float64)
    over = "tokens" if per_token else "rows"
    if not numbers.numel():
        return ChannelNumbers(over, None, None, None, None)
    std = numbers.std(correction=0)  # of these numbers themselves: one alone has none
    return ChannelNumbers(over, *(float(x) for x in (numbers.mean(), std, numbers.min(), numbers.max())))


def result_table(summary: Summary) -> RenderableType:
    """Facts, channels and warnings of one batch, for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    facts = Table(title=summary.name, title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("rows", "active tokens", "groups", "seconds", "tokens/s"):
        facts.add_column(title, justify="right")
    facts.add_row(
        f"{summary.rows:,}",
        f"{summary.active_tokens:,}",
        f"{summary.groups:,}",
        f"{summary.seconds:.4f}",
        f"{summary.tokens_per_second:,.0f}",
    )
    channels = Table(box=box.SIMPLE_HEAD)
    channels.add_column("channel", no_wrap=True)
    channels.add_column("over")
    for title in ("mean", "std", "min", "max"):
        channels.add_column(title, justify="right")
    for name, moments in summary.channels.items():
        numbers = (moments.mean, moments.std, moments.min, moments.max)
        channels.add_row(name, moments.over, *("-" if x is None else f"{x:.4g}" for x in numbers))
    if not summary.warnings:
        return Group(facts, channels)
    warnings = Table(box=box.SIMPLE_HEAD)
    warnings.add_column("warning", no_wrap=True)
    warnings.add_column("rows", justify="right")
    for name, rows in summary.warnings.items():
        warnings.add_row(name, f"{rows:,}")
    return Group(facts, channels, warnings)
