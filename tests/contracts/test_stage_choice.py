"""semantics.md, "Stage choice" and "Defaults of the actor block": what runs when nothing, a name or a call says so.

| sentence | proven elsewhere |
|---|---|
| null, {implementation, kwargs}, a missing implementation, a bare string | tests/unit/test_spec.py |
| the defaults, key by key | tests/unit/test_spec.py |
| kwargs of built-ins and of functions, unknown names | tests/unit/test_resolve.py |
| an estimator's lengths reach a lambda function | tests/golden: estimator_overrides_unit |
"""

import pytest

import compiled_adv
from tests.contracts.small import plugin, rows

TURNS = {"turn_ids": [[-1, 0, 0, -1, 1]], "rewards": [1.0], "logprobs": [[0.0, -1.0, -1.0, 0.0, 0.0]]}


def stage(slot, implementation, **kwargs):
    return {"advantage": {slot: {"implementation": implementation, "kwargs": kwargs}}}


# Token GAE carries KL back, turn GAE does not: the first column tells them apart.
def first_advantage(run, actor, **channels):
    batch = rows("pggpg", **(TURNS | {"ref_logp": [[0.0] * 5]} | channels))
    return run(batch, {"kl_ctl": 1.0} | actor)["advantages"][0, 0].item()


TOKEN, TURN = 3.0, 2.0


@pytest.mark.parametrize("choice", [{}, stage("estimator", "auto")], ids=["null", "auto"])
@pytest.mark.parametrize(("unit", "want"), [("token", TOKEN), ("turn", TURN)])
def test_the_default_estimator_follows_the_timestep_unit(run, choice, unit, want):
    assert first_advantage(run, {"gae_timestep_unit": unit} | choice) == want


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize(("name", "want"), [("token_gae", TOKEN), ("turn_gae", TURN)])
def test_an_explicit_estimator_overrides_the_timestep_unit(run, unit, name, want):
    assert first_advantage(run, {"gae_timestep_unit": unit} | stage("estimator", name)) == want


def test_token_gae_needs_no_turn_ids_in_the_turn_unit(run):
    actor = {"gae_timestep_unit": "turn"} | stage("estimator", "token_gae")
    assert first_advantage(run, actor, turn_ids=None) == TOKEN


def test_turn_gae_needs_turn_ids_in_the_token_unit(run):
    assert "turn_ids" in str(run.refusal(rows("pg"), stage("estimator", "turn_gae")))


@pytest.mark.parametrize(("name", "first"), [("token_gae", 1 / 9), ("turn_gae", 0.0)])
def test_an_explicit_estimator_gives_the_lambda_function_its_own_lengths(run, name, first):
    # alpha 0.5: 3 tokens give 1/3, 2 turns give 0
    actor = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 0.5}}
    other = "turn" if name == "token_gae" else "token"
    batch = rows("pggpg", rewards=[1.0], turn_ids=TURNS["turn_ids"])
    out = run(batch, actor | {"gae_timestep_unit": other} | stage("estimator", name))
    assert out["advantages"][0, 0].item() == pytest.approx(first, abs=1e-6)


# ---- process shaping: configuration and call ----

# advantage -2 on a failed token: additive -3, gvpo -2 * 1.2 and so on; process reward in range for process_weighted.
FAILED = {"rewards": [-2.0], "token_rewards": [[0.0, -1.0]]}


def shaped(run, actor=None, channels=None, **call):
    return run(rows("pg", **(channels or FAILED)), actor, **call)["advantages"][0, 0].item()


def test_process_shaping_is_additive_by_default(run):
    assert shaped(run) == -3.0


@pytest.mark.parametrize("choice", [{}, stage("process_adv_shaping", "auto")], ids=["null", "auto"])
def test_auto_process_shaping_follows_the_calls_mode(run, choice):
    assert shaped(run, choice, advantage_shaping_mode="gvpo", gvpo_negative_scale=0.5) == -3.0
    good = {"rewards": [-2.0], "token_rewards": [[0.0, 0.25]]}
    assert shaped(run, choice, good, advantage_shaping_mode="process_weighted") == 0.25


def test_an_explicit_process_choice_wins_over_the_calls_mode(run):
    assert shaped(run, stage("process_adv_shaping", "additive"), advantage_shaping_mode="gvpo") == -3.0


@pytest.mark.parametrize(
    ("kwarg", "channels", "want"),
    [
        ("negative_scale", {"rewards": [-2.0]}, -4.0),
        ("zero_penalty", {"rewards": [0.0]}, -1.0),
        ("zero_eps", {"rewards": [-1.0]}, -0.5),  # |A| = eps counts as zero: the call's own penalty
    ],
)
def test_an_explicit_gvpo_kwarg_overrides_the_calls_value(run, kwarg, channels, want):
    call = {"gvpo_negative_scale": 0.5, "gvpo_zero_penalty": 0.5, "gvpo_zero_eps": 0.25}
    actor = stage("process_adv_shaping", "gvpo", **{kwarg: 1.0})
    assert shaped(run, actor, FAILED | channels, **call) == want


@pytest.mark.parametrize(
    ("kwarg", "channels", "want"),
    [
        ("negative_scale", {"rewards": [0.0]}, -0.5),
        ("zero_penalty", {"rewards": [-2.0]}, -3.0),
        ("zero_penalty", {"rewards": [-0.125]}, -1.0),
    ],
)
def test_gvpo_values_without_a_kwarg_are_the_calls(run, kwarg, channels, want):
    call = {"gvpo_negative_scale": 0.5, "gvpo_zero_penalty": 0.5, "gvpo_zero_eps": 0.25}
    actor = stage("process_adv_shaping", "gvpo", **{kwarg: 1.0})
    assert shaped(run, actor, FAILED | channels, **call) == want


def test_values_may_change_between_calls_of_one_instance(run):
    compute = run.build({})
    batch = rows("pg", **FAILED)
    scales = [0.5, 1.0, 2.0, 0.0]
    got = [compute(batch, advantage_shaping_mode="gvpo", gvpo_negative_scale=x)["advantages"][0, 0] for x in scales]
    assert got == [-3.0, -4.0, -6.0, -2.0]


def test_a_call_leaves_nothing_behind_for_the_next(run):
    compute = run.build({})
    batch = rows("pg", **FAILED)
    compute(batch, advantage_shaping_mode="gvpo")
    assert compute(batch)["advantages"][0, 0] == -3.0


@pytest.mark.parametrize(
    "actor",
    [
        {},
        stage("process_adv_shaping", "additive"),
        plugin("process_adv_shaping", "constant", value=1.0),
        plugin("compute", "see_compute"),
    ],
    ids=["auto", "explicit", "plugin", "override"],
)
def test_the_mode_must_always_be_a_known_one(run, actor):
    error = run.refusal(rows("pg"), actor, advantage_shaping_mode="gvp")
    assert type(error).__name__ == "CallError"
    assert "'gvp'" in str(error) and "gvpo" in error.hint


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), "0.2", True, None])
@pytest.mark.parametrize("name", ["gvpo_negative_scale", "gvpo_zero_penalty", "gvpo_zero_eps"])
def test_the_calls_gvpo_values_are_checked_when_gvpo_runs(run, name, value):
    error = run.refusal(rows("pg", **FAILED), advantage_shaping_mode="gvpo", **{name: value})
    assert type(error).__name__ == "CallError" and name in str(error)


@pytest.mark.parametrize(
    ("actor", "mode"),
    [
        ({}, "additive"),
        (stage("process_adv_shaping", "additive"), "gvpo"),
        (plugin("process_adv_shaping", "constant", value=1.0), "gvpo"),
        (plugin("compute", "see_compute"), "gvpo"),
    ],
    ids=["additive", "explicit", "plugin", "override"],
)
def test_the_calls_gvpo_values_are_not_checked_when_gvpo_does_not_run(run, actor, mode):
    run(rows("pg", **FAILED), actor, advantage_shaping_mode=mode, gvpo_negative_scale=-1.0)


def test_the_calls_value_beside_an_explicit_kwarg_is_not_read(run):
    actor = stage("process_adv_shaping", "gvpo", negative_scale=1.0)
    assert shaped(run, actor, gvpo_negative_scale=-1.0) == -4.0


def test_an_unknown_per_call_value_is_refused_with_the_nearest(run):
    error = run.refusal(rows("pg"), gvpo_negativ_scale=0.5)
    assert "gvpo_negativ_scale" in str(error) and "gvpo_negative_scale" in error.hint


def test_the_mode_is_no_config_key(run):
    # the actor block may have it, as a trainer's own; only the call's counts
    assert shaped(run, {"advantage_shaping_mode": "gvpo"}) == -3.0


# ---- defaults ----


def test_an_empty_actor_block_builds_with_the_listed_defaults():
    spec = compiled_adv.build({"actor": {}}).spec
    values = spec.model_dump()
    advantage = values.pop("advantage")
    assert values == {
        "discount": 1.0,
        "gae_lambda": 1.0,
        "gae_lambda_kwargs": {},
        "gae_timestep_unit": "token",
        "kl_ctl": 0.1,
        "kl_estimator": "k1",
        "reward_bias": 0.0,
        "reward_scaling": 1.0,
        "reward_clip": 20.0,
        "reward_norm": None,
        "adv_norm": None,
        "overlong_reward_penalty": False,
        "overlong_tokens": None,
        "overlong_penalty_factor": None,
        "max_new_tokens": 1024,
        "mask_no_eos_with_zero": False,
        "token_rewards_as_adv": True,
        "use_decoupled_loss": False,
        "recompute_logprob": False,
    }
    assert advantage["rules"] == "default"
    assert advantage["compute"] == {"implementation": "default", "kwargs": {}}
    for slot in ("outcome_reward_shaping", "estimator", "process_adv_shaping"):
        assert advantage[slot] == {"implementation": "auto", "kwargs": {}}


def test_an_empty_norm_block_has_the_listed_defaults():
    assert compiled_adv.build({"actor": {"reward_norm": {}}}).spec.reward_norm.model_dump() == {
        "mean_level": "batch",
        "mean_leave1out": False,
        "std_level": "batch",
        "std_unbiased": True,
        "group_size": 1,
        "eps": 1e-5,
    }


def test_the_call_defaults_are_additive_and_three_numbers(run):
    # negative: 1 + 0.2; zero: 0.4; eps: 1e-6 is zero, 2e-6 is not
    batch = rows("pg", "pg", "pg", rewards=[-1.0, 1e-6, 2e-6], token_rewards=[[0.0, -1.0]] * 3)
    out = run(batch, advantage_shaping_mode="gvpo")["advantages"][:, 0].tolist()
    assert out == pytest.approx([-1.2, -0.4, 0.0])
