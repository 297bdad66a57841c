"""Takes pytest-benchmark's JSON of perf/; gives one page of charts, and the list of what became slower.

A result is judged by its ratio to the streaming floor of the same run, never by seconds: those are the machine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_adv import page
from compiled_adv.chart import Chart, Series, Table, section
from compiled_adv.errors import BenchmarkMissing, MachinesDiffer, ResultsFile, listed
from compiled_adv.files import check_outputs, read_json, write_whole

RISE = 1.25  # a ratio to the floor that grew by more than this, with quartiles that do not overlap, is a regression
RULE = (
    "A result is a regression if its ratio to the streaming floor of the same run grew by more than 25 % against the "
    "run before it (or the baseline), and the quartiles of the two ratios do not overlap. Seconds are never compared "
    "between runs."
)
CHECKED = "Every answer was compared with the eager one before it was timed; medians and quartiles."
OURS = ("compiled", "eager")
MACHINE = ("cpu", "cores", "device", "threads")  # of the stamp: what must agree between results on one page
LABELS = {
    "areal": "AReaL",
    "floor": "streaming floor",
    "column_loop": "loop over tokens",
    "turn_scatter": "loop over turns",
}
# The same contender looks the same in every chart.
COLOURS = {
    "compiled": "blue",
    "eager": "green",
    "areal": "orange",
    "verl": "violet",
    "torchrl": "pink",
    "column_loop": "brown",
    "turn_scatter": "olive",
    "floor": "grey",
}
SPARE = tuple(COLOURS.values())
MOST_BYTES = 200_000_000
LONGEST = 160  # characters of one text that came from a file


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a time over another one, of calls in turns."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One benchmark of one run. key: what it is called in every run; seconds: median and quartiles of one call."""

    key: str
    suite: str
    contender: str
    recipe: str
    mask: str
    shape: tuple[int, int]
    seconds: Ratio
    rounds: int
    over_floor: Ratio | None
    over: Mapping[str, Ratio]
    facts: Mapping[str, Any]

    @property
    def slots(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Run:
    """The results of one commit. order: what runs are sorted by."""

    commit: str
    order: str
    stamp: Mapping[str, str]
    results: Mapping[str, Result]


# ---- reading ----


def short(text: object) -> str:
    """A text that came from a file."""
    return page.visible(text, LONGEST)


def read_run(path: Path) -> Run:
    """One file of results; ResultsFile where it is not one."""
    content = read_json(path, MOST_BYTES, ResultsFile, "make bench writes perf/results/bench.json")
    try:
        machine, commit = content["machine_info"], content["commit_info"]
        stamp = {str(name): short(value) for name, value in machine["stamp"].items()}
        results = [_result(each) for each in content["benchmarks"]]
        order = short(commit.get("time") or content["datetime"])
        name = short(commit["id"])[:10] + ("+" if commit.get("dirty") else "")
        missing = [key for key in MACHINE if key not in stamp]
    except ResultsFile as error:
        raise ResultsFile(f"{path}: {error.what}", found=error.found) from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        hint = "a file that pytest --benchmark-json wrote in perf/"
        raise ResultsFile(f"{path} holds no results of perf/", found=repr(error), hint=hint) from error
    if missing:
        raise ResultsFile(f"{path} does not say where it was measured", found=f"no {listed(missing)} in its stamp")
    if not results:
        raise ResultsFile(f"{path} holds no benchmark", hint="a run that was not cut short")
    by_key = {each.key: each for each in results}
    if len(by_key) < len(results):
        seen = [each.key for each in results]
        twice = next(key for key in by_key if seen.count(key) > 1)
        raise ResultsFile(f"{path} holds a benchmark twice", found=twice)
    return Run(name, order, stamp, by_key)


def _result(given: Mapping[str, Any]) -> Result:
    key = short(given["fullname"])
    extra, stats = given.get("extra_info") or {}, given["stats"]
    median = _number(stats["median"], key)
    seconds = Ratio(median, _number(stats.get("q1", median), key), _number(stats.get("q3", median), key))
    facts = {short(name): _fact(value, key) for name, value in extra.items()}
    return Result(
        key=key,
        suite=short(extra.get("suite", "")),
        contender=short(extra.get("contender", "")),
        recipe=short(extra.get("recipe", "")),
        mask=short(extra.get("mask", "")),
        shape=(_size(extra.get("rows", 0), key), _size(extra.get("tokens", 0), key)),
        seconds=seconds,
        rounds=int(stats.get("rounds", 1)),
        over_floor=None if extra.get("over_floor") is None else _ratio(extra["over_floor"], key),
        over={short(name): _ratio(value, key) for name, value in (extra.get("over") or {}).items()},
        facts=facts,
    )


def _fact(value: Any, key: str) -> Any:
    if isinstance(value, int | float) and not abs(value) < 1e15:
        raise ResultsFile(f"{key} states a number that is none", found=value)
    return value


def _size(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ResultsFile(f"{key} has rows and tokens that are no whole numbers", found=value)
    return value


def _number(value: Any, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ResultsFile(f"{key} has no positive time", found=value)
    return float(value)


def _ratio(value: Any, key: str) -> Ratio:
    median, low, high = (_number(x, key) for x in value)
    return Ratio(median, low, high)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Files of one machine, as runs in the order of their commits; files of one commit are one run."""
    files = [(path, read_run(path)) for path in paths]
    first = files[0]
    for path, run in files[1:]:
        _same_machine(first, (path, run))
    runs: dict[str, Run] = {}
    for _, run in sorted(files, key=lambda it: it[1].order):
        before = runs.get(run.commit)
        results = {**(before.results if before else {}), **run.results}
        runs[run.commit] = Run(run.commit, run.order, run.stamp, results)
    return sorted(runs.values(), key=lambda run: run.order)


def _same_machine(one: tuple[Path, Run], other: tuple[Path, Run]) -> None:
    for name in MACHINE:
        here, there = one[1].stamp[name], other[1].stamp[name]
        if here != there:
            what = f"results of two machines: {one[0]} and {other[0]}"
            raise MachinesDiffer(what, found=f"{name} {here} and {there}", hint="a page for each machine")


# ---- judging ----


def is_regression(before: Ratio, after: Ratio) -> bool:
    """RULE, for the ratios of one benchmark to the floor in two runs."""
    return after.median > RISE * before.median and after.low > before.high


def regressions(before: Run, after: Run) -> list[str]:
    """What became slower, worst first: one line each."""
    found = []
    for key, result in after.results.items():
        old = before.results.get(key)
        if old is None or old.over_floor is None or result.over_floor is None or result.contender not in OURS:
            continue
        if is_regression(old.over_floor, result.over_floor):
            was, now = old.over_floor.median, result.over_floor.median
            found.append((now / was, f"{key}: {was:.3g} x the floor before, {now:.3g} x now"))
    return [line for _, line in sorted(found, reverse=True)]


def against_baseline(runs: Sequence[Run], results: Sequence[Path], baseline: Path) -> list[str]:
    """The regressions of the newest run; what only one side measured is an error."""
    base, run = read_run(baseline), runs[-1]
    _same_machine((baseline, base), (results[-1], run))
    judged = [
        {k for k, r in x.results.items() if r.over_floor is not None and r.contender in OURS} for x in (base, run)
    ]
    for there, here, name in ((judged[0], judged[1], f"the results of {run.commit}"), (judged[1], judged[0], baseline)):
        if lost := sorted(there - here):
            what = f"{len(lost)} benchmarks are missing in {name}"
            raise BenchmarkMissing(what, found=listed(lost[:5]), hint="the same ladder, peers and files on both sides")
    return regressions(base, run)


# ---- drawing ----


def _colour(contender: str) -> str:
    return COLOURS.get(contender) or SPARE[sum(map(ord, contender)) % len(SPARE)]


def _label(contender: str) -> str:
    return LABELS.get(contender, contender)


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _megabytes(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name)
    return f"{value / 1e6:.1f} MB" if isinstance(value, int | float) and 0 <= value < 1e15 else ""


def _times(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.3g} ({ratio.low:.3g} to {ratio.high:.3g})"


def _difference(result: Result) -> str:
    value = result.facts.get("difference")
    return f"{value:.1g}" if isinstance(value, int | float) else ""


def _tags(result: Result) -> dict[str, str]:
    return {"recipe": result.recipe, "mask": result.mask}


def _groups(results: Iterable[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """(recipe, mask, contender) -> results by growing shape; our own first, the floor last."""
    rank = {name: i for i, name in enumerate((*OURS, "areal", "verl", "torchrl", "column_loop", "turn_scatter"))}
    found: dict[tuple[str, str, str], list[Result]] = {}
    for it in sorted(results, key=lambda r: (r.contender == "floor", rank.get(r.contender, 50), r.contender, r.slots)):
        found.setdefault((it.recipe, it.mask, it.contender), []).append(it)
    return found


def _time_against_shape(results: Sequence[Result]) -> Chart:
    shapes = sorted({(it.slots, it.shape) for it in results})
    series = []
    for (_, _, contender), points in _groups(results).items():
        hover = [
            f"{_label(contender)}, {_shape(p.shape)}: {_ms(p.seconds.median)}"
            + (f", {p.over_floor.median:.3g} x the floor" if p.over_floor else "")
            for p in points
        ]
        x, y = [p.slots for p in points], [p.seconds.median * 1e3 for p in points]
        floor = contender == "floor"
        series.append(Series(_label(contender), x, y, hover, _colour(contender), dash=floor, tags=_tags(points[0])))
    columns = ("recipe", "mask", "shape", "contender", "median", "quartiles", "x floor (quartiles)", "memory", "moved",
               "difference", "note")  # fmt: skip
    rows = [
        (p.recipe, p.mask, _shape(p.shape), _label(p.contender), _ms(p.seconds.median),
         f"{_ms(p.seconds.low)} to {_ms(p.seconds.high)}", _times(p.over_floor), _megabytes(p.facts, "peak_memory"),
         _megabytes(p.facts, "bytes_moved"), _difference(p), short(p.facts.get("note", "")))
        for p in results
    ]  # fmt: skip
    return Chart(
        "Time of one call against the batch's shape",
        "Lower is better. The floor reads every [rows, tokens] input once and writes every computed output once, and "
        "does nothing else. What a peer leaves out is in the table.",
        series,
        Table(columns, rows, [_tags(p) for p in results]),
        "batch, rows x tokens",
        "milliseconds",
        x_log=True,
        y_log=True,
        ticks=[(slots, _shape(shape)) for slots, shape in shapes],
        height=460,
    )


def _speed_ups(results: Sequence[Result]) -> Chart | None:
    rows, series = [], []
    for (_, _, contender), points in _groups(results).items():
        points = [p for p in points if "compiled" in p.over]
        if not points:
            continue
        ratios = [p.over["compiled"] for p in points]
        hover = [
            f"{_label(contender)} at {_shape(p.shape)} takes {r.median:.3g} x as long ({r.low:.3g} to {r.high:.3g})"
            for p, r in zip(points, ratios, strict=True)
        ]
        series.append(
            Series(
                _label(contender), [_shape(p.shape) for p in points], [r.median for r in ratios], hover,
                _colour(contender), "bar", label=[f"{r.median:.3g}x" for r in ratios], tags=_tags(points[0]),
            )
        )  # fmt: skip
        rows += [
            (p, (p.recipe, p.mask, _shape(p.shape), _label(contender), _times(p.over["compiled"]))) for p in points
        ]
    if not series:
        return None
    return Chart(
        "How much longer others take than the compiled program",
        "Medians of the ratio of two calls that follow each other. verl and torchrl compute the recurrence alone, so "
        "their bars understate the gain.",
        series,
        Table(
            ("recipe", "mask", "shape", "contender", "x compiled (quartiles)"),
            [row for _, row in rows],
            [_tags(p) for p, _ in rows],
        ),
        "batch, rows x tokens",
        "times as long (log)",
        y_log=True,
        line_at=1.0,
    )


def _passes(results: Sequence[Result]) -> Chart | None:
    found = [(it, it.over[name]) for it in results for name in it.over if name == "with"]
    found.sort(key=lambda it: it[1].median)
    if not found:
        return None
    names = [f"{it.contender} ({it.recipe})" for it, _ in found]
    hover = [f"without {it.contender}: {_times(r)} x the time, on {it.recipe} {_shape(it.shape)}" for it, r in found]
    label = [f"{r.median:.3g}x" for _, r in found]
    series = [Series("without the pass", [r.median for _, r in found], names, hover, "blue", "bar", label=label)]
    rows = [(it.contender, it.recipe, _shape(it.shape), _ms(it.seconds.median), _times(r)) for it, r in reversed(found)]
    return Chart(
        "What each pass is worth",
        "The compiled program without the pass over the one with it; 1 is no gain, but for a plainer graph.",
        series,
        Table(("pass", "recipe", "shape", "time without it", "without / with (quartiles)"), rows),
        "time without the pass / with it",
        "",
        flat=True,
        line_at=1.0,
        height=110 + 34 * len(found),
    )


PARTS = {"import": "grey", "first bucket": "blue", "next bucket": "orange"}


def _starts(results: Sequence[Result]) -> Chart | None:
    found = [it for it in results if isinstance(it.facts.get("parts"), Mapping)]
    if not found:
        return None
    series, rows = [], []
    for part, colour in PARTS.items():
        seconds = [_number(it.facts["parts"].get(part), it.key) for it in found]
        starts = [it.contender for it in found]
        hover = [f"{start}: {part} {_ms(s)}" for start, s in zip(starts, seconds, strict=True)]
        label = [f"{part} {s:.1f} s" for s in seconds]
        series.append(Series(part, seconds, starts, hover, colour, "bar", label=label))
        rows += [(start, part, _ms(s)) for start, s in zip(starts, seconds, strict=True)]
    return Chart(
        "From the start of a process to its answers",
        "Cold: an empty cache folder. Warm: the folder that the cold process left. The first bucket includes the "
        "comparison with the eager answer.",
        series,
        Table(("start", "part", "time"), rows),
        "seconds",
        "",
        flat=True,
        stacked=True,
        height=230,
    )


def _buckets(results: Sequence[Result]) -> Chart | None:
    if not results:
        return None
    names = {"filled": "fills its bucket", "padded": "padded into it", "exact": "the same, exact bucket",
             "miss": "a miss, compiled now"}  # fmt: skip

    def share(it: Result) -> str:
        value = it.facts.get("padding")
        return f"{100 * value:.0f} %" if isinstance(value, int | float) and it.contender != "miss" else ""

    found = sorted(results, key=lambda it: [*names, it.contender].index(it.contender))
    label = [_ms(it.seconds.median) + (f", {share(it)} padding" if share(it) else "") for it in found]
    hover = [
        f"{names.get(it.contender, it.contender)}: {x} ({_shape(it.shape)})" for it, x in zip(found, label, strict=True)
    ]
    y = [names.get(it.contender, it.contender) for it in found]
    series = [Series("time", [it.seconds.median * 1e3 for it in found], y, hover, "blue", "bar", label=label)]
    rows = [
        (
            name,
            _shape(it.shape),
            short(it.facts.get("bucket", "")),
            share(it),
            _ms(it.seconds.median),
            _times(it.over_floor),
        )
        for it, name in zip(found, y, strict=True)
    ]
    return Chart(
        "Buckets: a hit, a padded hit, a miss",
        "A miss compiles in the middle of training; warm-up or the on-disk cache takes that away. compiled-adv tune "
        "picks boundaries for a workload's lengths.",
        series,
        Table(("batch", "shape", "bucket", "padding", "time", "x floor (quartiles)"), rows),
        "milliseconds (log)",
        "",
        x_log=True,
        flat=True,
        height=270,
    )


def _bars(title: str, note: str, results: Sequence[Result], name: str, *, floor: bool) -> Chart | None:
    """Lying bars for each contender by the fact `name`: times the floor, or milliseconds."""
    found = [it for it in results if not floor or it.over_floor]
    if not found:
        return None

    def size(it: Result) -> float:
        return it.over_floor.median if floor and it.over_floor else it.seconds.median * 1e3

    def named(it: Result) -> str:
        return short(it.facts.get(name, it.recipe))

    most: dict[str, float] = {}
    for it in found:
        most[named(it)] = max(most.get(named(it), 0.0), size(it))
    order = sorted(most, key=lambda key: -most[key])[:24]
    series = []
    for contender in dict.fromkeys(it.contender for it in sorted(found, key=lambda it: it.contender != "compiled")):
        by_name = {named(it): it for it in found if it.contender == contender}
        names = [key for key in order if key in by_name]
        points = [by_name[key] for key in names]
        label = [f"{size(it):.3g}x" if floor else _ms(it.seconds.median) for it in points]
        hover = [
            f"{key}, {_label(contender)}, {_shape(it.shape)}: {_ms(it.seconds.median)}"
            + (f", {it.over_floor.median:.3g} x the floor" if it.over_floor else "")
            for key, it in zip(names, points, strict=True)
        ]
        series.append(
            Series(_label(contender), [size(it) for it in points], names, hover, _colour(contender), "bar", label=label)
        )
    rows = [
        (named(it), _label(it.contender), _shape(it.shape), _ms(it.seconds.median), _times(it.over_floor),
         _megabytes(it.facts, "peak_memory"), _difference(it))
        for it in sorted(found, key=lambda it: (order + [named(it)]).index(named(it)))
    ]  # fmt: skip
    return Chart(
        title,
        note + (f" The {len(order)} slowest of {len(most)}; the table holds all." if len(most) > len(order) else ""),
        series,
        Table((name, "contender", "shape", "time", "x floor (quartiles)", "memory", "difference"), rows),
        "times the streaming floor (log)" if floor else "milliseconds (log)",
        "",
        x_log=True,
        flat=True,
        height=120 + (16 + 18 * len(series)) * len(order),
    )


def _history(runs: Sequence[Run]) -> Chart | None:
    if len(runs) < 2:
        return None
    series: list[Series] = []
    rows: list[tuple[str, ...]] = []
    tags: list[dict[str, str]] = []
    keys = dict.fromkeys(key for run in runs for key, it in run.results.items() if it.suite == "pipeline")
    for key in keys:
        seen = [(run, run.results[key]) for run in runs if key in run.results]
        points = [(run, it, it.over_floor) for run, it in seen if it.over_floor and it.contender == "compiled"]
        if len(points) < 2:
            continue
        bad = [False] + [is_regression(a[2], b[2]) for a, b in zip(points, points[1:], strict=False)]
        it = points[0][1]
        hover = [
            f"{run.commit}, {_shape(it.shape)}: {r.median:.3g} x the floor{', a regression' if worse else ''}"
            for (run, _, r), worse in zip(points, bad, strict=True)
        ]
        colour = SPARE[len(series) % len(SPARE)]
        series.append(
            Series(
                _shape(it.shape), [run.commit for run, _, _ in points], [r.median for _, _, r in points], hover, colour,
                bad=bad, tags=_tags(it),
            )
        )  # fmt: skip
        for (run, _, r), worse in zip(points, bad, strict=True):
            rows.append((run.commit, it.recipe, it.mask, _shape(it.shape), _times(r), "regression" if worse else ""))
            tags.append(_tags(it))
    if not series:
        return None
    return Chart(
        "History: times the floor, commit by commit",
        "Lower is better; a red cross is a regression by the rule below.",
        series,
        Table(("commit", "recipe", "mask", "shape", "x floor (quartiles)", ""), rows, tags),
        "commit",
        "times the streaming floor",
    )


def headline(results: Iterable[Result]) -> str:
    """The main result in one sentence: the largest shape on which a floor and, best, AReaL were timed."""
    pipeline = [it for it in results if it.suite == "pipeline"]
    ours = [it for it in pipeline if it.contender == "compiled" and it.over_floor]
    if not ours:
        return "Nothing was measured against the streaming floor."
    peers = {(it.recipe, it.mask, it.shape): it for it in pipeline if it.contender == "areal" and "compiled" in it.over}
    best = max(ours, key=lambda it: ((it.recipe, it.mask, it.shape) in peers, it.slots, it.mask == "contiguous"))
    assert best.over_floor is not None
    text = f"{best.over_floor.median:.2g} x the streaming floor"
    if peer := peers.get((best.recipe, best.mask, best.shape)):
        text += f", {peer.over['compiled'].median:.2g} x faster than AReaL"
    return f"{text} at {best.shape[0]} rows x {best.shape[1]:,} tokens ({best.recipe})"


def dashboard(runs: Sequence[Run]) -> str:
    """The page of some runs; its charts show the newest, its history all."""
    run = runs[-1]
    suites: dict[str, list[Result]] = {}
    for it in run.results.values():
        suites.setdefault(it.suite, []).append(it)
    pipeline = suites.get("pipeline", [])
    charts = {
        "Time against shape": _time_against_shape(pipeline) if pipeline else None,
        "Speed-ups over peers": _speed_ups(pipeline),
        "Passes": _passes(suites.get("pass", [])),
        "Starts and compile times": _starts(suites.get("start", [])),
        "Buckets": _buckets(suites.get("bucket", [])),
        "Recipes": _bars("Every shipped recipe, against its floor", "Lower is better; one batch with all optional "
                         "channels.", suites.get("recipe", []), "recipe", floor=True),
        "Stages": _bars("Stages by themselves", "Each on what it gets within the pipeline. Compiled together they fuse,"
                        " so the sum is no guide to the whole.", suites.get("stage", []), "stage", floor=False),
        "Users' functions": _bars("Users' functions", "require: part of the compiled program. never: between two "
                                  "segments. cousin: the built-in stage that does the same.",
                                  suites.get("plugin", []), "recipe", floor=False),
        "History": _history(runs),
    }  # fmt: skip
    why = {
        "Speed-ups over peers": "no peer was timed (make peers builds their environment)",
        "History": "results of one commit only; give files of several",
    }
    absent = [f"{name}: {why.get(name, 'these results hold none')}" for name, it in charts.items() if it is None]
    filters = {
        name: list(dict.fromkeys(getattr(it, name) for it in sorted(pipeline, key=lambda it: it.slots)))
        for name in ("recipe", "mask")
    }
    facts = [(name, run.stamp[name]) for name in ("cpu", "cores", "threads", "device", "torch", "python")
             if name in run.stamp]  # fmt: skip
    facts.append(("commit", run.commit))
    footer = [page.paragraph(RULE), page.paragraph(CHECKED)]
    if absent:
        footer += [page.paragraph("Not shown:"), page.bullets(absent)]
    return page.page(
        "compiled_adv performance",
        [section(it) for it in charts.values() if it is not None],
        headline=headline(run.results.values()),
        facts=facts,
        filters={name: choices for name, choices in filters.items() if len(choices) > 1},
        footer=footer,
    )


def write_dashboard(results: Sequence[Path], out: Path, baseline: Path | None = None) -> tuple[Path, list[str]]:
    """The page of some files in a folder, and the regressions against a baseline. Nothing is written on bad input."""
    path = out / "index.html"
    check_outputs([path], [*results, *([] if baseline is None else [baseline])])
    runs = read_runs(results)
    slower = [] if baseline is None else against_baseline(runs, results, baseline)
    write_whole(path, dashboard(runs).encode())
    return path, slower
