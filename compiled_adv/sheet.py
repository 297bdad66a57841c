"""Takes a title and sections of charts, tables and text; gives one self-contained HTML page, light and dark.

Nothing is fetched: plotly.js and the styles are in the page, and its content security policy forbids all else. Every
function here escapes what it is given and gives Markup; only Markup reaches the page as it is. A figure is plotly's
own JSON as plain dicts and lists, in which a colour is named as "@NAME" (COLOURS), so that it fits either theme; texts
of others (plotly reads tags in them) go through `label`.
"""

import base64
import hashlib
import html
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_adv.errors import ExtraMissing
from compiled_adv.files import write_whole

# Name -> light, dark. Series in this order (SERIES); states are never series.
COLOURS = {
    "blue": ("#2a78d6", "#3987e5"),
    "orange": ("#eb6834", "#d95926"),
    "green": ("#1baf7a", "#199e70"),
    "yellow": ("#eda100", "#c98500"),
    "pink": ("#e87ba4", "#d55181"),
    "violet": ("#4a3aa7", "#9085e9"),
    "red": ("#e34948", "#e66767"),
    "good": ("#0c8a0c", "#2bb52b"),
    "warn": ("#b97700", "#fab219"),
    "bad": ("#c53030", "#f06a6a"),
    "page": ("#f6f6f3", "#0f0f0e"),
    "surface": ("#ffffff", "#1a1a19"),
    "ink": ("#0b0b0b", "#f5f5f2"),
    "soft": ("#52514e", "#c3c2b7"),
    "faint": ("#757470", "#97958c"),
    "line": ("#e1e0d9", "#33332f"),
    "neutral": ("#f0efec", "#383835"),
    "negative": ("#d03b3b", "#e66767"),
    "positive": ("#2a78d6", "#3987e5"),
}
SERIES = tuple(f"@{name}" for name in ("blue", "orange", "green", "yellow", "pink", "violet", "red"))
DIVERGING = [[0.0, "@negative"], [0.5, "@neutral"], [1.0, "@positive"]]  # a plotly colour scale around 0

LONGEST = 2000  # characters of one text


class Markup(str):
    """HTML that is safe to put into a page as it is."""


@dataclass(frozen=True)
class Section:
    """A heading, what is to be read from what follows in one or two sentences, and the blocks below it."""

    title: str
    blocks: Sequence[Markup]
    note: str = ""


@dataclass(frozen=True)
class Tile:
    """A headline number: what, how much, one line below it. `state`: good, warn, bad, or nothing to judge."""

    name: str
    value: str
    note: str = ""
    state: str = ""


def page(title: str, sections: Iterable[Section], *, lead: str = "", script: str = "") -> str:
    """The whole page. `lead`: a line under the title. `script`: more of our own JavaScript, run after the charts are
    drawn; `redraw()` draws them again.

    Raises ExtraMissing without plotly."""
    sections = [*sections]
    # a </script> would end it; in a comparison of ours it could only stand in a string
    scripts = [_plotly(), SCRIPT.replace("THEMES", _json(_themes())), script]
    scripts = [each.replace("</script", "<\\/script") for each in scripts if each]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    contents = "".join(f'<a href="#s{i}">{escape(s.title)}</a>' for i, s in enumerate(sections) if s.title)
    body = "".join(_section(f"s{i}", section) for i, section in enumerate(sections))
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_style()}</style></head><body><header><div>",
            f"<h1>{escape(title)}</h1><p>{escape(lead)}</p></div>",
            '<button id="theme" type="button" aria-label="light or dark">&#9680;</button></header>',
            f"<nav>{contents}</nav><main>{body}</main>",
            *(f"<script>{each}</script>" for each in scripts),
            "</body></html>\n",
        )
    )


def write(path: Path, content: str) -> None:
    """A page as a file, whole or not at all. Raises OutputFailed."""
    write_whole(path, content.encode())


def escape(text: object, most: int = LONGEST) -> Markup:
    """Text that stays text, in an element or a quoted attribute: cut short, and what cannot be seen by its number."""
    return Markup(html.escape(shown(text, most)))


def label(text: object, most: int = 40) -> str:
    """Text of others as plotly is to show it: it reads tags, and a template's %{}."""
    return html.escape(shown(text, most), quote=False).replace("%", "&#37;").replace("@", "&#64;")


def shown(text: object, most: int = LONGEST) -> str:
    """At most so many characters; controls, direction marks and halves of surrogate pairs as \\u escapes."""
    text = str(text)
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else _by_number(c) for c in text)


def _by_number(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 1 << 16 else f"\\U{ord(c):08x}"


# ---- blocks ----


def paragraph(text: str) -> Markup:
    return Markup(f"<p>{escape(text)}</p>")


def tiles(all_tiles: Iterable[Tile]) -> Markup:
    """Headline numbers in a row."""
    each = "".join(
        f'<div class="tile {escape(t.state)}"><span>{escape(t.name)}</span><b>{escape(t.value)}</b>'
        f"<small>{escape(t.note)}</small></div>"
        for t in all_tiles
    )
    return Markup(f'<div class="tiles">{each}</div>')


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Cells are Markup as it is, numbers to the right, anything else as text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return Markup(f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def _cell(value: object) -> str:
    if isinstance(value, Markup):
        return f"<td>{value}</td>"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="n">{escape(number(value))}</td>'
    return f"<td>{'' if value is None else escape(value)}</td>"


def number(x: float) -> str:
    """As a reader wants it: four digits that count, thousands apart."""
    if isinstance(x, int) or (math.isfinite(x) and x == int(x) and abs(x) < 1e6):
        return f"{int(x):,}"
    return f"{x:,.0f}" if 1e4 <= abs(x) < 1e6 else f"{x:.4g}"


def chart(title: str, figure: Mapping[str, Any], behind: Markup, *, note: str = "", height: int = 320) -> Markup:
    """A figure {"data": ..., "layout": ...} with axis titles of its own, and the table `behind` it, folded.

    Numbers that are not finite are gaps."""
    height_px = f'style="height:{int(height)}px"'
    return Markup(
        f"<figure><figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>"
        f'<div class="chart" role="img" aria-label="{escape(title)}" {height_px}></div>'
        f'<script type="application/json">{_json(figure)}</script>'
        f"<details><summary>as a table</summary>{behind}</details></figure>"
    )


def columns(*blocks: Markup, narrow: bool = False) -> Markup:
    """Blocks side by side where the window is wide enough: two, or three if they are `narrow`."""
    return Markup(f'<div class="columns{" narrow" if narrow else ""}">{"".join(blocks)}</div>')


def folded(title: str, *blocks: Markup) -> Markup:
    """Blocks behind a line that opens them."""
    return Markup(f"<details><summary>{escape(title)}</summary>{''.join(blocks)}</details>")


def _section(name: str, section: Section) -> str:
    head = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return f'<section id="{name}">{head}{note}{"".join(section.blocks)}</section>'


# ---- what is in every page ----


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        what = "pages need plotly, which is an extra"
        raise ExtraMissing(what, hint="pip install 'compiled-adv[report]'") from None
    return get_plotlyjs()


def _json(value: Any) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(_finite(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _themes() -> dict[str, dict[str, str]]:
    return {theme: {f"@{name}": both[i] for name, both in COLOURS.items()} for i, theme in enumerate(("light", "dark"))}


def _style() -> str:
    light, dark = ("".join(f"--{name}:{both[i]};" for name, both in COLOURS.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){{color-scheme:dark;{dark}}}}}{STYLE}"
    )


STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
header,nav,main{max-width:1240px;margin:0 auto;padding:0 24px}
header{display:flex;justify-content:space-between;align-items:flex-start;gap:24px;padding-top:24px}
h1{font-size:24px;margin:0;overflow-wrap:anywhere}h2{font-size:18px;margin:0 0 4px}
header p,.note,figcaption,small{color:var(--soft)}header p{margin:2px 0 12px;overflow-wrap:anywhere}
.note{margin:0 0 12px;max-width:95ch}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;padding-bottom:8px}nav a,summary{color:var(--soft)}
a{color:var(--blue)}
button,select{font:inherit;color:var(--ink);background:var(--surface);border:1px solid var(--line);border-radius:6px;
padding:4px 10px;cursor:pointer}
section{margin:0 0 20px;padding:18px 20px;background:var(--surface);border:1px solid var(--line);border-radius:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:0 0 16px}
.tile{border:1px solid var(--line);border-left:4px solid var(--line);border-radius:8px;padding:10px 12px;
display:flex;flex-direction:column}
.tile span{color:var(--soft);font-size:13px}td b{font-weight:600;white-space:nowrap}
.tile b{font-size:21px;line-height:1.25;font-weight:600}
.tile.good{border-left-color:var(--good)}.tile.warn{border-left-color:var(--warn)}
.tile.bad{border-left-color:var(--bad)}.tile small{line-height:1.35}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:8px 20px}
.columns.narrow{grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr))}
.columns>*{min-width:0}
figure{margin:0 0 14px;min-width:0}figcaption{margin:6px 0 2px}figcaption b{color:var(--ink);font-weight:600}
summary{cursor:pointer;font-size:13px}
.table{overflow:auto;max-height:420px;margin:6px 0}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:4px 14px 4px 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere;max-width:70ch}
thead th{position:sticky;top:0;background:var(--surface);color:var(--soft);font-weight:500;white-space:nowrap}
td.n,th.n{text-align:right}
pre{overflow:auto;max-height:420px;font-size:12.5px;background:var(--page);padding:10px;border-radius:6px}
.tokens{line-height:1.9;overflow-wrap:anywhere;white-space:pre-wrap;margin:6px 0}
.tokens span{border-radius:3px;padding:1px 2px}.tokens i{color:var(--faint);font-style:normal}
@media print{section{break-inside:avoid}nav,#theme{display:none}}
"""

# A figure keeps its JSON beside it, with colours by name, and is drawn anew when the theme changes.
SCRIPT = """
"use strict";
const themes = THEMES, dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
function theme() { return root.dataset.theme || (dark.matches ? "dark" : "light"); }
function coloured(value, colours) {
  if (typeof value === "string") return Object.hasOwn(colours, value) ? colours[value] : value;
  if (Array.isArray(value)) return value.map(each => coloured(each, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, colours)]));
}
function redraw() {
  const c = themes[theme()];
  for (const place of document.querySelectorAll(".chart")) {
    if (!place.offsetParent) continue;  // folded: drawn when it opens
    const figure = coloured(JSON.parse(place.parentElement.querySelector("script").textContent), c);
    const axis = {gridcolor: c["@line"], linecolor: c["@line"], zerolinecolor: c["@line"], automargin: true};
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 56, r: 16, t: 12, b: 44},
      font: {family: "system-ui, sans-serif", size: 12, color: c["@soft"]}, hovermode: "closest",
      hoverlabel: {bgcolor: c["@surface"], bordercolor: c["@line"], font: {color: c["@ink"]}},
      legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, ...figure.layout};
    for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter(k => /^[xy]axis/.test(k))]))
      layout[name] = {...axis, ...layout[name]};
    Plotly.react(place, figure.data, layout, {responsive: true, displaylogo: false, displayModeBar: false});
  }
}
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  redraw();
});
dark.addEventListener("change", redraw);
document.addEventListener("toggle", redraw, true);
redraw();
"""
