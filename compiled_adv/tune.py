"""Takes the shapes of a workload's batches; gives the bucket boundaries that cost least, as a file for `buckets:`.

A batch of b rows and t tokens in bucket B x T takes  per_call + per_slot * B * T  seconds, fitted to a few shapes timed
on this machine. Every declared bucket is compiled once, which counts with compile_seconds / steps for each step.

Boundaries lie on the workload's own sizes, tokens rounded up to whole cache lines of float32 (ALIGN). Tokens for given
rows are exact, by dynamic programming, and so are rows for given tokens. The two together: every choice of rows where
they are at most MOST_TRIED, else by turns until neither improves, from two starts.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from compiled_adv.batch import concat_batch
from compiled_adv.chart import Chart, Series, Table, section
from compiled_adv.compiler import Compute
from compiled_adv.errors import AdvantageWarning, ConflictingSettings, InvalidValue, LengthsFile, shown
from compiled_adv.files import read_json
from compiled_adv.page import page, visible
from compiled_adv.rollouts import find_rollouts, read_groups
from compiled_adv.spec import Boundaries, Spec

if TYPE_CHECKING:
    from rich.console import RenderableType

ALIGN = 16  # tokens
MOST_TRIED = 100
MOST_BUCKETS = 64
MOST_SLOTS = 1 << 22  # of a shape that is timed; the cost of larger ones is extrapolated
MOST_BYTES = 100_000_000
MOST_STEPS = 10**12
DRAWN = 200  # batches drawn from a folder of rollouts

Shape = tuple[int, int]


# ---- a workload ----


@dataclass(frozen=True)
class Workload:
    """Batch shapes (rows, tokens) and how often each came. source: where they are from, in words."""

    counts: Mapping[Shape, int]
    source: str

    @property
    def steps(self) -> int:
        return sum(self.counts.values())

    @property
    def used(self) -> float:
        """Mean slots that hold a row and a token up to the longest."""
        return sum(n * rows * tokens for (rows, tokens), n in self.counts.items()) / self.steps


def read_lengths(path: Path, prompts: int | None = None) -> Workload:
    """A JSON file, or a folder of rollouts.

    JSON: {"shapes": [[rows, tokens], ...]} with one entry for each batch ("resampled_shapes" are added where given), or
    {"lengths": [[tokens of each row], ...]}. A folder: every sub-folder is one batch; with `prompts`, 200 batches of so
    many prompts are drawn from all of it, with replacement.
    """
    if prompts is not None and path.is_file():
        raise ConflictingSettings("batches are drawn from a folder of rollouts", at="--prompts", found=str(path))
    shapes = _of_rollouts(path, prompts) if path.is_dir() else _of_json(path)
    if not shapes:
        raise LengthsFile(f"{path} holds no batch")
    for shape in shapes:
        if min(shape) < 1:
            raise LengthsFile(f"{path}: a batch has at least one row and one token", found=shown(list(shape)))
    return Workload(Counter(shapes), visible(path.name))


def _of_json(path: Path) -> list[Shape]:
    hint = '{"shapes": [[rows, tokens], ...]}, or {"lengths": [[tokens of each row], ...]}'
    content = read_json(path, MOST_BYTES, LengthsFile, hint)
    if not isinstance(content, Mapping) or not {"shapes", "lengths"} & content.keys():
        raise LengthsFile(f"{path} holds no lengths", hint=hint)
    if {"shapes", "lengths"} <= content.keys():
        raise LengthsFile(f"{path} holds both shapes and lengths", hint=hint)
    if "lengths" in content:
        rows = [[_whole(x, path) for x in _list(row, path)] for row in _list(content["lengths"], path)]
        if any(min(row, default=0) < 1 for row in rows):
            raise LengthsFile(f"{path}: a row has at least one token, and a batch one row")
        return [(len(row), max(row)) for row in rows]
    pairs = _list(content["shapes"], path) + _list(content.get("resampled_shapes", []), path)
    shapes = [tuple(_whole(x, path) for x in _list(pair, path)) for pair in pairs]
    if wrong := [shape for shape in shapes if len(shape) != 2]:
        raise LengthsFile(f"{path}: a shape is [rows, tokens]", found=shown(list(wrong[0])), hint=hint)
    return shapes  # type: ignore[return-value]


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise LengthsFile(f"{path}: a list is needed", found=shown(value))
    return value


def _whole(value: Any, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not value < 1 << 31:
        raise LengthsFile(f"{path}: a length is a whole number", found=shown(value))
    return value


def _of_rollouts(path: Path, prompts: int | None) -> list[Shape]:
    folders = [read_groups(files) for files in find_rollouts(path).values()]
    if prompts is None:
        return [tuple(concat_batch(groups)[0]["attention_mask"].shape) for groups in folders]  # type: ignore[misc]
    sizes: list[Shape] = [tuple(x["attention_mask"].shape) for groups in folders for x in groups]  # type: ignore[misc]
    draw = random.Random(0)
    drawn = [draw.choices(sizes, k=prompts) for _ in range(DRAWN)]
    return [(sum(rows for rows, _ in batch), max(tokens for _, tokens in batch)) for batch in drawn]


# ---- the cost of a step ----


@dataclass(frozen=True)
class Cost:
    """Seconds. misfit: the largest relative error of the fit at the timed shapes."""

    per_call: float
    per_slot: float
    compile_seconds: float
    steps: int
    misfit: float = 0.0

    def call(self, slots: float) -> float:
        """One call on so many padded slots."""
        return self.per_call + self.per_slot * slots

    def step(self, slots: float, buckets: int) -> float:
        """One call, and its share of compiling the buckets."""
        return self.call(slots) + self.compile_seconds * buckets / self.steps


def fit(points: Sequence[tuple[float, float]], compile_seconds: float, steps: int) -> Cost:
    """Least squares of the relative errors over (slots, seconds), neither number below 0."""
    x = torch.tensor([[1 / t, slots / t] for slots, t in points], dtype=torch.float64)
    ones = torch.ones(len(points), 1, dtype=torch.float64)
    per_call, per_slot = torch.linalg.lstsq(x, ones, driver="gelsd").solution.flatten().tolist()
    if per_call < 0 or per_slot < 0:  # one of the two alone
        kept = x[:, int(per_call < 0)]
        best = float(kept.sum() / kept.square().sum())
        per_call, per_slot = (0.0, best) if per_call < 0 else (best, 0.0)
    misfit = max(abs((per_call + per_slot * slots) / t - 1) for slots, t in points)
    return Cost(per_call, per_slot, compile_seconds, steps, misfit)


def measure(spec: Spec, workload: Workload, steps: int) -> Cost:
    """The cost of a configuration on this machine: up to five shapes of the workload are compiled, from an empty cache,
    and timed."""
    with tempfile.TemporaryDirectory() as cache:
        return _measured(spec, workload, steps, cache)


def _measured(spec: Spec, workload: Workload, steps: int, cache: str) -> Cost:
    shapes = [shape for shape in sorted(workload.counts, key=math.prod) if math.prod(shape) <= MOST_SLOTS]
    shapes = shapes or [(1, 1024), (1, 4096)]
    chosen = sorted({shapes[round(part * (len(shapes) - 1))] for part in (0, 0.25, 0.5, 0.75, 1)}, key=math.prod)
    runs, compiling = {}, []
    for shape in chosen:
        own = Boundaries(rows=[shape[0]], tokens=[shape[1]])
        compiled = spec.advantage.compiled.model_copy(update={"buckets": own, "cache_dir": cache})
        compute, (batch, meta) = Compute(spec.with_advantage(compiled=compiled, shadow=None)), _batch(*shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AdvantageWarning)
            compute(batch, meta)
        info = compute.cache.info()
        compiling.append(info.compile_seconds / max(1, info.compiles))
        runs[math.prod(shape)] = partial(compute, batch, meta)
    times: dict[int, list[float]] = {slots: [] for slots in runs}
    end = time.perf_counter() + 0.5 * len(runs)
    while time.perf_counter() < end or len(next(iter(times.values()))) < 7:
        for slots, run in runs.items():
            start = time.perf_counter()
            run()
            times[slots].append(time.perf_counter() - start)
    points = [(slots, statistics.median(seconds)) for slots, seconds in times.items()]
    return fit(points, statistics.median(compiling), steps)


def _batch(rows: int, tokens: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A batch with every channel, all rows full and of one turn."""
    generator = torch.Generator().manual_seed(0)
    ones_BT = torch.ones(rows, tokens, dtype=torch.int64)
    mask_BT = ones_BT.clone()
    mask_BT[:, 0] = 0
    batch = {
        "input_ids": ones_BT,
        "attention_mask": ones_BT.bool(),
        "loss_mask": mask_BT,
        "turn_ids": mask_BT - 1,
        "rewards": torch.rand(rows, generator=generator),
        "is_truncated": torch.zeros(rows, dtype=torch.bool),
        "token_rewards": torch.zeros(rows, tokens),
    }
    for name in ("logprobs", "ref_logp", "prox_logp", "values"):
        batch[name] = -torch.rand(rows, tokens, generator=generator) * mask_BT
    return batch, {"n_trajs": 1, "traj_group_sizes": [rows], "traj_seqlens": [tokens], "rollout_groups": None}


# ---- boundaries ----


@dataclass(frozen=True)
class Choice:
    """Boundaries, and the mean slots that a step of the workload then computes."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    slots: float

    @property
    def buckets(self) -> int:
        return len(self.rows) * len(self.tokens)

    def padding(self, workload: Workload) -> float:
        """The share of computed slots that hold nothing of a batch."""
        return 1 - workload.used / self.slots


def boundaries(sizes: Mapping[int, float], most: int) -> tuple[int, ...]:
    """The at most `most` boundaries that minimise the sum of weight * (smallest boundary that is not below the size).

    `sizes`: size -> weight. Exact: best[i] is the least cost of the i smallest sizes with k boundaries, the largest of
    which lies on the i-th. Time and memory grow with the number of sizes, not with its square.
    """
    ordered = sorted(sizes)
    n = len(ordered)
    below = [0, *accumulate(sizes[x] for x in ordered)]
    best: list[float] = [0, *[math.inf] * n]
    came, ends = [], []
    for _ in range(min(most, n)):
        best, chosen = _one_more(ordered, below, best)
        came.append(chosen)
        ends.append(best[n])
    k, i, found = ends.index(min(ends)), n, []
    while i > 0:
        found.append(ordered[i - 1])
        i, k = came[k][i], k - 1
    return tuple(reversed(found))


def _one_more(ordered: Sequence[int], below: Sequence[float], best: Sequence[float]) -> tuple[list[float], list[int]]:
    """The least cost with one boundary more, and how many sizes lie under the ones before it.

    With the last boundary on size x, after j sizes, the cost is  best[j] + x * (below[i] - below[j]):  lines in x whose
    slope falls with j, so that those which are least somewhere are kept in order, and x only moves along them.
    """
    kept: list[int] = []
    costs, chosen, at = [math.inf], [0], 0
    for i, x in enumerate(ordered, 1):
        j = i - 1
        if best[j] < math.inf:
            while len(kept) - at > 1 and _hidden(kept[-2], kept[-1], j, below, best):
                kept.pop()
            kept.append(j)
        while (
            at + 1 < len(kept) and best[kept[at + 1]] - x * below[kept[at + 1]] <= best[kept[at]] - x * below[kept[at]]
        ):
            at += 1
        costs.append(best[kept[at]] + x * (below[i] - below[kept[at]]) if kept else math.inf)
        chosen.append(kept[at] if kept else 0)
    return costs, chosen


def _hidden(a: int, b: int, c: int, below: Sequence[float], best: Sequence[float]) -> bool:
    """Whether line b is nowhere the only least one, for a before b before c."""
    return (best[c] - best[a]) * (below[b] - below[a]) <= (best[b] - best[a]) * (below[c] - below[a])


def up(size: int, bounds: Sequence[int]) -> int:
    """The smallest boundary that holds a size."""
    return bounds[bisect.bisect_left(bounds, size)]


def mean_slots(workload: Workload, rows: Sequence[int], tokens: Sequence[int]) -> float:
    total = sum(n * up(b, rows) * up(t, tokens) for (b, t), n in workload.counts.items())
    return total / workload.steps


def _tokens_for(workload: Workload, rows: Sequence[int], most: int, top: int) -> tuple[int, ...]:
    weights: dict[int, float] = {_aligned(top): 0}
    for (b, t), n in workload.counts.items():
        weights[_aligned(t)] = weights.get(_aligned(t), 0) + n * up(b, rows)
    return boundaries(weights, most)


def _rows_for(workload: Workload, tokens: Sequence[int], most: int, top: int) -> tuple[int, ...]:
    weights: dict[int, float] = {top: 0}
    for (b, t), n in workload.counts.items():
        weights[b] = weights.get(b, 0) + n * up(t, tokens)
    return boundaries(weights, most)


def _aligned(tokens: int) -> int:
    return -(-tokens // ALIGN) * ALIGN


def choose(workload: Workload, n_rows: int, n_tokens: int, top: Shape) -> Choice:
    """At most so many boundaries of each; the largest hold `top`."""
    sizes = sorted({b for b, _ in workload.counts} | {top[0]})
    exact_tokens = sorted({_aligned(t) for _, t in workload.counts} | {_aligned(top[1])})
    tried: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if math.comb(len(sizes) - 1, min(n_rows, len(sizes)) - 1) <= MOST_TRIED:
        for others in combinations(sizes[:-1], min(n_rows, len(sizes)) - 1):
            rows = (*others, sizes[-1])
            tried.append((rows, _tokens_for(workload, rows, n_tokens, top[1])))
    else:
        for start in (exact_tokens, exact_tokens[-1:]):
            rows, tokens, before = (), tuple(start), math.inf
            while True:
                rows = _rows_for(workload, tokens, n_rows, top[0])
                tokens = _tokens_for(workload, rows, n_tokens, top[1])
                slots = mean_slots(workload, rows, tokens)
                if not slots < before:
                    break
                before = slots
            tried.append((rows, tokens))
    return min((Choice(r, t, mean_slots(workload, r, t)) for r, t in tried), key=lambda it: (it.slots, it.buckets))


def _grids(most: int) -> list[Shape]:
    """The numbers of row and token boundaries that make at most so many buckets, none smaller in both than another."""
    return sorted({(n, most // n) for n in range(1, most + 1)})


def tuned(workload: Workload, most: int, top: Shape) -> list[Choice]:
    """The best boundaries of at most 1, 2, ... `most` buckets."""
    grids = {grid for k in range(1, most + 1) for grid in _grids(k)}
    choices = [choose(workload, *grid, top) for grid in sorted(grids)]
    best = lambda k: min((it for it in choices if it.buckets <= k), key=lambda it: (it.slots, it.buckets))  # noqa: E731
    return [best(k) for k in range(1, most + 1)]


def powers(workload: Workload, most: int, top: Shape) -> Choice:
    """The best powers of two of at most `most` buckets: the smallest that hold the largest batch, and those below."""

    def ladder(largest: int, n: int) -> tuple[int, ...]:
        first = 1 << math.ceil(math.log2(largest))
        return tuple(sorted({max(1, first >> k) for k in range(n)}))

    tried = [(ladder(top[0], n_rows), ladder(top[1], n_tokens)) for n_rows, n_tokens in _grids(most)]
    choices = [Choice(rows, tokens, mean_slots(workload, rows, tokens)) for rows, tokens in tried]
    return min(choices, key=lambda it: (it.slots, it.buckets))


@dataclass(frozen=True)
class Tuning:
    """What was found. frontier: the best boundaries, and the best powers of two, for each number of buckets."""

    workload: Workload
    cost: Cost
    chosen: Choice
    powers: Choice
    frontier: Sequence[tuple[int, Choice, Choice]]

    def rows(self) -> list[tuple[str, int, float, float]]:
        """(name, buckets, padding, seconds of a step with its share of compiling), for the table."""
        exact, used = len(self.workload.counts), self.workload.used
        found = [
            (name, it.buckets, it.padding(self.workload), self.cost.step(it.slots, it.buckets))
            for name, it in (("tuned", self.chosen), ("powers of two", self.powers))
        ]
        return [*found, ("exact shapes", exact, 0.0, self.cost.step(used, exact))]

    @property
    def gain(self) -> float:
        """Expected time of a call with powers of two over that with what was chosen."""
        return self.cost.call(self.powers.slots) / self.cost.call(self.chosen.slots)


def check(workload: Workload, most: int, steps: int) -> None:
    """Refuse what cannot be asked, before anything is timed."""
    if not 1 <= most <= len(workload.counts):
        what = "there are as many buckets as distinct shapes at most"
        raise InvalidValue(what, at="--max-buckets", found=most, hint=f"1 to {min(len(workload.counts), MOST_BUCKETS)}")
    if most > MOST_BUCKETS:
        raise InvalidValue(f"at most {MOST_BUCKETS} buckets are tried", at="--max-buckets", found=most)
    if not 1 <= steps <= MOST_STEPS:
        raise InvalidValue(
            "compiling is spread over so many steps", at="--steps", found=steps, hint=f"1 to {MOST_STEPS}"
        )


def tune(workload: Workload, cost: Cost, most: int, top: Shape = (1, 1)) -> Tuning:
    """The cheapest boundaries of at most `most` buckets. top: rows and tokens that the largest must hold at least."""
    check(workload, most, cost.steps)
    seen = (max(b for b, _ in workload.counts), max(t for _, t in workload.counts))
    top = (max(top[0], seen[0]), max(top[1], seen[1]))
    frontier = [(k, best, powers(workload, k, top)) for k, best in enumerate(tuned(workload, most, top), 1)]
    chosen = min((it for _, it, _ in frontier), key=lambda it: cost.step(it.slots, it.buckets))
    return Tuning(workload, cost, chosen, powers(workload, chosen.buckets, top), frontier)


# ---- what is written ----


def as_yaml(tuning: Tuning) -> str:
    """The file that loads as `buckets:`."""
    chosen, cost = tuning.chosen, tuning.cost
    padding, other = (100 * it.padding(tuning.workload) for it in (chosen, tuning.powers))
    work = tuning.workload
    head = [
        f"compiled-adv tune: buckets for {work.source}, {work.steps} batches of {len(work.counts)} shapes.",
        f"Padding {padding:.1f} % of the computed slots; powers of two with as many buckets: {other:.1f} %.",
        f"Expected: {1e3 * cost.call(chosen.slots):.3g} ms a call; powers of two take {tuning.gain:.2f} times that.",
        f"Cost: {1e6 * cost.per_call:.3g} us and {1e9 * cost.per_slot:.3g} ns a slot; {cost.compile_seconds:.2g} s to "
        f"compile a bucket, over {cost.steps:,} steps.",
    ]
    lines = "".join(f"# {' '.join(line.split())}\n" for line in head)
    body = {"buckets": {"rows": list(chosen.rows), "tokens": list(chosen.tokens)}}
    return lines + yaml.safe_dump(body, default_flow_style=None, width=120)


def table(tuning: Tuning) -> RenderableType:
    """What was chosen beside powers of two and exact shapes, and the frontier, for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as Cells

    cost, chosen = tuning.cost, tuning.chosen
    first = Cells(
        box=box.SIMPLE_HEAD, title=f"{tuning.workload.source}, {tuning.workload.steps} batches", title_justify="left"
    )
    for name, justify in (("boundaries", "left"), ("buckets", "right"), ("padding", "right"), ("ms a step", "right")):
        first.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, buckets, padding, seconds in tuning.rows():
        first.add_row(name, str(buckets), f"{100 * padding:.1f} %", f"{1e3 * seconds:.3f}")
    second = Cells(box=box.SIMPLE_HEAD)
    for name in ("at most", "rows", "tokens", "ms a step", "powers of two"):
        second.add_column(name, justify="left" if name in ("rows", "tokens") else "right")
    for k, best, other in tuning.frontier:
        times = [f"{1e3 * cost.step(it.slots, it.buckets):.3f}" for it in (best, other)]
        mark = " <" if best == chosen else ""
        second.add_row(f"{k}{mark}", " ".join(map(str, best.rows)), " ".join(map(str, best.tokens)), *times)
    model = (
        f"a call: {1e6 * cost.per_call:.3g} us + {1e9 * cost.per_slot:.3g} ns a slot (the fit is off by up to "
        f"{100 * cost.misfit:.0f} %); {cost.compile_seconds:.2g} s to compile a bucket, over {cost.steps:,} steps"
    )
    return Group(first, model, second)


def picture(tuning: Tuning) -> str:
    """A page: padding and time against powers of two and exact shapes, and the frontier over the number of buckets."""
    rows = tuning.rows()
    names = [f"{name} ({buckets})" for name, buckets, _, _ in rows]
    waste = [100 * padding for _, _, padding, _ in rows]
    step = [1e3 * seconds for _, _, _, seconds in rows]
    cells = [(n, str(b), f"{100 * p:.1f} %", f"{1e3 * s:.3g} ms") for n, b, p, s in rows]
    table = Table(("boundaries", "buckets", "padding", "a step, with its share of compiling"), cells)

    def bars(title: str, note: str, values: Sequence[float], unit: str, axis: str) -> Chart:
        label = [f"{x:.3g}{unit}" for x in values]
        hover = [f"{name}: {x}" for name, x in zip(names, label, strict=True)]
        series = [Series(axis, values, names, hover, "blue", "bar", label=label)]
        return Chart(title, note, series, table, axis, "", flat=True, height=230)

    cost, ks = tuning.cost, [k for k, _, _ in tuning.frontier]

    def line(name: str, colour: str, found: Sequence[Choice]) -> Series:
        y = [1e3 * cost.step(it.slots, it.buckets) for it in found]
        hover = [f"{name}, at most {k} buckets: {ms:.3g} ms" for k, ms in zip(ks, y, strict=True)]
        return Series(name, ks, y, hover, colour, dash=colour != "blue")

    frontier = [
        line("tuned", "blue", [it for _, it, _ in tuning.frontier]),
        line("powers of two", "orange", [it for _, _, it in tuning.frontier]),
    ]
    over: list[tuple[str, ...]] = []
    for k, best, other in tuning.frontier:
        times = [f"{1e3 * cost.step(it.slots, it.buckets):.3g} ms" for it in (best, other)]
        share = [f"{100 * it.padding(tuning.workload):.1f} %" for it in (best, other)]
        over.append((str(k), str(best.rows), str(best.tokens), times[0], share[0], times[1], share[1]))
    columns = ("at most", "rows", "tokens", "tuned", "padding", "powers of two", "padding")
    over_k = Chart(
        "The frontier: what more buckets buy",
        "The expected cost of a step with its share of compiling, for the best boundaries of at most so many buckets.",
        frontier,
        Table(columns, over),
        "buckets",
        "milliseconds a step",
        ticks=[(k, str(k)) for k in ks],
    )
    charts = [
        bars("Padding", "The share of computed slots that hold nothing of a batch.", waste, " %", "percent"),
        bars("Expected time", "Of a step, with its share of compiling.", step, " ms", "milliseconds a step"),
        over_k,
    ]
    headline = f"{tuning.chosen.buckets} tuned buckets: a call with powers of two takes {tuning.gain:.2f} times as long"
    return page(
        "compiled-adv tune",
        [section(each) for each in charts],
        headline=headline,
        facts=[
            ("lengths", tuning.workload.source),
            ("batches", str(tuning.workload.steps)),
            ("a call", f"{1e6 * cost.per_call:.3g} us + {1e9 * cost.per_slot:.3g} ns a slot"),
            ("worst error of the fit", f"{100 * cost.misfit:.0f} %"),
            ("compiling", f"{cost.compile_seconds:.2g} s a bucket, over {cost.steps:,} steps"),
        ],
    )
