"""verl's own compute_advantage on real DataProtos, in spawned processes that learn of us by environment variables; and
what is refused, against verl's own module in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

verl = pytest.importorskip("verl")

from verl.trainer.ppo import core_algos  # noqa: E402
from verl_steps import NAMES, proto  # noqa: E402

from compiled_adv.errors import MissingKey, NonFinite, UnknownName, UnsupportedTrainer  # noqa: E402
from compiled_adv.integrations import verl as ours  # noqa: E402

STEPS = Path(__file__).parent / "verl_steps.py"


def worker(*words: str, **environment: str) -> dict[str, Any]:
    """The last line that a process with these environment variables prints."""
    known = {"VERL_USE_EXTERNAL_MODULES": "compiled_adv.integrations.verl", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(STEPS), *words]
    done = subprocess.run(command, env=os.environ | known | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    own = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    yield
    ours.disable()
    assert own == core_algos.ADV_ESTIMATOR_REGISTRY


def test_a_worker_has_our_estimators_after_importing_verl() -> None:
    found = worker("registered")
    assert all(found["registry"][f"compiled_{name}"] == ours.__name__ for name in NAMES)
    assert all(found["registry"][name] == found["gae"] == core_algos.__name__ for name in NAMES)


def test_a_worker_replaces_verls_own_only_by_choice() -> None:
    found = worker("registered", COMPILED_ADV_VERL_REPLACE="gae, grpo")
    assert found["gae"] == found["registry"]["gae"] == found["registry"]["grpo"] == ours.__name__
    assert found["registry"]["rloo"] == core_algos.__name__


@pytest.mark.parametrize("backend, batches", [("eager", 60), ("compiled", 1)])
def test_verls_dispatcher_gives_verls_numbers(backend: str, batches: int) -> None:
    worst = worker(str(batches), COMPILED_ADV_BACKEND=backend)
    assert worst == {name: pytest.approx(0.0, abs=1e-5) for name in NAMES}


# ---- enabling ----


def test_enabling_twice_and_disabling_twice_are_harmless() -> None:
    own = core_algos.compute_gae_advantage_return
    for _ in range(2):
        ours.enable(["gae"])
    assert core_algos.compute_gae_advantage_return is ours.gae
    for _ in range(2):
        ours.disable()
    assert core_algos.compute_gae_advantage_return is own


def test_an_unknown_verl_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__version__", "0.8.0")
    with pytest.raises(UnsupportedTrainer, match=r"(?s)0\.8\.0.*0\.9\.1"):
        ours.enable(["gae"])
    monkeypatch.undo()
    assert "compiled_gae" not in core_algos.ADV_ESTIMATOR_REGISTRY
    assert core_algos.compute_gae_advantage_return is not ours.gae


def test_a_verl_whose_functions_take_something_else_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "compute_rloo_outcome_advantage", lambda rewards: rewards)
    with pytest.raises(UnsupportedTrainer, match="compute_rloo_outcome_advantage"):
        ours.enable()
    assert "compiled_grpo" not in core_algos.ADV_ESTIMATOR_REGISTRY


def test_a_mistyped_replacement_is_answered_with_the_nearest_one_and_nothing_changes() -> None:
    with pytest.raises(UnknownName, match="grpo"):
        ours.enable(["gae", "grppo"])
    assert "compiled_gae" not in core_algos.ADV_ESTIMATOR_REGISTRY
    assert core_algos.compute_gae_advantage_return is not ours.gae


# ---- what verl does not give, and bad batches ----


def batch(**change: Any) -> dict[str, torch.Tensor]:
    return dict(proto(0).batch.items()) | change


def test_compiled_gae_says_how_to_get_values() -> None:
    given = batch()
    with pytest.raises(MissingKey, match=r"(?s)adv_estimator.*COMPILED_ADV_VERL_REPLACE=gae"):
        ours.gae(token_level_rewards=given["token_level_rewards"], response_mask=given["response_mask"], config=None)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_an_estimator_of_prompts_needs_their_labels(name: str) -> None:
    given = batch()
    with pytest.raises(MissingKey, match="uid"):
        ours.ESTIMATORS[name](given["token_level_rewards"], given["response_mask"])


@pytest.mark.parametrize("active", [0, 1])
def test_a_batch_without_spread_is_refused_in_verls_own_words(active: int) -> None:
    mask = torch.zeros(2, 3, dtype=torch.int64)
    mask[0, :active] = 1
    with pytest.raises(ValueError, match="mask"):
        ours.gae(torch.ones(2, 3), torch.zeros(2, 3), mask, 1.0, 1.0)


def test_a_number_that_is_none_is_named_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "eager")
    given = batch()
    given["token_level_rewards"][3, 0] = float("nan")
    given.pop("advantages", None)
    with pytest.raises(NonFinite, match="3"):
        ours.gae(**given, gamma=1.0, lam=1.0)


def test_nothing_that_was_given_is_written_to_or_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "eager")
    given = batch()
    before = {key: x.clone() for key, x in given.items()}
    for out in ours.gae(**given, gamma=1.0, lam=0.9):
        out.fill_(7.0)
    ours.grpo(given["token_level_rewards"], given["response_mask"], proto(0).non_tensor_batch["uid"])[0].fill_(7.0)
    assert all(torch.equal(given[key], before[key]) for key in before)
