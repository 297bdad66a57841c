"""Gives small rollout files: two prompts of different width, one with a rollout that spans two rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

Tensors = dict[str, Tensor]


def prompt(n_rows: int, width: int, reward: float) -> Tensors:
    """Row b is width-b tokens long, and all but its first two tokens are generated."""
    length_B = width - torch.arange(n_rows)
    position_T = torch.arange(width)
    valid_BT = position_T < length_B[:, None]
    generated_BT = valid_BT & (position_T >= 2)
    return {
        "input_ids": torch.arange(n_rows * width).reshape(n_rows, width),
        "attention_mask": valid_BT,
        "loss_mask": generated_BT.long(),
        "logprobs": -0.25 * generated_BT,
        "ref_logp": -0.5 * valid_BT,
        "values": 0.125 * valid_BT,
        "rewards": reward + torch.arange(n_rows, dtype=torch.float32) % 2,
        "is_truncated": torch.zeros(n_rows, dtype=torch.bool),
    }


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    save_file(prompt(2, 6, 0.0), folder / "group_000.safetensors")
    save_file(prompt(3, 8, 1.0), folder / "group_001.safetensors")
    return folder


@pytest.fixture
def shell() -> Callable[..., Result]:
    """Runs one command line in this process."""
    from compiled_adv.cli import app

    def run(*words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return run
