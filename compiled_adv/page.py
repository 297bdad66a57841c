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

# Name -> light, dark. Those of series first; states ("good" to "bad") are never series.
COLOURS = {
    "blue": ("#2563c9", "#79aefc"),
    "orange": ("#d9731a", "#ffa057"),
    "green": ("#0f8f80", "#48cbb8"),
    "violet": ("#8350c4", "#bd9af5"),
    "pink": ("#c9376b", "#ff86ab"),
    "brown": ("#8f6233", "#d3a26c"),
    "olive": ("#6f8016", "#b9c95a"),
    "grey": ("#7b828c", "#9aa3af"),
    "good": ("#1a8a3c", "#3fb963"),
    "warn": ("#b97700", "#f5b53d"),
    "bad": ("#cc2936", "#ff6b75"),
    "page": ("#f6f7f9", "#11141a"),
    "surface": ("#ffffff", "#191e26"),
    "ink": ("#1b1f26", "#e8ebf0"),
    "soft": ("#5b6472", "#9aa4b2"),
    "faint": ("#78818f", "#7f8998"),
    "line": ("#e1e5ea", "#2b323d"),
    "neutral": ("#eef0f3", "#333b47"),
    "negative": ("#cc2936", "#ff6b75"),
    "positive": ("#2563c9", "#79aefc"),
}
SERIES = tuple(f"@{name}" for name in ("blue", "orange", "green", "violet", "pink", "brown", "olive", "grey"))
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


def page(
    title: str,
    sections: Iterable[Section],
    *,
    lead: str = "",
    headline: str = "",
    facts: Iterable[tuple[str, str]] = (),
    filters: Mapping[str, Sequence[str]] | None = None,
    footer: Iterable[Markup] = (),
) -> str:
    """The whole page. `lead`: a line under the title. `headline`: the main result, in place of the title. `facts`:
    names and values below it. `filters`: name -> its choices, in place of the contents; the first is chosen.

    Raises ExtraMissing without plotly."""
    sections = [*sections]
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js"))
    # a </script> would end it; in a comparison of ours it could only stand in a string
    scripts = [
        each.replace("</script", "<\\/script") for each in (_plotly(), f"const themes = {_json(_themes())};{script}")
    ]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    body = "".join(_section(f"s{i}", section) for i, section in enumerate(sections))
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{_variables()}{style}</style></head><body><header>",
            f'<div class="bar">{f"<span>{escape(title)}</span>" if headline else f"<h1>{escape(title)}</h1>"}',
            '<button id="theme" type="button" title="light or dark" aria-label="light or dark">&#9680;</button></div>',
            f"<h1>{escape(headline)}</h1>" if headline else "",
            f"<p>{escape(lead)}</p>" if lead else "",
            f"<dl>{pairs}</dl>" if pairs else "",
            f"</header>{_nav(sections, filters or {})}<main>{body}</main><footer>{''.join(footer)}</footer>",
            *(f"<script>{each}</script>" for each in scripts),
            "</body></html>\n",
        )
    )


def _nav(sections: Sequence[Section], filters: Mapping[str, Sequence[str]]) -> str:
    if not filters:
        links = "".join(f'<a href="#s{i}">{escape(s.title)}</a>' for i, s in enumerate(sections) if s.title)
        return f"<nav>{links}</nav>"
    choices = "".join(
        f'<label>{escape(name)} <select data-filter="{escape(name)}">'
        + "".join(f'<option value="{escape(each)}">{escape(each)}</option>' for each in offered)
        + "</select></label>"
        for name, offered in filters.items()
    )
    return f'<nav class="filters">{choices}</nav>'


def escape(text: object, most: int = LONGEST) -> Markup:
    """Text that stays text, in an element or a quoted attribute: cut short, and what cannot be seen by its number."""
    return Markup(html.escape(visible(text, most)))


def label(text: object, most: int = 160) -> str:
    """Text of others as plotly is to show it: it reads tags, and a template's %{}."""
    return html.escape(visible(text, most), quote=False).replace("%", "&#37;").replace("@", "&#64;")


def visible(text: object, most: int = LONGEST) -> str:
    """At most so many characters; controls, direction marks and halves of surrogate pairs as \\u escapes."""
    text = str(text)
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else _by_number(c) for c in text)


def _by_number(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 1 << 16 else f"\\U{ord(c):08x}"


# ---- blocks ----


def paragraph(text: str) -> Markup:
    return Markup(f"<p>{escape(text)}</p>")


def bullets(texts: Iterable[str]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>")


def tiles(all_tiles: Iterable[Tile]) -> Markup:
    """Headline numbers in a row."""
    each = "".join(
        f'<div class="tile {escape(t.state)}"><span>{escape(t.name)}</span><b>{escape(t.value)}</b>'
        f"<small>{escape(t.note)}</small></div>"
        for t in all_tiles
    )
    return Markup(f'<div class="tiles">{each}</div>')


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    tags: Iterable[Mapping[str, str]] | None = None,
    *,
    one_line: bool = False,
) -> Markup:
    """Cells are Markup as it is, numbers to the right, anything else as text. `tags`: what a filter asks of each row.
    `one_line`: no cell but the last is broken into lines."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ["".join(map(_cell, row)) for row in rows]
    marks = [""] * len(lines) if tags is None else [f' data-tags="{escape(json.dumps({**each}))}"' for each in tags]
    body = "".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, lines, strict=True))
    shape = "table one-line" if one_line else "table"
    return Markup(f'<div class="{shape}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def _cell(value: object) -> str:
    if isinstance(value, Markup):
        return f"<td>{value}</td>"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="n">{escape(number(value))}</td>'
    return f"<td>{'' if value is None else escape(value)}</td>"


def number(x: float) -> str:
    """As a reader wants it: four digits that count, thousands apart; a dash for NaN."""
    if x != x:
        return "–"
    if isinstance(x, int) or (math.isfinite(x) and x == int(x) and abs(x) < 1e6):
        return f"{int(x):,}"
    return f"{x:,.0f}" if 1e4 <= abs(x) < 1e6 else f"{x:.4g}"


def chart(
    title: str, figure: Mapping[str, Any], behind: Markup, *, note: str = "", height: int = 320, caption: bool = True
) -> Markup:
    """A figure {"data": ..., "layout": ...} with axis titles of its own, and the table `behind` it, folded.

    A trace's "meta" says what a filter asks of it. Numbers that are not finite are gaps. `caption`: False where the
    section's title is the chart's."""
    above = f"<figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>" if caption else ""
    return Markup(
        f'<figure>{above}<div class="chart" role="img" aria-label="{escape(title)}" style="height:{int(height)}px">'
        '</div><p class="nothing" hidden>Nothing was measured for this choice.</p>'
        f'<script type="application/json">{_json(figure)}</script>'
        f"<details><summary>The numbers, as a table</summary>{behind}</details></figure>"
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


def _variables() -> str:
    light, dark = ("".join(f"--{name}:{both[i]};" for name, both in COLOURS.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){{color-scheme:dark;{dark}}}}}"
    )
