"""Takes rows drawn as text; gives batches small enough to compute by hand, and the runner that all contract tests use.

`p` is a prompt or tool token, `g` a generated one, `.` padding: "pgg." is a prompt, two generated tokens, padding.
"""

import warnings
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import AdvantageWarning, CompiledAdvError

DTYPES = {"turn_ids": torch.int64, "is_truncated": torch.bool}


def rows(*drawn: str, **channels: Any) -> dict[str, Any]:
    """A batch of these rows, right-padded to the longest. Lists become tensors; None leaves a key out.

    Rewards and log probabilities are 0 and no row is truncated, unless given.
    """
    width = max(len(row) for row in drawn)
    padded = [row.ljust(width, ".") for row in drawn]
    assert set("".join(padded)) <= set("pg."), padded
    batch: dict[str, Any] = {
        "input_ids": torch.arange(len(padded) * width).reshape(len(padded), width),
        "attention_mask": torch.tensor([[c != "." for c in row] for row in padded]).int(),
        "loss_mask": torch.tensor([[c == "g" for c in row] for row in padded]).int(),
        "rewards": torch.zeros(len(padded)),
        "logprobs": torch.zeros(len(padded), width),
        "is_truncated": torch.zeros(len(padded), dtype=torch.bool),
    }
    for key, value in channels.items():
        if value is None:
            batch.pop(key, None)
        elif isinstance(value, list):
            batch[key] = torch.tensor(value, dtype=DTYPES.get(key, torch.float32))
        else:
            batch[key] = value
    return batch


def meta_of(*sizes: int, groups: Any = None, width: int = 8) -> dict[str, Any]:
    """Metadata of prompts with these row counts."""
    return {
        "n_trajs": len(sizes),
        "traj_group_sizes": list(sizes),
        "traj_seqlens": [width] * len(sizes),
        "rollout_groups": groups,
    }


def group(*row_counts: int, rewards: Any = ()) -> dict[str, Any]:
    """One prompt's logical rollouts."""
    return {"row_counts": row_counts, "rewards": rewards}


class Runner:
    """Builds and calls on one backend. KL is off unless a test turns it on."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.warnings: dict[str, list[int]] = {}

    def build(self, actor: dict[str, Any] | None = None) -> compiled_adv.Compute:
        actor = {"kl_ctl": 0.0} | (actor or {})
        return compiled_adv.build(
            {"actor": actor | {"advantage": {"backend": self.backend} | actor.get("advantage", {})}}
        )

    def __call__(
        self, batch: dict[str, Any], actor: dict[str, Any] | None = None, meta: Any = None, **call: Any
    ) -> dict[str, Any]:
        compute = self.build(actor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AdvantageWarning)
            out = compute(batch, meta, **call)
        self.warnings = compute.last_warnings
        return out

    def refusal(self, *args: Any, **call: Any) -> CompiledAdvError:
        """The error of a call that must be refused, at build or before it runs."""
        with pytest.raises(CompiledAdvError) as caught:
            self(*args, **call)
        return caught.value


def near(got: torch.Tensor, want: Any) -> bool:
    """Equal to float32 rounding, shape included."""
    want = torch.as_tensor(want, dtype=torch.float64)
    return got.shape == want.shape and bool(((got.double() - want).abs() <= 1e-6 * (1 + want.abs())).all())


def plugin(slot: str, name: str, **kwargs: Any) -> dict[str, Any]:
    """The `advantage` block that puts a function of plugins_under_test.py into a slot."""
    path = f"tests.contracts.plugins_under_test.{name}"
    return {"advantage": {slot: {"implementation": path, "kwargs": kwargs}}}
