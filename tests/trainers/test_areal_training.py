"""AReaL's real PPOActor trains a small transformer on a CPU, on its own advantages and on ours."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("areal", reason="make peers")

from areal_training import Run, train  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, REPLAYED = 40, 20


@pytest.fixture(scope="module")
def own() -> Run:
    return train(STEPS, ours=False)


@pytest.fixture(scope="module")
def ours() -> Run:
    return train(STEPS, ours=True)


@pytest.fixture(scope="module")
def replayed(own: Run) -> Run:
    """Ours on the rollouts of the other run."""
    return train(REPLAYED, ours=True, replay=own.rollouts)


def test_at_every_step_both_advantages_of_a_batch_agree(own: Run, ours: Run) -> None:
    assert max(own.apart + ours.apart) <= 1e-5


def test_on_replayed_rollouts_the_parameters_stay_together(own: Run, replayed: Run) -> None:
    start, end, other = own.parameters[0], own.parameters[REPLAYED - 1], replayed.parameters[-1]
    assert max(float((end[name] - other[name]).abs().max()) for name in end) <= 1e-4
    assert max(float((end[name] - start[name]).abs().max()) for name in end) > 1e-2


def test_on_replayed_rollouts_the_same_statistics_are_logged(own: Run, replayed: Run) -> None:
    for want, got in zip(own.stats, replayed.stats, strict=False):
        assert got.keys() == want.keys() and "ppo_actor/advantages/avg" in got
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("which", ["own", "ours"])
def test_the_reward_rises(which: str, request: pytest.FixtureRequest) -> None:
    rewards = torch.tensor(request.getfixturevalue(which).rewards)
    assert rewards[-10:].mean() > rewards[:10].mean() + 0.5
