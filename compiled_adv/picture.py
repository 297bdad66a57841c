"""Takes the facts of `explain("json")`; gives the graph of stages as inline SVG, what each pass made in its colour.

Stages stand in layers, each below all that it reads. What one stage writes flows down in one line that branches to its
readers, so that a channel with ten readers is one line and not ten. Colours are the page's variables: both themes fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from compiled_adv.page import SERIES, Markup, escape, visible

LINE, PAD, LETTER = 15, 7, 7.7  # pixels: of a line of text, around the lines, of a letter's width
GAP, LANE, BETWEEN = 14, 12, 30  # between stages of a layer, for a line that passes between them, between layers
LONGEST = 30  # letters of a line; the whole of it is in the hover text
SWEEPS = 12
UPRIGHT = 0.85  # how far stages follow their neighbours away from the middle


@dataclass
class Box:
    """A stage, or where a line passes a layer (no lines of text). Coordinates are of its centre and its upper edge."""

    lines: Sequence[str] = ()
    writes: Sequence[str] = ()
    title: str = ""
    colour: str = ""
    yours: bool = False
    x: float = 0.0
    y: float = 0.0
    width: float = LANE
    height: float = 0.0
    floor: float = 0.0  # the lower edge of its layer
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)


def drawing(facts: Mapping[str, Any]) -> Markup:
    """The Pipeline as it runs, below a legend of the passes that changed it."""
    stages = facts["pipelines"][-1]["stages"]
    made, done = _made(facts["pipelines"])
    colours = {name: f"var(--{SERIES[i % len(SERIES)].removeprefix('@')})" for i, name in enumerate(done)}
    functions = {each["name"]: each["function"] for each in facts["functions"]}
    boxes = {s["name"]: _box(s, made.get(s["name"], ""), colours, functions) for s in stages}
    writer = {version: s["name"] for s in stages for version in s["writes"]}
    flows = [(writer[v], s["name"], v) for s in stages for v in dict.fromkeys(s["reads"]) if v in writer]
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(boxes)
    graph.add_edges_from((a, b) for a, b, _ in flows)
    _place(_layers(graph, boxes), boxes)
    return Markup(_legend(done, colours, bool(functions)) + _svg(graph, boxes, flows))


def _made(pipelines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """Stage -> the pass that made it; pass -> what it did, in words."""
    made: dict[str, str] = {}
    done: dict[str, str] = {}
    for before, after in zip(pipelines, pipelines[1:], strict=False):
        old, new = ({s["name"]: s["stage"] for s in each["stages"]} for each in (before, after))
        fresh = [name for name in new if old.get(name) != new[name]]
        gone = [name for name in old if name not in new]
        made |= dict.fromkeys(fresh, after["after"])
        what = f"{len(gone)} stages in {len(fresh)}" if fresh and gone else f"{len(fresh)} changed"
        done[after["after"]] = what if fresh else f"without {', '.join(gone)}"
    return made, done


def _box(stage: Mapping[str, Any], by: str, colours: Mapping[str, str], functions: Mapping[str, str]) -> Box:
    lines = [_short(part) for part in stage["name"].split("+")]
    if function := functions.get(stage["name"]):
        lines.append(_short(function.rsplit(".", 1)[-1]))
    writes = [_short(version) for version in stage["writes"]]
    rows = _rows(writes)
    reads = ", ".join(name for name in stage["reads"] if name) or "nothing"
    title = "\n".join(
        [stage["stage"], f"reads {reads}", f"writes {', '.join(stage['writes']) or 'flags alone'}"]
        + ([f"made by the pass {by}"] if by else [])
        + ([function] if function else [])
    )
    width = 2 * PAD + LETTER * max(len(each) for each in (*lines, *rows))
    height = 2 * PAD + LINE * (len(lines) + len(rows))
    return Box(lines, rows, title, colours.get(by, ""), bool(function), width=max(70.0, width), height=height)


def _short(text: str) -> str:
    return visible(text, LONGEST)


def _rows(words: Sequence[str]) -> list[str]:
    """Words as lines of at most LONGEST letters."""
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + 2 + len(word) <= LONGEST:
            rows[-1] += f", {word}"
        else:
            rows.append(word)
    return rows


def _layers(graph: nx.DiGraph[str], boxes: dict[str, Box]) -> list[list[str]]:
    """Names by layer, from above. A line that passes a layer gets a place in it: one for each stage it comes from."""
    level = {name: i for i, names in enumerate(nx.topological_generations(graph)) for name in names}
    for name in graph:
        if not graph.in_degree(name) and graph.out_degree(name):  # not higher than its first reader needs
            level[name] = min(level[reader] for reader in graph.successors(name)) - 1
    layers: list[list[str]] = [[] for _ in range(1 + max(level.values(), default=0))]
    for name in boxes:
        layers[level[name]].append(name)
    for source in graph:
        last = source
        readers = sorted(graph.successors(source), key=level.__getitem__)
        for at in range(level[source] + 1, 1 + max((level[r] for r in readers), default=0)):
            here = [reader for reader in readers if level[reader] == at]
            for reader in here:
                _join(boxes, last, reader)
            if readers[-1] not in here:
                lane = f"{source}\n{at}"
                boxes[lane] = Box()
                layers[at].append(lane)
                _join(boxes, last, lane)
                last = lane
    return layers


def _join(boxes: Mapping[str, Box], upper: str, lower: str) -> None:
    boxes[upper].below.append(lower)
    boxes[lower].above.append(upper)


def _place(layers: Sequence[list[str]], boxes: Mapping[str, Box]) -> None:
    """Orders each layer by where its neighbours stand, then moves each towards them as far as its own layer allows."""
    y = 1.0
    for layer in layers:
        tallest = max(boxes[name].height for name in layer)
        for name in layer:
            boxes[name].y, boxes[name].floor = y, y + tallest
            if not boxes[name].lines:
                boxes[name].height = tallest
        y += tallest + BETWEEN
        _spread(layer, boxes)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers[:: 1 if down else -1]:
            _towards(layer, boxes, "above" if down else "below")
            layer.sort(key=lambda name: boxes[name].x)
            _spread(layer, boxes)
    for sweep in range(SWEEPS):
        for layer in layers[:: 1 if sweep % 2 == 0 else -1]:
            _towards(layer, boxes, "both")
            _apart(layer, boxes)
    left = min(box.x - box.width / 2 for box in boxes.values())
    for box in boxes.values():
        box.x += 1 - left


def _towards(layer: Sequence[str], boxes: Mapping[str, Box], side: str) -> None:
    for name in layer:
        box = boxes[name]
        near = {"above": box.above, "below": box.below, "both": box.above + box.below}[side]
        if near:
            box.x = UPRIGHT * sum(boxes[each].x for each in near) / len(near)


def _room(a: Box, b: Box) -> float:
    return (a.width + b.width) / 2 + (GAP if a.lines and b.lines else GAP / 2)


def _spread(layer: Sequence[str], boxes: Mapping[str, Box]) -> None:
    """Side by side, around 0."""
    x = 0.0
    for a, b in zip(layer, layer[1:], strict=False):
        boxes[a].x, x = x, x + _room(boxes[a], boxes[b])
    boxes[layer[-1]].x = x
    for name in layer:
        boxes[name].x -= x / 2


def _apart(layer: Sequence[str], boxes: Mapping[str, Box]) -> None:
    """Wanted places, moved no further than it takes to keep order and room: the mean of both ways to push."""
    wanted = [boxes[name].x for name in layer]
    right, left = [*wanted], [*wanted]
    for i in range(1, len(layer)):
        right[i] = max(right[i], right[i - 1] + _room(boxes[layer[i - 1]], boxes[layer[i]]))
    for i in range(len(layer) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - _room(boxes[layer[i]], boxes[layer[i + 1]]))
    for name, a, b in zip(layer, right, left, strict=True):
        boxes[name].x = (a + b) / 2


# ---- drawing ----


def _legend(done: Mapping[str, str], colours: Mapping[str, str], functions: bool) -> str:
    keys = [
        f'<span><i style="background:{colours[name]}"></i><b>{escape(name)}</b> {escape(what)}</span>'
        for name, what in done.items()
    ]
    keys += ['<span><i class="yours"></i>your own function</span>'] if functions else []
    return f'<p class="legend">{"".join(keys)}</p>' if keys else ""


def _svg(graph: nx.DiGraph[str], boxes: Mapping[str, Box], flows: Sequence[tuple[str, str, str]]) -> str:
    width = 1 + max(box.x + box.width / 2 for box in boxes.values())
    height = 1 + max(box.y + box.height for box in boxes.values())
    parts = []
    for name in graph:
        lanes = [name, *(each for each in boxes if each.startswith(f"{name}\n"))]
        paths = "".join(_path(boxes[lane], boxes[to]) for lane in lanes for to in boxes[lane].below)
        carried = dict.fromkeys(version for source, _, version in flows if source == name)
        hover = f"<title>{escape(name)}: {escape(', '.join(carried))}</title>" if carried else ""
        parts.append(f'<g class="flow"><g>{hover}{paths}</g>{_node(boxes[name])}</g>')
    marker = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.5L8 4L0 7.5z"/></marker>'
    )
    view = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    drawn = f'<svg class="graph" role="img" aria-label="the stages and what flows between them" {view}>'
    return f'<div class="graph-room">{drawn}<defs>{marker}</defs>{"".join(parts)}</svg></div>'


def _path(upper: Box, lower: Box) -> str:
    """Down to the end of the layer, so that it passes no taller neighbour, and over to the next one."""
    (x, y), (to_x, to_y) = (upper.x, upper.floor), (lower.x, lower.y)
    half = (to_y - y) / 2
    onward = "" if lower.lines else f"V{lower.floor:.1f}"
    head = ' marker-end="url(#head)"' if lower.lines else ""
    curve = f"C{x:.1f} {y + half:.1f} {to_x:.1f} {to_y - half:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path d="M{x:.1f} {upper.y + upper.height:.1f}V{y:.1f}{curve}{onward}"{head}/>'


def _node(box: Box) -> str:
    left, y = box.x - box.width / 2, box.y + PAD - 3
    texts = []
    for i, (line, kind) in enumerate([*((each, "stage") for each in box.lines), *((w, "writes") for w in box.writes)]):
        at = f'x="{box.x:.1f}" y="{y + LINE * (i + 1):.1f}"'
        texts.append(f'<text class="{kind}" {at}>{escape(line)}</text>')
    kind = " ".join(name for name, is_so in (("made", box.colour), ("yours", box.yours)) if is_so)
    style = f' style="--made:{box.colour}"' if box.colour else ""
    rect = f'<rect x="{left:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6"/>'
    return f'<g class="node {kind}"{style}><title>{escape(box.title)}</title>{rect}{"".join(texts)}</g>'
