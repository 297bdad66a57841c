"""Every shipped recipe against numbers worked out by hand, on both backends that run without a compiler."""

from math import sqrt
from typing import Any

import pytest
import torch
import yaml

import compiled_adv
from compiled_adv import config_file
from compiled_adv.errors import BadKwargs, CompiledAdvError, MissingKey
from tests.contracts.small import Runner, meta_of, rows

FUNCTIONS = "compiled_adv.recipes."


@pytest.fixture(params=["reference", "eager"])
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


def recipe(name: str, **advantage: Any) -> dict[str, Any]:
    """The actor block of a recipe, with other stages where they are given."""
    actor = yaml.safe_load(config_file.recipes()[name].read_text())["actor"]
    return actor | {"advantage": actor.get("advantage", {}) | advantage}


def stage(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"implementation": FUNCTIONS + name, "kwargs": kwargs}


def shaped(actor: dict[str, Any], name: str, **kwargs: Any) -> dict[str, Any]:
    """The block with a function as its outcome shaping, and without reward_norm."""
    return actor | {"reward_norm": None, "advantage": {"outcome_reward_shaping": stage(name, **kwargs)}}


# Three prompts: of three rows, of two, and of one. Generated tokens: 2, 1, 3; 1, 1; 2.
REWARDS = [1.0, 0.0, 0.0, 2.0, 4.0, 3.0]
META = meta_of(3, 2, 1, width=5)


def responses(**channels: Any) -> dict[str, Any]:
    return rows("pgg", "ppg", "ppggg", "pg", "pg", "pgg", **{"rewards": REWARDS} | channels)


def by_row(out: dict[str, Any]) -> list[float]:
    """The one advantage that all actions of a row have."""
    found = []
    for advantages_T, mask_T in zip(out["advantages"], out["loss_mask"], strict=True):
        own = advantages_T[mask_T > 0]
        assert torch.equal(own, own[:1].expand_as(own))
        found.append(own[0].item())
    return found


def whitened(*values: float, weights: tuple[int, ...] = (2, 1, 3, 1, 1, 2), eps: float = 0.0, root: float = 0.0) -> Any:
    """Each row's value less the tokens' mean, over the tokens' unbiased deviation + eps (or with `root` inside)."""
    n = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / n
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)) / (n - 1)
    return [(x - mean) / (sqrt(variance + root) + eps) for x in values]


THIRD, HALF = sqrt(1 / 3), sqrt(2.0)  # unbiased deviations of the first and the second prompt
GRPO = [2 / 3 / (THIRD + 1e-5), *[-1 / 3 / (THIRD + 1e-5)] * 2, -1 / (HALF + 1e-5), 1 / (HALF + 1e-5), 0.0]
# Around the prompts' means the squares are 2/3, 2 and 0.
AROUND = sqrt((2 / 3 + 2) / 5) + 1e-5
# Around the mean 10/6 of all rewards: 30 - 100/6.
RAW = sqrt((30 - 100 / 6) / 5) + 1e-6
CENTRED = [2 / 3, -1 / 3, -1 / 3, -1.0, 1.0, 0.0]

TABLE = {
    "grpo": GRPO,
    "dr_grpo": CENTRED,
    "rloo": [1.0, -0.5, -0.5, -2.0, 2.0, 0.0],
    "lite_ppo": [x / AROUND for x in CENTRED],
    "reinforce_plus_plus": whitened(*REWARDS, eps=1e-5),
    # Baselines 2/6 (as long as 1, 0, 0 weighted by 2, 1, 3) and 3; none for the only row.
    "opo": [2 / 3, -1 / 3, -1 / 3, -1.0, 1.0, 3.0],
}


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_of_outcomes_gives_the_numbers_of_its_table(run: Runner, name: str) -> None:
    assert by_row(run(responses(), recipe(name), META)) == pytest.approx(TABLE[name], abs=1e-6)


def test_opo_weighs_the_baseline_by_length(run: Runner) -> None:
    batch = rows("pg", "pggg", rewards=[4.0, 0.0])
    assert by_row(run(batch, recipe("opo"), meta_of(2))) == pytest.approx([3.0, -1.0])


SWITCHES = {
    "grpo": ("grpo", dict(), [2 / 3 / (THIRD + 1e-6), -1 / 3 / (THIRD + 1e-6), 3 / (1 + 1e-6)]),
    "grpo biased": ("grpo", dict(unbiased=False, eps=0.0), [2 / 3 / sqrt(2 / 9), -1 / 3 / sqrt(2 / 9), 3.0]),
    "grpo zero": ("grpo", dict(alone="zero", eps=0.0), [2 / 3 / THIRD, -1 / 3 / THIRD, 0.0]),
    "dr_grpo": ("dr_grpo", dict(std=False), [2 / 3, -1 / 3, 3.0]),
    "rloo": ("rloo", dict(std=False, leave_one_out=True), [1.0, -0.5, 3.0]),
}


@pytest.mark.parametrize("name, kwargs, wanted", SWITCHES.values(), ids=SWITCHES)
def test_group_relative_switches_a_recipe_to_other_conventions(
    run: Runner, name: str, kwargs: dict[str, Any], wanted: list[float]
) -> None:
    got = by_row(run(responses(), shaped(recipe(name), "group_relative", **kwargs), META))
    assert [got[0], got[1], got[5]] == pytest.approx(wanted, abs=1e-6)


def test_a_prompt_without_spread_gives_nothing(run: Runner) -> None:
    batch = rows("pg", "pg", rewards=[0.7, 0.7])
    for actor in (recipe("grpo"), shaped(recipe("grpo"), "group_relative")):
        assert by_row(run(batch, actor, meta_of(2))) == [0.0, 0.0]


def test_lite_ppo_switches_to_the_deviation_of_raw_rewards(run: Runner) -> None:
    got = by_row(run(responses(), shaped(recipe("lite_ppo"), "lite_ppo"), META))
    assert got == pytest.approx([x / RAW for x in CENTRED], abs=1e-6)


def test_whiten_switches_reinforce_plus_plus_to_an_eps_under_the_root(run: Runner) -> None:
    actor = recipe("reinforce_plus_plus", process_adv_shaping=stage("whiten")) | {"adv_norm": None}
    assert by_row(run(responses(), actor, META)) == pytest.approx(whitened(*REWARDS, root=1e-8), abs=1e-6)


def test_whiten_moves_other_tokens_too_if_asked(run: Runner) -> None:
    actor = {"advantage": {"process_adv_shaping": stage("whiten", everywhere=True, eps=0.0)}}
    out = run(rows("ppg", "pgg", rewards=[2.0, 1.0]), actor)
    a, b = whitened(2.0, 1.0, weights=(1, 2))
    nothing = a - (a - b) * 2  # 0 is as far below 1 as 1 is below 2
    assert out["advantages"] == pytest.approx(torch.tensor([[a, a, nothing], [b, b, nothing]]), abs=1e-6)


def test_whiten_of_a_single_token_is_zero(run: Runner) -> None:
    actor = {"advantage": {"process_adv_shaping": stage("whiten")}}
    assert by_row(run(rows("pg", rewards=[2.0]), actor)) == [0.0]


def test_whiten_refuses_to_drop_process_rewards(run: Runner) -> None:
    batch = rows("pg", rewards=[2.0], token_rewards=[[0.0, 1.0]])
    error = run.refusal(batch, {"advantage": {"process_adv_shaping": stage("whiten")}})
    assert "token_rewards" in str(error)


# ---- several rewards ----


CHANNELS = {"right": [1.0, 0.0, 0.0, 1.0, 0.0, 0.5], "form": [10.0, 10.0, 40.0, 20.0, 20.0, 0.0]}
APART = {  # each channel's own GRPO with eps 1e-6; a lone row keeps its raw number
    "right": [2 / 3 / THIRD, -1 / 3 / THIRD, -1 / 3 / THIRD, 0.5 / sqrt(0.5), -0.5 / sqrt(0.5), 0.5],
    "form": [-10 / sqrt(300), -10 / sqrt(300), 20 / sqrt(300), 0.0, 0.0, 0.0],
}


def gdpo(**kwargs: Any) -> dict[str, Any]:
    return recipe("gdpo", outcome_reward_shaping=stage("gdpo", channels=["right", "form"], **kwargs))


def test_gdpo_normalises_each_reward_before_the_sum(run: Runner) -> None:
    tensors = {name: torch.tensor(x) for name, x in CHANNELS.items()}
    summed = [a + 0.5 * b for a, b in zip(*APART.values(), strict=True)]
    got = by_row(run(responses(**tensors), gdpo(weights=[1.0, 0.5]), META))
    assert got == pytest.approx(whitened(*summed, eps=1e-5), abs=1e-5)


def test_gdpo_of_one_reward_is_grpo_before_the_last_normalisation(run: Runner) -> None:
    batch = rows("pg", "pg", rewards=[1.0, 3.0])
    out = run(batch, recipe("gdpo") | {"adv_norm": None}, meta_of(2))
    assert by_row(out) == pytest.approx([-1 / HALF, 1 / HALF], abs=1e-5)


def test_gdpo_names_a_reward_that_the_batch_lacks(run: Runner) -> None:
    error = run.refusal(responses(right=torch.ones(6)), gdpo(), META)
    assert isinstance(error, MissingKey) and "'form'" in str(error)


@pytest.mark.parametrize("kwargs", [dict(channels=[]), dict(channels="rewards"), dict(channels=["a"], weights=[1, 2])])
def test_gdpo_refuses_channels_that_are_no_list_or_do_not_match_their_weights(run: Runner, kwargs: Any) -> None:
    actor = recipe("gdpo", outcome_reward_shaping=stage("gdpo", **kwargs))
    assert isinstance(run.refusal(responses(), actor, META), BadKwargs)


@pytest.mark.parametrize("name", ["group_relative", "opo", "gdpo"])
def test_what_a_lone_row_gets_must_be_known(run: Runner, name: str) -> None:
    kwargs = {"channels": ["rewards"]} if name == "gdpo" else {}
    actor = {"advantage": {"outcome_reward_shaping": stage(name, alone="one", **kwargs)}}
    assert isinstance(run.refusal(responses(), actor, META), BadKwargs)


# ---- with a critic ----


def test_ppo_token_gae_by_hand(run: Runner) -> None:
    # logprobs - ref_logp is 0 but for the first action of the first row; columns: p g g, and p g.
    batch = rows("pgg", "pg", rewards=[1.0, 0.0], values=[[0.5, 0.2, 0.0], [0.1, 0.0, 0.0]])
    batch["logprobs"] = torch.tensor([[0, -1.0, -2], [0, -3, 0]])
    batch["ref_logp"] = torch.tensor([[-2.0, -2, 0], [-3, 0, 0]])
    a1 = 1.0 - 0.2
    a0 = -0.1 * 1.0 + 0.2 - 0.5 + 0.95 * a1
    b0 = 0.0 - 0.1
    out = run(batch, recipe("ppo_token_gae"))
    x, y, z = whitened(a0, a1, b0, weights=(1, 1, 1), eps=1e-5)
    assert out["advantages"] == pytest.approx(torch.tensor([[x, y, 0], [z, 0, 0]]), abs=1e-6)
    assert out["returns"][0, :2] == pytest.approx(torch.tensor([a0 + 0.5, a1 + 0.2]))


def test_ppo_turn_gae_by_hand(run: Runner) -> None:
    # Two turns of two tokens and of one; their values are those at their first token.
    batch = rows("pggpg", rewards=[1.0], values=[[0.5, 9.0, 9.0, 0.2, 0.0]], turn_ids=[[0, 0, 0, 1, 1]])
    batch["ref_logp"] = batch["logprobs"].clone()
    second = 1.0 - 0.2
    first = 0.2 - 0.5 + 0.95 * second
    out = run(batch, recipe("ppo_turn_gae"))
    x, y = whitened(first, second, weights=(2, 1), eps=1e-5)
    assert out["advantages"] == pytest.approx(torch.tensor([[x, x, 0, y, 0]]), abs=1e-6)


def test_vapo_by_hand(run: Runner) -> None:
    # 40 generated tokens: lambda is 1 - 1/(0.05 * 40) = 0.5; with 10 it is 0. The critic's returns are the outcome.
    long, short = "p" + "g" * 40, "p" + "g" * 10
    values_BT = torch.full((2, 41), 0.5)
    out = run(rows(long, short, rewards=[1.0, 1.0], values=values_BT), recipe("vapo") | {"adv_norm": None})
    wanted_T = 0.5 * 0.5 ** torch.arange(39, -1, -1.0)
    assert out["advantages"][0, :40] == pytest.approx(wanted_T, abs=1e-6)
    assert out["advantages"][1, :10] == pytest.approx(torch.tensor([0.0] * 9 + [0.5]), abs=1e-6)
    assert out["returns"][0, :40] == pytest.approx(torch.ones(40), abs=1e-6)
    assert out["returns"][1, :10] == pytest.approx(torch.ones(10), abs=1e-6)


def test_vapo_bootstraps_truncated_rows_in_both(run: Runner) -> None:
    batch = rows("pg", rewards=[0.0], values=[[0.25, 0.75]], is_truncated=torch.tensor([True]))
    out = run(batch, recipe("vapo") | {"adv_norm": None})
    assert (out["advantages"][0, 0].item(), out["returns"][0, 0].item()) == (0.5, 0.75)


# ---- process rewards ----


# One prompt of two rows, whose outcomes become -a and a; process rewards at the generated tokens' own columns.
A = 1 / (HALF + 1e-5)
PROCESS = {
    "prm_additive": ([[0, 0.5, -0.25], [0, 0.0, 1.0]], [[-A + 0.5, -A - 0.25], [A, A + 1]]),
    "gvpo": ([[0, -1.0, 0.5], [0, -1.0, 0.0]], [[-A * 1.2, -A], [0.0, A]]),
    "process_weighted": ([[0, 0.25, 0.0], [0, 0.25, 1.0]], [[0.25, -A], [A * 0.25, A]]),
    "mopd": ([[0, 0.5, -0.25], [0, 0.0, 1.0]], [[-A + 0.5, -A - 0.25], [A, A + 1]]),
}


@pytest.mark.parametrize("name", PROCESS)
def test_a_recipe_of_process_rewards_gives_the_numbers_of_its_table(run: Runner, name: str) -> None:
    token_rewards, wanted = PROCESS[name]
    out = run(rows("pgg", "pgg", rewards=[1.0, 3.0], token_rewards=token_rewards), recipe(name), meta_of(2))
    assert out["advantages"][:, :2] == pytest.approx(torch.tensor(wanted), abs=1e-6)


def test_gvpo_charges_failed_tokens_without_an_advantage(run: Runner) -> None:
    batch = rows("pg", "pg", rewards=[1.0, 1.0], token_rewards=[[0, -1.0], [0, 0.0]])
    assert by_row(run(batch, recipe("gvpo"), meta_of(2))) == pytest.approx([-0.4, 0.0])


def test_mopd_weighs_the_outcome(run: Runner) -> None:
    batch = rows("pg", "pg", rewards=[1.0, 3.0], token_rewards=[[0, 0.5], [0, -0.5]])
    actor = recipe("mopd", process_adv_shaping=stage("mopd", outcome_weight=0.0))
    assert by_row(run(batch, actor, meta_of(2))) == pytest.approx([0.5, -0.5])


def test_mopd_keeps_the_rollouts_own_log_probabilities(run: Runner) -> None:
    batch = rows("pg", rewards=[1.0], token_rewards=[[0, 0.5]], logprobs=[[0.0, -0.7]])
    batch["mopd_teacher_logp_sum"] = torch.zeros(1, 2)
    assert run(batch, recipe("mopd"))["mopd_behavior_logprobs"] == pytest.approx(torch.tensor([[-0.7, 0.0]]))


def test_mopd_without_a_teacher_is_refused(run: Runner) -> None:
    assert isinstance(run.refusal(rows("pg", rewards=[1.0]), recipe("mopd")), MissingKey)


# ---- all of them ----


NAMES = [name for name in config_file.recipes() if name != "default"]


def test_the_field_has_its_recipes() -> None:
    assert NAMES == sorted(
        "ppo_token_gae ppo_turn_gae vapo grpo dr_grpo rloo lite_ppo reinforce_plus_plus gdpo opo prm_additive gvpo"
        " process_weighted mopd".split()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_built_by_name_and_says_what_it_is_first(name: str) -> None:
    assert isinstance(compiled_adv.build(name), compiled_adv.Compute)
    assert config_file.recipes()[name].read_text().startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_rollouts_that_a_recipe_does_not_fit_are_refused_and_others_computed(name: str) -> None:
    compute = compiled_adv.build({"actor": recipe(name) | {"kl_ctl": 0.0}})
    batch = responses()
    try:
        assert torch.isfinite(compute(batch, META)["advantages"]).all()
    except CompiledAdvError as error:
        assert ("turn" in name and "turn_ids" in str(error)) or (name == "mopd" and "token_rewards" in str(error))


PLACED = {
    "group_relative": shaped(recipe("grpo"), "group_relative"),
    "lite_ppo": shaped(recipe("lite_ppo"), "lite_ppo"),
    "opo": recipe("opo"),
    "gdpo": recipe("gdpo"),
    "decoupled_gae": recipe("vapo"),
    "whiten": recipe("grpo", process_adv_shaping=stage("whiten")) | {"token_rewards_as_adv": False},
    "mopd": recipe("mopd"),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_function_of_the_recipes_becomes_a_part_of_the_program(name: str) -> None:
    placed = compiled_adv.build({"actor": PLACED[name]}).explain("json")["functions"]
    assert [(each["function"], each["where"]) for each in placed] == [(FUNCTIONS + name, "program")]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ppo_turn_gae"])
def test_a_recipe_compiled_gives_its_eager_numbers(name: str) -> None:
    actor = recipe(name) | {"kl_ctl": 0.0}
    batch = responses(values=torch.arange(30.0).reshape(6, 5) / 10, token_rewards=torch.full((6, 5), 0.25))
    got, want = compiled_adv.build({"actor": actor})(batch, META), Runner("eager").build(actor)(batch, META)
    assert all(torch.allclose(got[key], want[key], atol=1e-5) for key in ("advantages", "returns"))
