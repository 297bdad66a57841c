"""Finite inputs whose results leave float32: an error that names the row, and nothing short of that is one."""

import math
from typing import Any

import pytest
import torch

from compiled_adv.errors import NonFinite
from tests.contracts.small import Runner, near, rows

PENALTY = {"overlong_reward_penalty": True, "overlong_tokens": 1, "max_new_tokens": 1}
UNCLIPPED = {"reward_clip": math.inf}
CUSTOM = {"advantage": {"estimator": {"implementation": "tests.known_faults.plugins.values_as_advantages"}}}

# name -> (batch of which row 1 overflows, actor)
OVERFLOWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "score": (rows("pg", "pg", rewards=[0, 1e30]), UNCLIPPED | {"reward_scaling": 1e30}),
    "score before a custom estimator": (
        rows("pg", "pg", rewards=[0, 1e30]),
        UNCLIPPED | {"reward_scaling": 1e30} | CUSTOM,
    ),
    "spread of nothing": (
        rows("pg", "pp", rewards=[1, 1]),
        {"reward_norm": {"mean_level": None, "std_level": "group", "std_unbiased": False, "group_size": 3, "eps": 0}},
    ),
    "penalty of a discarded row": (
        rows("pg", "pgggg", is_truncated=[False, True]),
        PENALTY | {"overlong_penalty_factor": 3e38, "mask_no_eos_with_zero": True},
    ),
    "KL where no advantage sees it": (rows("pgp", "gpp", logprobs=[[0, 0, 0], [-9, 0, 0]]), {"kl_ctl": 3e38}),
    "recursion": (
        rows("pg", "p" + "g" * 400, logprobs=torch.ones(2, 401)),
        {"gae_lambda": 2.0, "kl_ctl": 1.0, "discount": 1.0},
    ),
}


@pytest.fixture(params=["reference", "eager"])
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")
@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_result_beyond_float32_is_an_error(run: Runner, name: str) -> None:
    batch, actor = OVERFLOWS[name]
    error = run.refusal(batch, actor)
    assert isinstance(error, NonFinite) and "1]" in str(error), error


@pytest.mark.parametrize("eps", [1e-40, 1e-45, 5e-324])
@pytest.mark.parametrize("block", ["adv_norm", "reward_norm"])
def test_no_spread_over_the_smallest_eps_is_zero(run: Runner, block: str, eps: float) -> None:
    norm = {"mean_level": "batch", "std_level": "batch", "std_unbiased": False, "eps": eps}
    assert near(run(rows("pg", "pg", rewards=[1, 1]), {block: norm})["advantages"], [[0, 0], [0, 0]])


def test_large_results_that_fit_are_no_error(run: Runner) -> None:
    out = run(rows("pg", rewards=[2e38]), UNCLIPPED)
    for key in ("advantages", "returns", "tot_rewards"):
        assert near(out[key] / 2e38, [[1, 0]])
