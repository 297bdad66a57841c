"""Takes computed batches; gives one HTML page about each: is it healthy, and where does its signal come from.

    compiled_adv.report.write("report.html", compute, batch, meta)      # computes the batch, returns what it computed

The page is bounded whatever the batch: histograms, at most GROUPS prompts and ROWS rows of at most TOKENS tokens, and
says so. Everything that came with the batch is escaped (page.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_adv import page, picture
from compiled_adv.batch import as_meta
from compiled_adv.channel import OPTIONAL, STATS
from compiled_adv.compiler import Compute
from compiled_adv.errors import AdvantageWarning, PluginRaised, PluginResult
from compiled_adv.files import check_outputs, write_whole
from compiled_adv.page import Markup, Section, Tile, escape, label, number
from compiled_adv.status import WARNINGS

GROUPS, ROWS, TOKENS = 64, 8, 512  # most prompts, rows and tokens of a row that a page shows
BINS = 40
ROW_NUMBERS = 40  # of one warning

# Warnings by what they cost, worst first: those that change what is trained come before those that waste a batch.
RANK = (
    *("kl_without_reference", "outcome_on_masked_token", "weighted_flip", "rows_outside_groups", "truncated_by_width"),
    *("uncapped_length_penalty", "discarded_rows_counted", "loo_alone", "first_token_generated", "zero_spread_groups"),
)


@dataclass(frozen=True)
class Batch:
    """One computed batch. `decode`: token ids to text, such as a tokenizer's; without it, ids are shown."""

    name: str
    out: Mapping[str, Any]
    sizes: Sequence[int]  # rows of each prompt
    prompts: Sequence[str]  # what each prompt is called
    stats: Mapping[str, float]
    warnings: Mapping[str, Sequence[int]]
    seconds: float
    channels: tuple[str, ...] = ()  # the optional ones that it came with
    mode: str = "additive"  # of process shaping
    decode: Callable[[list[int]], str] | None = None


def write(
    path: str | Path,
    compute: Compute,
    batch: Mapping[str, Any],
    meta: Any = None,
    *,
    decode: Callable[[list[int]], str] | None = None,
    **per_call: Any,
) -> dict[str, Any]:
    """Compute a batch and write its report; gives what `compute(batch, meta, **per_call)` gives.

    `decode`: token ids to text, such as a tokenizer's; it gets one id at a time. Raises as compute does, and
    OutputFailed, ExtraMissing, or PluginRaised or PluginResult for `decode`."""
    check_outputs([Path(path)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)  # the page shows them
        out = compute(batch, meta, **per_call)
    mode = per_call.get("advantage_shaping_mode", "additive")
    found = batch_of("Batch", compute, batch, out, meta, mode=mode, decode=decode)
    write_whole(Path(path), report([found], compute).encode())
    return out


def batch_of(
    name: str,
    compute: Compute,
    batch: Mapping[str, Any],
    out: Mapping[str, Any],
    meta: Any,
    prompts: Sequence[str] = (),
    *,
    mode: str = "additive",
    decode: Callable[[list[int]], str] | None = None,
) -> Batch:
    """What a report says of the batch that `compute` has just computed. `prompts`: their names, such as of files."""
    meta = as_meta(meta)
    sizes = [len(out["loss_mask"])] if meta is None else [int(size) for size in meta.traj_group_sizes]
    names = prompts or [f"prompt {i}" for i in range(len(sizes))]
    stats = compute.stats()
    warned, channels = dict(compute.last_warnings), tuple(key for key in OPTIONAL if batch.get(key) is not None)
    return Batch(name, out, sizes, names, stats, warned, stats["seconds"], channels, mode, decode)


def report(batches: Sequence[Batch], compute: Compute) -> str:
    """The page."""
    lead = f"{len(batches)} batch{'es' if len(batches) > 1 else ''}, backend {compute.spec.advantage.backend}"
    why = _unmeasured(compute)
    sections = [section for batch in batches for section in _batch(batch, why)]
    graphs: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for batch in batches:
        graphs.setdefault((batch.channels, batch.mode), []).append(batch.name)
    for (channels, mode), names in graphs.items():
        title = "Pipeline" if len(graphs) == 1 else f"{', '.join(names)}: pipeline"
        sections.append(_pipeline(title, compute.explain("json", channels, mode)))
    return page.page("Batch report", sections, lead=lead)


def _unmeasured(compute: Compute) -> str:
    """Why there are no measurements; nothing where there are."""
    advantage = compute.spec.advantage
    if compute.spec.override:
        return (
            f"One function, {advantage.compute.implementation}, replaces the whole computation: it raises no warnings, "
            "and nothing is measured inside it. What it gave is below."
        )
    return "" if advantage.stats else "Nothing is measured in the batch: actor.advantage.stats is false."


def _batch(batch: Batch, why: str) -> list[Section]:
    return [
        Section(batch.name, [page.tiles(_tiles(batch)), _warnings(batch)], why),
        Section(
            f"{batch.name}: prompts",
            [page.columns(_rewards(batch), _advantages(batch)), _distributions(batch)],
            "A prompt whose rollouts all earn the same reward teaches nothing under a group baseline."
            + _left_out(len(batch.sizes), GROUPS, "prompts"),
        ),
        Section(
            f"{batch.name}: tokens",
            _rows(batch),
            "Advantage of each generated token, at the column that chose it; blank columns were not generated. Up to "
            f"{ROWS} rows: those with warnings first, then the largest advantages; the first {TOKENS} tokens each.",
        ),
    ]


def _left_out(all_of_them: int, most: int, noun: str) -> str:
    return f" Shown are the first {most} of {all_of_them:,} {noun}." if all_of_them > most else ""


# ---- headline numbers and warnings ----


def _tiles(batch: Batch) -> list[Tile]:
    rows = Tile("rows", number(int(len(batch.out["loss_mask"]))), f"{number(len(batch.sizes))} prompts")
    s = batch.stats
    if not s.keys() >= {*STATS}:  # nothing was measured
        return [rows]
    return [
        rows,
        Tile("mean reward", _f(s["reward/mean"]), f"std {_f(s['reward/std'])}"),
        Tile(
            "prompts without spread",
            _share(s["groups/zero_spread"]),
            "all rewards equal: no signal",
            _state(s["groups/zero_spread"], 0.5, 0.8),
        ),
        Tile("truncated rows", _share(s["truncated"]), "cut before their end", _state(s["truncated"], 0.1, 0.3)),
        Tile("advantage", f"{_f(s['advantage/mean'])} ± {_f(s['advantage/std'])}", "mean ± std over generated tokens"),
        Tile("KL", _f(s["kl/mean"]), "nats a token, to ref_logp", _state(abs(s["kl/mean"]), 0.5, 2.0)),
        Tile(
            "explained variance",
            _f(s["values/explained_variance"]),
            "of returns by values; below 0 is worse than a constant",
            _state(-s["values/explained_variance"], 0.0, 1.0),
        ),
        Tile("response", _f(s["response_length/mean"]), f"tokens; longest {_f(s['response_length/max'])}"),
        Tile(
            "flipped, cleared",
            f"{_share(s['process/flipped'])}, {_share(s['process/cleared'])}",
            "advantages, by process shaping",
            _state(s["process/flipped"], 0.05, 0.2),
        ),
        Tile("padding", _share(s["padding"]), "of the batch's own tokens"),
    ]


def _f(x: float) -> str:
    return "–" if x != x else f"{x:.3g}"


def _share(x: float) -> str:
    return "–" if x != x else f"{x:.1%}"


def _state(x: float, warn: float, bad: float) -> str:
    return "" if x != x else "bad" if x > bad else "warn" if x > warn else "good"


def _warnings(batch: Batch) -> Markup:
    if not batch.warnings:
        return page.paragraph("No warnings.")
    rows = []
    for name in _ranked(batch):
        which = batch.warnings[name]
        more = f" … and {len(which) - ROW_NUMBERS:,} more" if len(which) > ROW_NUMBERS else ""
        numbers = " ".join(map(str, which[:ROW_NUMBERS])) + more
        rows.append((Markup(f"<b>{escape(name)}</b>"), len(which), WARNINGS.get(name, ""), numbers))
    return page.table(["warning, worst first", "rows", "what it means", "which rows"], rows)


def _ranked(batch: Batch) -> list[str]:
    return sorted(batch.warnings, key=[*RANK, *batch.warnings].index)


# ---- distributions ----


def _groups(batch: Batch) -> list[tuple[str, slice]]:
    """Name and rows of each prompt that is shown."""
    found, start = [], 0
    for size, name in list(zip(batch.sizes, batch.prompts, strict=False))[:GROUPS]:
        found.append((name, slice(start, start + size)))
        start += size
    return found


def _rewards(batch: Batch) -> Markup:
    rewards_B = batch.out["rewards"].to(torch.float64).cpu()
    x, y, rows = [], [], []
    for i, (name, of) in enumerate(_groups(batch)):
        values = rewards_B[of]
        if not len(values):
            continue
        x += [i] * min(len(values), 64)
        y += values[:64].tolist()
        flat = "yes" if len(values) > 1 and bool((values == values[0]).all()) else ""
        rows.append((name, len(values), float(values.mean()), float(values.min()), float(values.max()), flat))
    dots = {"color": "@blue", "size": 8, "opacity": 0.55}
    data = [
        {"type": "scatter", "mode": "markers", "name": "rollout", "x": x, "y": y, "marker": dots},
        {
            "type": "scatter",
            "mode": "markers",
            "name": "mean of the prompt",
            "x": [*range(len(rows))],
            "y": [row[2] for row in rows],
            "text": [label(row[0]) for row in rows],
            "hovertemplate": "%{text}<br>%{y:.3g}<extra></extra>",
            "marker": {"color": "@orange", "size": 14, "symbol": "line-ew", "line": {"color": "@orange", "width": 3}},
        },
    ]
    layout = {"xaxis": {"title": {"text": "prompt"}}, "yaxis": {"title": {"text": "reward"}}}
    table = page.table(["prompt", "rows", "mean", "smallest", "largest", "no spread"], rows)
    return page.chart("Reward of each rollout", {"data": data, "layout": layout}, table)


def _advantages(batch: Batch) -> Markup:
    """Quartiles per prompt, from numbers: a box for each, without its tokens in the page."""
    mask_BT, x_BT = batch.out["loss_mask"].cpu() != 0, batch.out["advantages"].cpu()
    rows = []
    for name, of in _groups(batch):
        values = x_BT[of][mask_BT[of]].to(torch.float64)
        if not len(values):
            rows.append((name, 0, *[float("nan")] * 5))
            continue
        points = torch.tensor([0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
        at = (points * (len(values) - 1)).round().long()
        rows.append((name, len(values), *values.sort().values[at].tolist()))
    names = ("lowerfence", "q1", "median", "q3", "upperfence")
    box = {
        "type": "box",
        "x": [*range(len(rows))],
        **{name: [row[2 + i] for row in rows] for i, name in enumerate(names)},
        "line": {"color": "@green", "width": 1.2},
        "fillcolor": "@neutral",
        "showlegend": False,
        "hoverinfo": "y",
    }
    layout = {"xaxis": {"title": {"text": "prompt"}}, "yaxis": {"title": {"text": "advantage"}}}
    table = page.table(["prompt", "tokens", "smallest", "quarter", "median", "three quarters", "largest"], rows)
    return page.chart("Advantages of each prompt's tokens", {"data": [box], "layout": layout}, table)


def _distributions(batch: Batch) -> Markup:
    mask_BT = batch.out["loss_mask"] != 0
    made = [
        _histogram("Rewards", batch.out["rewards"], "reward", "rollouts", "@blue"),
        _histogram("Advantages", batch.out["advantages"][mask_BT], "advantage", "generated tokens", "@green"),
    ]
    made.append(_histogram("Response lengths", mask_BT.sum(1), "generated tokens", "rollouts", "@violet"))
    return page.columns(*made, narrow=True)


def _histogram(title: str, values: Tensor, of: str, count: str, colour: str) -> Markup:
    values = values.detach().to("cpu", torch.float64).flatten()
    if not len(values):
        return page.paragraph(f"{title}: nothing to show.")
    low, high = float(values.min()), float(values.max())
    if low == high:
        half = max(0.5, abs(low) / 1000)  # as wide as can be told apart
        low, high = low - half, high + half
    counts = torch.histc(values, BINS, low, high).to(torch.int64).tolist()
    width = (high - low) / BINS
    centres = [low + width * (i + 0.5) for i in range(BINS)]
    bars = {"type": "bar", "x": centres, "y": counts, "width": width, "marker": {"color": colour}}
    layout = {"xaxis": {"title": {"text": of}}, "yaxis": {"title": {"text": count}}, "bargap": 0}
    rows = [(f"{c - width / 2:.4g} to {c + width / 2:.4g}", n) for c, n in zip(centres, counts, strict=True) if n]
    return page.chart(title, {"data": [bars], "layout": layout}, page.table([of, count], rows), height=240)


# ---- tokens ----


def _rows(batch: Batch) -> list[Markup]:
    chosen = _chosen(batch)
    mask_BT, x_BT = batch.out["loss_mask"].cpu() != 0, batch.out["advantages"].cpu().to(torch.float64)
    attention_BT, turns_BT = batch.out["attention_mask"].cpu() != 0, batch.out.get("turn_ids")
    lengths_B = attention_BT.sum(1)
    starts = [max(0, int(mask_BT[b].to(torch.int8).argmax()) - 8) if mask_BT[b].any() else 0 for b in chosen]
    widths = [min(TOKENS, int(lengths_B[b]) - start) for b, start in zip(chosen, starts, strict=True)]
    width = max(widths, default=0)
    if width <= 0:
        return [page.paragraph("No tokens to show.")]
    most = float(x_BT[mask_BT].abs().max()) if mask_BT.any() else 1.0
    z, names, shapes, tables = [], [], [], []
    for i, (b, start) in enumerate(zip(chosen, starts, strict=True)):
        active_T, values_T = mask_BT[b, start : start + width], x_BT[b, start : start + width]
        line = [float(v) if a else float("nan") for v, a in zip(values_T, active_T, strict=True)]
        z.append(line + [float("nan")] * (width - len(line)))
        names.append(f"row {b}")
        ends = _turn_ends(turns_BT[b].cpu(), start, width) if isinstance(turns_BT, Tensor) else []
        for t in ends:
            edge = {"x0": t - 0.5, "x1": t - 0.5, "y0": i - 0.5, "y1": i + 0.5}
            shapes.append({"type": "line", **edge, "line": {"color": "@ink", "width": 1.5}})
        tables.append(_tokens(batch, b, start, active_T, values_T, most))
    heat = {
        "type": "heatmap",
        "z": z,
        "y": names,
        "colorscale": page.DIVERGING,
        "zmin": -most or -1.0,
        "zmax": most or 1.0,
        "hoverongaps": False,
        "ygap": 4,
        "colorbar": {"title": {"text": "advantage"}, "thickness": 12},
        "hovertemplate": "%{y}, token %{x} from the first shown<br>advantage %{z:.4g}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "token, from a little before the first generated one"}, "showgrid": False},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "shapes": shapes,
    }
    rows = [(f"row {b}", f"{float(batch.out['rewards'][b]):.4g}", int(mask_BT[b].sum())) for b in chosen]
    table = page.table(["row", "reward", "generated tokens"], rows)
    note = "Lines are turn boundaries." if shapes else ""
    figure = {"data": [heat], "layout": layout}
    drawn = page.chart("Advantages by token", figure, table, note=note, height=90 + 44 * len(chosen))
    return [drawn, *tables]


def _chosen(batch: Batch) -> list[int]:
    """Rows worth a look: some of each warning, then the largest advantages."""
    n = len(batch.out["loss_mask"])
    mask_BT = batch.out["loss_mask"] != 0
    size_B = torch.where(mask_BT, batch.out["advantages"].abs(), 0.0).amax(1)
    flagged = [b for name in _ranked(batch) for b in batch.warnings[name][:2]]
    largest = size_B.argsort(descending=True).tolist()
    rows = dict.fromkeys([*flagged[: ROWS // 2], *largest])
    return sorted([b for b in rows if b < n][:ROWS])


def _turn_ends(turns_T: Tensor, start: int, width: int) -> list[int]:
    """Columns, from the first shown, at which another turn's choices begin. Ids are at the token's own position."""
    ids = turns_T[start + 1 : start + 1 + width].tolist()
    found, last = [], None
    for t, turn in enumerate(ids):
        if turn >= 0 and turn != last:
            found.append(t)
            last = turn
    return found[1:]


def _tokens(batch: Batch, b: int, start: int, active_T: Tensor, values_T: Tensor, most: float) -> Markup:
    """One row's tokens as text, or by id, shaded by the advantage of choosing them."""
    ids_T = batch.out["input_ids"][b].tolist()
    decode = batch.decode
    parts = []
    for t, (active, value) in enumerate(zip(active_T.tolist(), values_T.tolist(), strict=True)):
        at = start + t + 1  # the token that column t chose
        if at >= len(ids_T) or not bool(batch.out["attention_mask"][b, at]):
            break
        text = escape(ids_T[at] if decode is None else _decoded(decode, ids_T[at]), 40)
        if not active:
            parts.append(f"<i>{text}</i>")
            continue
        colour = "positive" if value > 0 else "negative"
        share = 0 if not most else round(min(1.0, abs(value) / most) * 70)
        shade = f"background:color-mix(in srgb,var(--{colour}) {share}%,transparent)"
        parts.append(f'<span style="{shade}" title="{value:.4g}">{text}</span>')
    words = Markup(f'<div class="tokens">{(" " if decode is None else "").join(parts)}</div>')
    kind = "token ids" if decode is None else "text"
    return page.folded(f"row {b}: reward {float(batch.out['rewards'][b]):.4g}, its {kind}", words)


def _decoded(decode: Callable[[list[int]], str], token: int) -> str:
    try:
        text = decode([token])
    except Exception as error:
        raise PluginRaised("decode raised", at="decode", found=f"{type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise PluginResult("decode gives no text", at="decode", found=type(text), hint="a string for a list of ids")
    return text


# ---- the graph ----


def _pipeline(title: str, facts: Mapping[str, Any]) -> Section:
    """The stages as they run: drawn, and as a table behind it, where what became one node is one line."""
    first, last = facts["pipelines"][0], facts["pipelines"][-1]
    rows = []
    for i, stage in enumerate(last["stages"]):
        parts = stage["name"].split("+")
        fused = Markup(f"<b>{escape(' + '.join(parts))}</b>") if len(parts) > 1 else escape(stage["name"])
        reads = ", ".join(name or "–" for name in stage["reads"])
        rows.append((i, fused, stage["config"], reads, ", ".join(stage["writes"])))
    table = page.table(["", "stage", "config", "reads", "writes"], rows)
    note = (
        f"{len(first['stages'])} stages as wired, {len(last['stages'])} as the compiled backend runs them. Below its "
        "name stands what a stage writes; lines lead from there to its readers. Point at a stage for its numbers."
    )
    return Section(title, [picture.drawing(facts), page.folded("the stages in order, as a table", table)], note)
