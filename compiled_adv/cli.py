"""Takes a command line; gives tables or JSON. Bad input ends in one message on standard error and exit code 2."""

from __future__ import annotations

import json as jsonlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

try:
    import typer
except ModuleNotFoundError:
    print("the shell needs its extra: pip install 'compiled-adv[shell]'", file=sys.stderr)
    raise SystemExit(2) from None

from torch import Tensor

import compiled_adv
from compiled_adv import config_file
from compiled_adv.batch import widen
from compiled_adv.channel import OPTIONAL
from compiled_adv.errors import (
    AdvantageWarning,
    CompiledAdvError,
    ConflictingSettings,
    FileError,
    OutputExists,
    RolloutFile,
    UnknownName,
    suggest,
)
from compiled_adv.files import check_outputs, write_together, write_whole
from compiled_adv.report import Batch, batch_of
from compiled_adv.report import report as report_page
from compiled_adv.rollouts import EMBEDDED, find_rollouts, plan_results, read_groups, write_group
from compiled_adv.shards import Shard, torchrun
from compiled_adv.spec import Backend, Spec
from compiled_adv.summary import Summary, result_table, summarise, together

if TYPE_CHECKING:
    from rich.progress import Progress

RECIPES = f"Recipes, for --config: {', '.join(config_file.recipes())}"
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=RECIPES)

MOST_SIZE = (1 << 31) - 1  # rows or tokens of a bucket

ConfigOption = Annotated[str, typer.Option("--config", help="A YAML or JSON file, or the name of a shipped recipe.")]
BackendOption = Annotated[Backend | None, typer.Option("--backend", help="Instead of the configured one.")]


@contextmanager
def _one_message() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader left, such as `head`: typer ends quietly
    except (CompiledAdvError, OSError) as error:
        message = error if isinstance(error, CompiledAdvError) else FileError(str(error))
        typer.echo("\n".join([str(message), *getattr(error, "__notes__", ())]), err=True)
        raise typer.Exit(2) from None


def _load(config: str, backend: Backend | None) -> Spec:
    spec = compiled_adv.load_config(config)
    return spec if backend is None else spec.with_advantage(backend=backend)


@app.command()
def run(
    config: ConfigOption = "default",
    rollouts: Annotated[
        Path | None, typer.Option(help="A rollout file or a folder of them; the embedded rollouts if left out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for one result file per group; none if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into an --out that is not empty.")] = False,
    report: Annotated[Path | None, typer.Option(help="An HTML page about the batches, as a file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    backend: BackendOption = None,
) -> None:
    """Compute the advantages of rollout groups: one batch and one table per folder. Under torchrun ranks share them."""
    with _one_message(), torchrun() as shard:
        root = EMBEDDED if rollouts is None else rollouts
        shares = {folder: shard.part(paths) for folder, paths in find_rollouts(root).items()}
        results = [] if out is None else plan_results(out, root, shares, overwrite=overwrite)
        if report is not None:
            inputs = [*(path for paths in shares.values() for path in paths), Path(config), *results]
            _may_report(report, shard, overwrite, inputs)
        spec = _load(config, backend)
        if report is not None:
            spec = spec.with_advantage(stats=True)
        compute = compiled_adv.build(spec, "world" if shard.size > 1 else None)
        with _bar(shard, sum(map(len, shares.values())) + len(results)) as bar:
            batches = [
                _computed(compute, shard, bar, _name(root, folder), paths, bool(results), report is not None)
                for folder, paths in shares.items()
            ]
            # Only now, so that bad input in a later folder leaves nothing behind.
            page = "" if report is None else report_page([it.drawn for it in batches if it and it.drawn], compute)

            def write() -> list[Summary | None]:
                groups = [group for it in batches if it for group in it.groups]
                for path, group in zip(bar.each(results, "writing"), groups, strict=True):
                    write_group(path, group)
                return [None if it is None else it.summary for it in batches]

            parts = zip(*shard.gather(write), strict=True)
            if report is not None:
                write_whole(report, page.encode())
        if shard.rank == 0:
            summaries = [together([part for part in of_batch if part is not None]) for of_batch in parts]
            _print(summaries, spec.advantage.backend, json)


def _may_report(report: Path, shard: Shard, overwrite: bool, taken: list[Path]) -> None:
    if shard.size > 1:
        what = "a report is drawn by one process"
        raise ConflictingSettings(what, at="--report", found=f"{shard.size} ranks", hint="without torchrun")
    if report.exists() and not overwrite:
        raise OutputExists(f"{report} is there already", hint="another --report, or --overwrite")
    check_outputs([report], taken)


class _Bar:
    """A step of a progress bar for each file."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.task = progress, progress.add_task("", total=total)

    def say(self, what: str) -> None:
        from rich.markup import escape

        self.progress.update(self.task, description=escape(what))

    def each(self, paths: Iterable[Path], what: str) -> Iterator[Path]:
        for path in paths:
            self.say(f"{what} {path.name}")
            yield path
            self.progress.advance(self.task)


@contextmanager
def _bar(shard: Shard, total: int) -> Iterator[_Bar]:
    """Drawn on the first rank's terminal, if there is one."""
    from rich.console import Console
    from rich.progress import Progress

    terminal = Console(stderr=True)
    quiet = shard.rank > 0 or not terminal.is_terminal
    with Progress(console=terminal, transient=True, disable=quiet) as progress:
        yield _Bar(progress, total)


@dataclass(frozen=True)
class _Computed:
    """What is kept of a folder's batch: its line of the tables, its result files and its part of a report, if asked."""

    summary: Summary
    groups: list[dict[str, Any]]
    drawn: Batch | None


def _computed(
    compute: compiled_adv.Compute, shard: Shard, bar: _Bar, name: str, paths: list[Path], written: bool, drawn: bool
) -> _Computed | None:
    """A folder's batch, computed by all ranks; None on one that has no prompt of it."""
    try:
        found = _read(shard, bar.each(paths, "reading"))
        bar.say(f"computing {name}")
        if found is None:
            compute.join()
            return None
        batch, meta = found
        output, seconds = _timed(compute, batch, meta)
    except CompiledAdvError as error:
        error.add_note(f"  in    {name}")
        raise
    return _Computed(
        summarise(name, batch, output, groups=len(paths), seconds=seconds, warnings=compute.last_warnings),
        compiled_adv.split_batch(output, meta) if written else [],
        batch_of(name, compute, batch, output, meta, [path.stem for path in paths]) if drawn else None,
    )


def _print(summaries: list[Summary], backend: str, json: bool) -> None:
    from rich.console import Console

    if json:
        facts = {"backend": backend, "batches": [summary.as_dict() for summary in summaries]}
        typer.echo(jsonlib.dumps(facts, indent=1))
        return
    # A pipe has no width of its own, and 80 would cut numbers off.
    console = Console(markup=False, highlight=False, width=None if _at_terminal() else 100)
    for summary in summaries:
        console.print(result_table(summary))


def _at_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()  # None where a caller closed it


def _read(shard: Shard, paths: Iterable[Path]) -> tuple[dict[str, Any], Any] | None:
    """This rank's prompts as a batch, as wide as the widest rank's, since the width may have a meaning."""
    groups: list[dict[str, Any]] = []

    def form() -> tuple[int, dict[str, str]] | None:
        groups.extend(read_groups(paths))
        tensors = {key: x for group in groups[:1] for key, x in group.items() if isinstance(x, Tensor)}
        widths = [group["attention_mask"].shape[1] for group in groups if "attention_mask" in group]
        return (max(widths, default=0), {key: str(x.dtype) for key, x in tensors.items()}) if groups else None

    forms = [found for found in shard.gather(form) if found is not None]
    for _, tensors in forms:
        if tensors != forms[0][1]:
            raise RolloutFile("files of one folder carry different tensors", hint="a folder for each kind")
    if not groups:
        return None
    batch, meta = compiled_adv.concat_batch(groups)
    return widen(batch, max(width for width, _ in forms)), meta


def _name(root: Path, folder: Path) -> str:
    """What a batch is called: its folder, or what was given."""
    return str(folder) if folder.parts else root.resolve().name


def _timed(compute: Any, batch: dict[str, Any], meta: Any) -> tuple[dict[str, Any], float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvantageWarning)  # the table counts them
        start = time.perf_counter()
        output = compute(batch, meta)
        return output, time.perf_counter() - start


@app.command()
def explain(
    config: ConfigOption = "default",
    format: Annotated[Literal["text", "json"], typer.Option(help="For people or for machines.")] = "text",
) -> None:
    """Print the stages that a config declares, and what flows between them."""
    with _one_message():
        compute = compiled_adv.build(config)
        typer.echo(compute.explain() if format == "text" else jsonlib.dumps(compute.explain(format="json"), indent=1))


@app.command()
def warmup(
    config: ConfigOption = "default",
    channels: Annotated[
        str, typer.Option(help="Optional channels that batches will carry, with commas between; all if left out.")
    ] = ",".join(OPTIONAL),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Compile every declared bucket into the on-disk cache, from which later processes start."""
    from rich.console import Console
    from rich.progress import Progress

    with _one_message():
        names = [name for name in channels.split(",") if name]
        if unknown := [name for name in names if name not in OPTIONAL]:
            raise UnknownName(f"unknown channel '{unknown[0]}'", at="--channels", hint=suggest(unknown[0], OPTIONAL))
        compute = compiled_adv.build(config)
        terminal = Console(stderr=True)
        with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
            compute.warmup(channels=names, progress=lambda jobs: progress.track(jobs, description="compiling"))
        info = compute.cache.info()
        if json:
            typer.echo(jsonlib.dumps(vars(info), indent=1))
        else:
            typer.echo(f"{info.executables} executables, {info.compile_seconds:.1f} s compiling")


@app.command()
def doctor(
    config: ConfigOption = "default",
    rollouts: Annotated[
        Path | None, typer.Option(help="A rollout file or a folder of them; the embedded rollouts if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what may harm training with a config on these rollouts, worst first, and what to do about it."""
    from compiled_adv.diagnosis import text
    from compiled_adv.doctor import Rollouts, diagnose

    with _one_message():
        root = EMBEDDED if rollouts is None else rollouts
        batches = [
            Rollouts(_name(root, folder), *compiled_adv.concat_batch(read_groups(paths)))
            for folder, paths in find_rollouts(root).items()
        ]
        diagnosis = diagnose(config, batches)
        typer.echo(jsonlib.dumps(diagnosis.as_dict(), indent=1) if json else text(diagnosis))


@app.command()
def tune(
    lengths: Annotated[Path, typer.Option(help="A JSON file of lengths or shapes, or a folder of rollouts.")],
    max_buckets: Annotated[int, typer.Option(help="Row boundaries times token boundaries, at most.")],
    out: Annotated[Path, typer.Option(help="The YAML file to write; it loads as `buckets:`.")],
    config: ConfigOption = "default",
    steps: Annotated[int, typer.Option(help="Steps that the time to compile is spread over.")] = 100_000,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Draw batches of so many prompts from a folder.", max=100_000)
    ] = None,
    max_rows: Annotated[
        int, typer.Option(min=1, max=MOST_SIZE, help="Rows that the largest bucket holds at least.")
    ] = 1,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_SIZE, help="Tokens that the largest bucket holds at least.")
    ] = 1,
    picture: Annotated[Path | None, typer.Option(help="HTML file of the picture; beside --out if left out.")] = None,
) -> None:
    """Pick bucket boundaries for a workload's lengths, by the cost of padding and compiling on this machine."""
    from rich.console import Console

    from compiled_adv import tune as tuner

    with _one_message():
        drawn = picture or out.parent / f"{out.stem}.html"
        check_outputs([out, drawn], [lengths, Path(config)])
        workload = tuner.read_lengths(lengths, prompts)
        tuner.check(workload, max_buckets, steps)
        cost = tuner.measure(_load(config, None), workload, steps)
        tuning = tuner.tune(workload, cost, max_buckets, (max_rows, max_tokens))
        write_together({out: tuner.as_yaml(tuning).encode(), drawn: tuner.picture(tuning).encode()})
        width = None if _at_terminal() else 110
        Console(markup=False, highlight=False, width=width).print(tuner.table(tuning))
        typer.echo(f"wrote {out} and {drawn}")


@app.command()
def dashboard(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS.json...", help="What make bench wrote.")],
    out: Annotated[Path, typer.Option(help="The folder for index.html.")],
    fail_on_regression: Annotated[
        Path | None, typer.Option(metavar="BASELINE.json", help="Exit with 1 and a list if something became slower.")
    ] = None,
) -> None:
    """Write one page of charts: times against the floor and the peers, what passes are worth, history."""
    from compiled_adv.dashboard import write_dashboard

    with _one_message():
        page, slower = write_dashboard(results, out, fail_on_regression)
        typer.echo("\n".join([f"wrote {page}", *(f"regression: {line}" for line in slower)]))
    raise typer.Exit(1 if slower else 0)


@app.command()
def conformance(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of golden files.")],
    backend: BackendOption = None,
    rules: Annotated[Literal["default", "strict", "all"], typer.Option(help="Which cases, by rule set.")] = "all",
) -> None:
    """Hold the computation to golden files: inputs with the right outputs, warnings and refusals."""
    from compiled_adv.conformance import run_folder

    with _one_message():
        results = run_folder(folder, backend=backend, rules=rules)
        counts = Counter(result.status for result in results)
        for result in results:
            if result.status == "failed":
                typer.echo(f"{result.name}: {' '.join(result.reason.split())}")
        typer.echo(", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped")))
    raise typer.Exit(1 if counts["failed"] else 0)


def main() -> None:
    app()
