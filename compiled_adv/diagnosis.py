"""Takes what a look at a configuration and rollouts found; gives Diagnosis: the findings as data, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compiled_adv.idle import Idle


@dataclass(frozen=True)
class Change:
    """How far apart two results are on active tokens: rows that differ, the largest and the mean difference."""

    rows: int
    largest: float
    mean: float

    @property
    def text(self) -> str:
        if not self.rows:
            return "moves no advantage"
        of, mean, largest = _count(self.rows, "row"), _number(self.mean), _number(self.largest)
        return f"moves the advantages of {of}, by {mean} a token on average and {largest} at most"


@dataclass(frozen=True)
class Sight:
    """A warning in one batch. rows: under the configured rules; other_rows: under the other ones, where they differ."""

    batch: str
    rows: list[int]
    of: int
    other_rows: list[int] | None
    change: Change | None  # None: the rule alone moves nothing, or nothing could be computed


@dataclass(frozen=True)
class Finding:
    """A warning, or a refusal, in all batches where it was seen."""

    name: str
    what: str
    help: str
    repaired: bool  # by strict rules
    sights: list[Sight]

    @property
    def harm(self) -> tuple[float, float]:
        """Larger is worse: by change first, by share of rows next."""
        moved = sum(sight.change.mean * sight.of for sight in self.sights if sight.change)
        return moved, sum(len(sight.rows) for sight in self.sights) / sum(sight.of for sight in self.sights)


@dataclass(frozen=True)
class Batch:
    """Facts of one batch."""

    name: str
    rows: int
    tokens: int
    generated: int
    padding: float  # share of slots that hold no token
    bucket: str | None
    bucket_padding: float | None  # the same, of the bucket that serves it
    strict: Change | None  # what strict rules change
    refused: dict[str, str]  # rule set -> why it refuses this batch


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    rules: str
    backend: str
    override: str | None
    batches: list[Batch]
    findings: list[Finding]
    functions: list[dict[str, Any]]
    keys: list[Idle]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def text(diagnosis: Diagnosis) -> str:
    """The diagnosis for people."""
    return "\n\n".join(
        part
        for part in (
            _head(diagnosis),
            *(_finding(i, each, diagnosis) for i, each in enumerate(diagnosis.findings, 1)),
            _rules(diagnosis),
            _padding(diagnosis),
            _places(diagnosis),
            _keys(diagnosis),
        )
        if part
    )


def _head(d: Diagnosis) -> str:
    rows, generated = sum(b.rows for b in d.batches), sum(b.generated for b in d.batches)
    batches = f"{len(d.batches)} batches, " if len(d.batches) > 1 else ""
    seen = f"{batches}{_count(rows, 'row')}, {_count(generated, 'generated token')}"
    if d.override:
        return f"{seen}, computed by {d.override}: rules and warnings do not apply"
    if not d.findings:
        return f"{seen}, {d.rules} rules: nothing found that harms training"
    order = ", worst first" if len(d.findings) > 1 else ""
    return f"{seen}, {d.rules} rules: {_count(len(d.findings), 'thing')} that may harm training{order}"


def _finding(number: int, found: Finding, d: Diagnosis) -> str:
    lines = [f"{number}. {found.name}: {found.what}"]
    for sight in found.sights[:MOST]:
        where = f"{sight.batch}: " if len(d.batches) > 1 else ""
        lines.append(f"   {where}{len(sight.rows) or 'none'} of {_count(sight.of, 'row')}{_which(sight.rows)}")
        if sight.other_rows is not None:
            count = f"{len(sight.other_rows) or 'none'} of {_count(sight.of, 'row')}"
            lines.append(f"   under {_other(d)} rules {count}{_which(sight.other_rows)}")
        if sight.change is not None:
            lines.append(f"   {_cause(found.name)} {sight.change.text}")
    lines += _more(found.sights, "batches")
    if found.help:
        also = ", or set advantage.rules: strict" if found.repaired and d.rules == "default" else ""
        lines.append(f"   try {found.help}{also}")
    return "\n".join(lines)


def _cause(name: str) -> str:
    return "counting them as truncated" if name == "truncated_by_width" else "its strict rule"


def _rules(d: Diagnosis) -> str:
    if d.override:
        return ""
    lines = []
    for b in d.batches[:MOST]:
        where = f"{b.name}: " if len(d.batches) > 1 else ""
        lines += [f"  {where}{rules} rules refuse it: {_first(error)}" for rules, error in b.refused.items()]
        if b.strict is not None:
            given = "with is_truncated given, it " if "strict" in b.refused else ""
            lines.append(f"  {where}{given}{b.strict.text}")
    head = f"What advantage.rules: {_other(d)} would change, all in all"
    return "\n".join([head, *lines, *_more(d.batches, "batches")])


def _other(d: Diagnosis) -> str:
    """The rules that are not configured."""
    return "strict" if d.rules == "default" else "default"


def _padding(d: Diagnosis) -> str:
    lines = []
    for b in d.batches[:MOST]:
        line = f"  {b.name}: {b.rows} x {b.tokens}, {b.padding:.0%} of it padding"
        if b.bucket_padding is not None:
            line += f"; in the bucket {b.bucket}, {b.bucket_padding:.0%}"
        elif b.bucket is not None:
            line += f"; {b.bucket}"
        lines.append(line)
    wasteful = [b for b in d.batches if b.bucket_padding is not None and b.bucket_padding - b.padding > 0.1]
    if wasteful:
        rows, tokens = (sorted(sizes)[-3:] for sizes in ({b.rows for b in wasteful}, {b.tokens for b in wasteful}))
        lines.append(f"  try boundaries that fit: actor.advantage.compiled.buckets: {{rows: {rows}, tokens: {tokens}}}")
    return "\n".join(["Padding", *lines, *_more(d.batches, "batches")])


def _places(d: Diagnosis) -> str:
    """Users' functions that are not part of the compiled program."""
    split = [each for each in d.functions if each["where"] != "program"]
    lines = []
    for each in split:
        lines.append(f"  {each['function']} ({each['config']}) runs {each['where']}: {each['why']}")
        lines += [f"    {label} {each[key]}" for label, key in (("at", "line"), ("try", "hint")) if each.get(key)]
    return "\n".join(["Your functions that split the program", *lines]) if split else ""


def _keys(d: Diagnosis) -> str:
    if not d.keys:
        return ""
    return "\n".join(["Keys without effect", *(f"  {each.key}: {each.value}   ({each.why})" for each in d.keys)])


MOST = 6


def _more(things: Sequence[Any], noun: str) -> list[str]:
    return [f"   and {len(things) - MOST} more {noun}"] if len(things) > MOST else []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(x: float) -> str:
    """Three digits, and never an exponent that hides how large it is."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _which(rows: Sequence[int]) -> str:
    """Rows as ranges, as many as fit."""
    if not rows:
        return ""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row - 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges]
    shown = words[:12]
    return f" ({' '.join(shown)}{' ...' if len(words) > len(shown) else ''})"


def _first(error: str) -> str:
    return error.splitlines()[0]
