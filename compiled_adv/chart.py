"""Takes lines or bars and the table behind them; gives a section of a page that draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from compiled_adv import page
from compiled_adv.page import Section, label


@dataclass(frozen=True)
class Series:
    """One line or one set of bars. hover: a text for each point; colour: a name of page.COLOURS; bad: the points to
    mark; tags: what a filter asks."""

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


def section(chart: Chart) -> Section:
    """The chart as a section of its own."""
    figure = {"data": [_trace(each, chart) for each in chart.series], "layout": _layout(chart)}
    behind = page.table(chart.table.columns, chart.table.rows, chart.table.tags, one_line=True)
    block = page.chart(chart.title, figure, behind, height=chart.height, caption=False)
    return Section(chart.title, [block], chart.note)


def _texts(values: Sequence[Any]) -> list[Any]:
    return [label(value) if isinstance(value, str) else value for value in values]


def _trace(it: Series, chart: Chart) -> dict[str, Any]:
    colours = [f"@{'bad' if bad else it.colour}" for bad in it.bad or [False] * len(it.x)]
    common = {
        "name": label(it.name),
        "x": _texts(it.x),
        "y": _texts(it.y),
        "hovertext": _texts(it.hover),
        "hoverinfo": "text",
        "meta": dict(it.tags),
    }
    if it.kind == "bar":
        return common | {
            "type": "bar",
            "orientation": "h" if chart.flat else "v",
            "marker": {"color": colours},
            "text": _texts(it.label or ()),
            "textposition": "inside" if chart.stacked else "outside",
            "insidetextanchor": "middle",
            "constraintext": "inside" if chart.stacked else "none",
            "textangle": 0,
            "cliponaxis": False,
        }
    bad = it.bad or [False] * len(it.x)
    return common | {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {
            "color": f"@{it.colour}",
            "width": 3 if it.colour == "blue" else 2,
            "dash": "dash" if it.dash else "solid",
        },
        "marker": {
            "color": colours,
            "opacity": 1,
            "size": [13 if each else 7 for each in bad],
            "symbol": ["x" if each else "circle" for each in bad],
        },
    }


def _layout(it: Chart) -> dict[str, Any]:
    x: dict[str, Any] = {"title": {"text": it.x_title}}
    y: dict[str, Any] = {"title": {"text": it.y_title}}
    if it.ticks:
        x |= {"tickmode": "array", "tickvals": [at for at, _ in it.ticks], "ticktext": [label(t) for _, t in it.ticks]}
    elif not it.flat:
        x["type"] = "category"
    if it.flat:
        y |= {"type": "category", "autorange": "reversed"}
    for axis, log in ((x, it.x_log), (y, it.y_log)):
        if log:
            axis["type"] = "log"
    across, along = ("x", "y") if it.flat else ("y", "x")
    line = {f"{across}0": it.line_at, f"{across}1": it.line_at, f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1}
    style = {"type": "line", "layer": "below", "line": {"color": "@soft", "width": 1, "dash": "dot"}}
    return {
        "xaxis": x,
        "yaxis": y,
        "shapes": [] if it.line_at is None else [style | line],
        "barmode": "stack" if it.stacked else "group",
        "uniformtext": {"minsize": 11, "mode": "hide"} if it.stacked else {},  # what is not readable is in the table
        "bargap": 0.32,
        "bargroupgap": 0.06,
    }
