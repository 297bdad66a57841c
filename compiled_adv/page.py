"""Takes charts and tables; gives one HTML page that holds all it needs: plotly, data, styles. Nothing is fetched.

Every text may come from a file of others. HTML is escaped here, what plotly draws is escaped for its own markup, data
is JSON without a `<`, and the page's own policy lets no other script run.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compiled_adv.errors import FileError, OutputFailed

# Colour of a series by its key, in light and in dark: the same contender looks the same in every chart.
COLOURS: dict[str, tuple[str, str]] = {
    "compiled": ("#2563c9", "#79aefc"),
    "eager": ("#0f8f80", "#48cbb8"),
    "floor": ("#7b828c", "#9aa3af"),
    "areal": ("#d9731a", "#ffa057"),
    "verl": ("#8350c4", "#bd9af5"),
    "torchrl": ("#c9376b", "#ff86ab"),
    "column_loop": ("#8f6233", "#d3a26c"),
    "turn_scatter": ("#6f8016", "#b9c95a"),
    "bad": ("#cc2936", "#ff6b75"),
}
SPARE = ("compiled", "areal", "eager", "verl", "torchrl", "column_loop", "turn_scatter", "floor")
LONGEST = 160  # characters of one text that came from a file


@dataclass(frozen=True)
class Series:
    """One line or one set of bars. hover: a text for each point; bad: the points to mark; tags: what a filter asks."""

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    hover: Sequence[str]
    colour: str
    kind: Literal["line", "bar"] = "line"
    dash: bool = False
    label: Sequence[str] | None = None  # on bars
    bad: Sequence[bool] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Cells as texts; tags: of each row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    tags: Sequence[Mapping[str, str]] | None = None


@dataclass(frozen=True)
class Chart:
    """ticks: (place, text) of the x axis where they are not its own; flat: bars lie, so that x holds the numbers."""

    title: str
    note: str
    series: Sequence[Series]
    table: Table
    x_title: str
    y_title: str
    x_log: bool = False
    y_log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None
    flat: bool = False
    stacked: bool = False
    line_at: float | None = None  # a reference line across the numbers' axis
    height: int = 400


@dataclass(frozen=True)
class Page:
    """filters: name -> its choices; the first is chosen when the page opens. absent: what is not drawn, and why."""

    title: str
    headline: str
    facts: Sequence[tuple[str, str]]
    charts: Sequence[Chart]
    filters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    absent: Sequence[str] = ()


def short(text: object) -> str:
    """One line of text that came from a file."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    line = line.encode(errors="replace").decode()  # halves of a surrogate pair
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _text(value: object) -> str:
    return html.escape(short(value))


def _script_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _series(it: Series) -> dict[str, Any]:
    def drawn(value: Any) -> Any:
        return _text(value) if isinstance(value, str) else value

    return {
        "name": _text(it.name),
        "x": [drawn(x) for x in it.x],
        "y": [drawn(y) for y in it.y],
        "hover": [_text(x) for x in it.hover],
        "colour": it.colour,
        "kind": it.kind,
        "dash": it.dash,
        "label": None if it.label is None else [_text(x) for x in it.label],
        "bad": None if it.bad is None else list(it.bad),
        "tags": {key: short(x) for key, x in it.tags.items()},
    }


def _chart(it: Chart) -> dict[str, Any]:
    names = ("x_title", "y_title", "x_log", "y_log", "flat", "stacked", "line_at", "height")
    ticks = None if it.ticks is None else [[x for x, _ in it.ticks], [_text(text) for _, text in it.ticks]]
    return {name: getattr(it, name) for name in names} | {"ticks": ticks, "series": [_series(x) for x in it.series]}


def _table(it: Table) -> str:
    head = "".join(f"<th>{_text(x)}</th>" for x in it.columns)
    tags = it.tags or [{}] * len(it.rows)
    rows = "".join(
        f'<tr data-tags="{html.escape(json.dumps({k: short(x) for k, x in tag.items()}))}">'
        + "".join(f"<td>{_text(x)}</td>" for x in row)
        + "</tr>"
        for row, tag in zip(it.rows, tags, strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def render(page: Page) -> str:
    """The whole page."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise FileError("a page needs the extra `report`", hint="pip install 'compiled-adv[report]'") from None
    sections = "".join(
        f'<section id="chart-{i}"><h2>{_text(chart.title)}</h2><p class="note">{html.escape(chart.note)}</p>'
        f'<div class="plot" role="img" aria-label="{_text(chart.title)}"></div>'
        '<p class="nothing" hidden>Nothing was measured for this choice.</p>'
        f"<details><summary>The numbers, as a table</summary>{_table(chart.table)}</details></section>"
        for i, chart in enumerate(page.charts)
    )
    filters = "".join(
        f'<label>{_text(name)} <select data-filter="{_text(name)}">'
        + "".join(f'<option value="{_text(x)}">{_text(x)}</option>' for x in choices)
        + "</select></label>"
        for name, choices in page.filters.items()
    )
    facts = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in page.facts)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in page.notes)
    absent = "".join(f"<li>{_text(x)}</li>" for x in page.absent)
    if absent:
        notes += f"<h2>Not shown</h2><ul>{absent}</ul>"
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js"))
    data = _script_json({"charts": [_chart(x) for x in page.charts], "colours": COLOURS})
    nonce = hashlib.sha256((page.title + data).encode()).hexdigest()[:32]
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><title>{_text(page.title)}</title><style>{style}</style></head><body>
<header><div class="bar"><span class="name">{_text(page.title)}</span>
<button id="scheme" type="button" title="light or dark">◐</button></div>
<h1>{_text(page.headline)}</h1><dl>{facts}</dl></header>
<nav{"" if filters else " hidden"}>{filters}</nav>
<main>{sections}</main><footer>{notes}</footer>
<script nonce="{nonce}">{get_plotlyjs()}</script>
<script nonce="{nonce}" type="application/json" id="data">{data}</script>
<script nonce="{nonce}">{script}</script></body></html>
"""


def write(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written", found=error.strerror) from error
