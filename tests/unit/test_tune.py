"""Bucket boundaries for a workload: exact where they are said to be, never worse than powers of two, and they load."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import compiled_adv
from compiled_adv.cli import app
from compiled_adv.config_file import bucket_files
from compiled_adv.errors import ConflictingSettings, InvalidValue
from compiled_adv.rollouts import EMBEDDED
from compiled_adv.tune import (
    ALIGN,
    Cost,
    Workload,
    as_yaml,
    boundaries,
    choose,
    fit,
    mean_slots,
    read_lengths,
    tune,
)

COST = Cost(per_call=1e-3, per_slot=1e-9, compile_seconds=2.0, steps=10_000)


def workload(seed: int, batches: int = 12, rows: int = 6, tokens: int = 12) -> Workload:
    draw = random.Random(seed)
    shapes = [(draw.randint(1, rows), ALIGN * draw.randint(1, tokens)) for _ in range(batches)]
    return Workload(Counter(shapes), "made up")


def brute(sizes: dict[int, float], most: int) -> float:
    """The least cost of any boundaries."""
    ordered = sorted(sizes)
    every = (
        (*chosen, ordered[-1])
        for n in range(min(most, len(ordered)))
        for chosen in itertools.combinations(ordered[:-1], n)
    )
    return min(sum(w * next(x for x in bounds if x >= size) for size, w in sizes.items()) for bounds in every)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_one_axis_is_exact(seed: int, most: int) -> None:
    draw = random.Random(seed)
    sizes = {draw.randint(1, 60): float(draw.randint(1, 9)) for _ in range(9)}
    found = boundaries(sizes, most)
    cost = sum(w * next(x for x in found if x >= size) for size, w in sizes.items())
    assert len(found) <= most and cost == brute(sizes, most)


@pytest.mark.parametrize("seed", range(8))
def test_both_axes_are_exact_where_every_choice_of_rows_is_tried(seed: int) -> None:
    work = workload(seed)
    rows, tokens = (sorted({shape[i] for shape in work.counts}) for i in (0, 1))
    pairs = itertools.product(itertools.combinations(rows[:-1], 1), itertools.combinations(tokens[:-1], 2))
    least = min(mean_slots(work, (*b, rows[-1]), (*t, tokens[-1])) for b, t in pairs)
    assert choose(work, 2, 3, (rows[-1], tokens[-1])).slots == least


def test_both_axes_by_turns_stay_near_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    off = []
    for seed in range(8):
        work, top = workload(seed, batches=40, rows=12), (12, 12 * ALIGN)
        exact = choose(work, 3, 3, top).slots
        with monkeypatch.context() as patch:
            patch.setattr("compiled_adv.tune.MOST_TRIED", 0)
            off.append(choose(work, 3, 3, top).slots / exact - 1)
    assert min(off) >= 0 and max(off) < 0.05


@pytest.mark.parametrize("seed", range(8))
def test_tuned_boundaries_pad_no_more_than_powers_of_two(seed: int) -> None:
    tuning = tune(workload(seed, batches=40, tokens=40), COST, 6)
    assert tuning.chosen.slots <= tuning.powers.slots and tuning.powers.buckets <= tuning.chosen.buckets <= 6
    costs = [COST.step(best.slots, best.buckets) for _, best, _ in tuning.frontier]
    assert COST.step(tuning.chosen.slots, tuning.chosen.buckets) == min(costs)
    assert all(best.slots <= other.slots for _, best, other in tuning.frontier)


def test_more_buckets_are_not_taken_where_compiling_costs_more() -> None:
    dear = Cost(per_call=1e-3, per_slot=1e-9, compile_seconds=1e6, steps=1)
    assert tune(workload(0), dear, 5).chosen.buckets == 1


def test_every_batch_and_the_wanted_top_have_a_bucket() -> None:
    work = workload(3)
    chosen = tune(work, COST, 4, (100, 10_000)).chosen
    assert chosen.rows[-1] >= 100 and chosen.tokens[-1] >= 10_000
    assert all(b <= chosen.rows[-1] and t <= chosen.tokens[-1] for b, t in work.counts)


def test_the_cost_is_fitted() -> None:
    cost = fit([(slots, 2e-3 + 3e-9 * slots) for slots in (1e3, 1e5, 1e6)], 1.0, 10)
    assert cost.per_call == pytest.approx(2e-3) and cost.per_slot == pytest.approx(3e-9) and cost.misfit < 1e-6


@pytest.mark.parametrize("times", [(1.0, 0.5, 0.25), (1e-9, 1.0, 10.0)])
def test_no_cost_is_negative(times: tuple[float, ...]) -> None:
    cost = fit([*zip((1e3, 1e5, 1e6), times, strict=True)], 1.0, 10)
    assert cost.per_call >= 0 and cost.per_slot >= 0 and cost.misfit > 0


def test_what_is_written_loads_as_buckets(tmp_path: Path) -> None:
    tuning = tune(workload(1), COST, 4)
    path = tmp_path / "mine.yaml"
    path.write_text(as_yaml(tuning))
    spec = compiled_adv.load_config({"advantage": {"compiled": {"buckets": str(path)}}})
    assert spec.advantage.compiled.buckets is not None
    assert tuple(spec.advantage.compiled.buckets.tokens) == tuning.chosen.tokens


def test_a_folder_of_rollouts_gives_its_shapes() -> None:
    assert sum(read_lengths(EMBEDDED).counts.values()) == 2  # one batch for each sub-folder
    drawn = read_lengths(EMBEDDED, prompts=4)
    assert drawn.steps == 200 and max(rows for rows, _ in drawn.counts) <= 4 * 8


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "no JSON"),
        ('{"shapes": [[1, 2], [3', "no JSON"),
        ("[1, 2]", "holds no lengths"),
        ({}, "holds no lengths"),
        ({"shapes": []}, "holds no batch"),
        ({"shapes": [[0, 5]]}, "at least one row"),
        ({"shapes": [[5, 0]]}, "at least one row"),
        ({"shapes": [[5, -3]]}, "at least one row"),
        ({"shapes": [[5, 2.5]]}, "whole number"),
        ({"shapes": [[5, 10**400]]}, "whole number"),
        ({"shapes": [[5, True]]}, "whole number"),
        ({"shapes": [[5]]}, "[rows, tokens]"),
        ({"shapes": [5]}, "a list is needed"),
        ({"lengths": [[5, 0]]}, "at least one token"),
        ({"lengths": [[]]}, "at least one token"),
        ({"lengths": [[5]], "shapes": [[1, 2]]}, "both"),
        ('{"shapes": [[1, 2]], "shapes": [[3, 4]]}', "twice"),
    ],
)
def test_lengths_that_are_none_are_refused(content: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    words = ["tune", "--lengths", str(path), "--max-buckets", "1", "--out", str(tmp_path / "out" / "x.yaml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "LengthsFile" in done.output and says in done.output, done.output
    assert [each.name for each in tmp_path.iterdir()] == ["lengths.json"]


@pytest.mark.parametrize("most", [0, -1, 4, 10**9])
def test_more_buckets_than_shapes_are_refused(most: int) -> None:
    with pytest.raises(InvalidValue, match="distinct shapes"):
        tune(Workload({(1, 16): 1, (2, 16): 5, (3, 32): 1}, "three"), COST, most)


def test_the_command_writes_buckets_and_a_picture(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"lengths": [[5, 9], [40, 3, 7], [100], [60, 60]]}))
    out = tmp_path / "new" / "mine.yaml"
    done = CliRunner().invoke(app, ["tune", "--lengths", str(lengths), "--max-buckets", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "powers of two" in done.output and "exact shapes" in done.output
    assert yaml.safe_load(out.read_text())["buckets"].keys() == {"rows", "tokens"}
    assert "lengths.json" in out.with_suffix(".html").read_text()


@pytest.mark.parametrize("name", ["single_turn_math", "multi_turn_agent", "long_reasoning"])
def test_a_shipped_file_serves_every_batch_that_it_came_from(name: str) -> None:
    file = bucket_files()[name]
    work = read_lengths(file.with_suffix(".lengths.json"))
    buckets = compiled_adv.load_config({"advantage": {"compiled": {"buckets": name}}}).advantage.compiled.buckets
    assert buckets is not None
    assert max(b for b, _ in work.counts) <= max(buckets.rows) and max(t for _, t in work.counts) <= max(buckets.tokens)


@pytest.mark.parametrize("name", [".", "", "lengths.json", "mine.html", "folder"])
def test_a_file_that_cannot_be_written_or_spoils_another_is_refused_before_timing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("lengths.json").write_text('{"shapes": [[1, 2]]}')
    done = CliRunner().invoke(app, ["tune", "--lengths", "lengths.json", "--max-buckets", "1", "--out", name])
    assert done.exit_code == 2 and "OutputFailed" in done.output, done.output
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "lengths.json"]
    assert Path("lengths.json").read_text() == '{"shapes": [[1, 2]]}'


@pytest.mark.parametrize("option", ["--steps", "--max-rows", "--max-tokens", "--prompts"])
def test_a_number_that_no_float_holds_is_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text('{"shapes": [[1, 2]]}')
    words = ["tune", "--lengths", tmp_path / "lengths.json", "--max-buckets", "1", "--out", tmp_path / "x.yaml"]
    done = CliRunner().invoke(app, [*map(str, words), option, str(10**400)])
    assert done.exit_code == 2 and not (tmp_path / "x.yaml").exists(), done.output


def test_prompts_are_drawn_from_a_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text('{"shapes": [[1, 2]]}')
    with pytest.raises(ConflictingSettings):
        read_lengths(tmp_path / "lengths.json", prompts=3)


@pytest.mark.parametrize("name", ["a\x01.json", "a\udc80.json", "a\n b: 5.json"])
def test_whatever_lengths_are_called_what_is_written_loads(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"shapes": [[1, 2], [3, 4]]}')
    (tmp_path / "mine.yaml").write_text(as_yaml(tune(read_lengths(tmp_path / name), COST, 1)), "utf-8")
    spec = compiled_adv.load_config({"advantage": {"compiled": {"buckets": str(tmp_path / "mine.yaml")}}})
    assert spec.advantage.compiled.buckets is not None


def test_many_sizes_take_no_square_of_memory() -> None:
    assert len(boundaries(dict.fromkeys(range(1, 50_001), 1), 3)) == 3
