"""`torchrun -m compiled_adv run`: ranks share the prompts, and give what one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

from tests.cli.conftest import prompt

NORM = {"mean_level": "batch", "std_level": "batch", "eps": 0.05}


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "compiled_adv", "run", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"actor": {"reward_norm": NORM, "adv_norm": NORM, "advantage": {"backend": "eager"}}}))
    return path


@pytest.fixture
def untold(rollouts: Path) -> Path:
    """Rollouts that do not say who was truncated: the padded width does."""
    for path in rollouts.iterdir():
        save_file({k: x for k, x in load_file(path).items() if k != "is_truncated"}, path)
    return rollouts


def assert_near(got: Any, want: Any) -> None:
    """The same facts, numbers to 1e-5, but for the time."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want.keys() - {"seconds", "tokens_per_second"}:
            assert_near(got[key], want[key])
    elif isinstance(want, float):
        assert abs(got - want) <= 1e-5 * (1 + abs(want))
    else:
        assert got == want


def test_ranks_give_what_one_process_gives_though_the_first_has_no_prompt(
    untold: Path, config: Path, tmp_path: Path, shell: Callable[..., Result]
) -> None:
    words = ["--config", config, "--rollouts", untold, "--json", "--out"]
    one, many = shell("run", *words, tmp_path / "one"), torchrun(3, *words, tmp_path / "many")
    assert one.exit_code == 0 and many.returncode == 0, many.stderr
    (want,), (got,) = json.loads(one.stdout)["batches"], json.loads(many.stdout)["batches"]
    assert_near(got, want)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == files and len(files) == 2
    for name in files:
        expected, found = load_file(tmp_path / "one" / name), load_file(tmp_path / "many" / name)
        assert expected.keys() == found.keys()
        assert all(torch.allclose(x.double(), found[key].double(), 1e-5, 1e-5) for key, x in expected.items())


def test_bad_input_of_one_rank_ends_all_and_leaves_nothing_behind(rollouts: Path, config: Path, tmp_path: Path) -> None:
    spoilt = prompt(2, 6, 0.0)
    spoilt["logprobs"][:] = float("nan")
    save_file(spoilt, rollouts / "group_001.safetensors")
    found = torchrun(2, "--config", config, "--rollouts", rollouts, "--out", tmp_path / "out")
    assert found.returncode != 0 and found.stdout == ""
    assert "NonFinite" in found.stderr and "RankFailed" in found.stderr
    assert not (tmp_path / "out").exists()
