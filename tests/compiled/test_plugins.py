"""Users' functions under the compiled backend: where they run and why, and that this changes no number."""

import json
import warnings
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import errors
from compiled_adv.inductor import graphs_captured
from tests.compiled import placed_plugins
from tests.compiled.shared import assert_same, nothing_compiles

PATH = "tests.compiled.placed_plugins."
EXAMPLES = "tests.examples."
BUCKET = {"rows": [4], "tokens": [128]}
GROUP = {"mean_level": "group", "std_level": None, "mean_leave1out": True}
PROCESS, OUTCOME, ESTIMATOR, COMPUTE = "process_adv_shaping", "outcome_reward_shaping", "estimator", "compute"


def batch(rows: int = 3, tokens: int = 7, seed: int = 0, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    loss_mask = (torch.rand(rows, tokens, generator=generator) < 0.7).long()
    loss_mask[:, 0] = 0
    return {
        "input_ids": torch.ones(rows, tokens, dtype=torch.int64),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.int64),
        "loss_mask": loss_mask,
        "rewards": torch.randn(rows, generator=generator),
        "logprobs": -torch.rand(rows, tokens, generator=generator),
        "values": torch.randn(rows, tokens, generator=generator),
        "is_truncated": torch.arange(rows) % 2 == 1,
        **more,
    }


def meta(*sizes: int, groups: Any = None) -> dict[str, Any]:
    return {
        "n_trajs": len(sizes),
        "traj_group_sizes": list(sizes),
        "traj_seqlens": [7] * len(sizes),
        "rollout_groups": groups,
    }


def build(slot: str, name: str, backend: str = "compiled", *, actor: Any = None, kwargs: Any = None, **compiled: Any):
    path = name if "." in name else PATH + name
    advantage = {"backend": backend, slot: {"implementation": path, "kwargs": kwargs or {}}}
    advantage["compiled"] = {"buckets": BUCKET} | compiled
    return compiled_adv.build({"actor": {"kl_ctl": 0.0, "gae_lambda": 0.9} | (actor or {}) | {"advantage": advantage}})


def run(compute: compiled_adv.Compute, given: dict[str, Any], its_meta: Any = None, **call: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_adv.AdvantageWarning)
        out = compute(given, its_meta, **call)
    return {key: x for key, x in out.items() if x is not given.get(key)}


def assert_as_eager(slot: str, name: str, *batches: Any, **options: Any) -> compiled_adv.Compute:
    """Every batch, a pair with its metadata, gives what the eager backend gives."""
    compute, eager = build(slot, name, **options), build(slot, name, "eager", **options)
    for given, its_meta in batches:
        assert_same(run(compute, given, its_meta), run(eager, given, its_meta), 1e-5)
    return compute


def functions(compute: compiled_adv.Compute, **how: Any) -> list[dict[str, Any]]:
    return compute.explain("json", channels=("values",), **how)["functions"]


# ---- where, and why ----


def test_a_pad_safe_function_is_part_of_one_segment() -> None:
    text = build(PROCESS, "scaled").explain()
    assert "# segment 0" in text and "# segment 1" not in text
    assert f"ProcessPlugin({PATH}scaled)" in text


def test_an_undeclared_function_splits_the_program_and_the_text_says_what_to_do() -> None:
    text = build(PROCESS, "undeclared").explain()
    assert f"# segment 1: ProcessPlugin({PATH}undeclared), a user's function, at the batch's own shape" in text
    assert "#   compiled: it is not declared pad-safe (placed_plugins.py:" in text
    assert "#   try @compiled_adv.pad_safe" in text


def test_a_function_that_torch_cannot_trace_splits_the_program_at_its_line() -> None:
    (found,) = functions(build(PROCESS, "branches"))
    line = branch_line()
    assert found["where"] == "eager" and found["why"] == "Data-dependent branching"
    assert found["line"] == f"placed_plugins.py:{line}" and found["hint"]


def branch_line() -> int:
    lines = open(placed_plugins.__file__).read().splitlines()
    return next(i for i, line in enumerate(lines, 1) if "if inputs.advantages.sum() > 0" in line)


def test_a_function_of_one_prompt_is_explained_without_a_batch() -> None:
    assert functions(build(OUTCOME, EXAMPLES + "leave_one_out"))[0]["where"] == "program"


def test_the_facts_are_json() -> None:
    assert json.loads(json.dumps(functions(build(PROCESS, "undeclared"))))[0]["function"] == PATH + "undeclared"


def test_plugins_never_keeps_a_pad_safe_function_between_segments() -> None:
    compute = build(PROCESS, "scaled", plugins="never")
    (found,) = functions(compute)
    assert (found["where"], found["why"]) == ("eager", "plugins: never")
    assert "# segment 1: ProcessPlugin" in compute.explain()


def test_plugins_require_refuses_an_undeclared_function_when_it_builds() -> None:
    with pytest.raises(errors.PluginSplits) as caught:
        build(PROCESS, "undeclared", plugins="require")
    text = str(caught.value)
    assert f"actor.advantage.process_adv_shaping = {PATH}undeclared (placed_plugins.py:" in text
    assert "not declared pad-safe" in text and "@compiled_adv.pad_safe" in text


def test_plugins_require_refuses_what_torch_cannot_trace_with_torchs_own_hint() -> None:
    compute = build(PROCESS, "branches", plugins="require")
    with pytest.raises(errors.PluginSplits) as caught:
        run(compute, batch())
    assert f"placed_plugins.py:{branch_line()}" in str(caught.value)
    assert caught.value.found == "Data-dependent branching" and caught.value.hint


def test_plugins_require_leaves_explain_to_say_why() -> None:
    assert functions(build(PROCESS, "branches", plugins="require"))[0]["why"] == "Data-dependent branching"


def test_plugins_require_takes_a_built_in_lambda_function_for_no_users_function() -> None:
    actor = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 0.5}}
    assert functions(build(PROCESS, "scaled", actor=actor, plugins="require"))[0]["where"] == "program"


@pytest.mark.usefixtures("interpreted")
def test_an_undeclared_function_never_sees_padding() -> None:
    placed_plugins.SHAPES.clear()
    compute = build(PROCESS, "notes_its_shape")
    for rows, tokens in ((3, 7), (2, 9), (4, 128)):
        run(compute, batch(rows, tokens))
    assert placed_plugins.SHAPES == [(3, 7), (2, 9), (4, 128)]


# ---- the same numbers, in every slot ----

TWO = ((batch(), None), (batch(2, 9, seed=1), None))


@pytest.mark.usefixtures("interpreted")
def test_process_shaping_in_the_program() -> None:
    compute = assert_as_eager(PROCESS, "with_process_rewards", *TWO)
    rewarded = batch(token_rewards=torch.rand(3, 7))
    eager = build(PROCESS, "with_process_rewards", "eager")
    assert_same(run(compute, rewarded), run(eager, rewarded), 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_outcome_shaping_in_the_program_after_the_length_penalty() -> None:
    penalty = {"overlong_reward_penalty": True, "overlong_tokens": 2, "overlong_penalty_factor": 0.5}
    actor = penalty | {"max_new_tokens": 3, "reward_norm": {}}
    compute = assert_as_eager(OUTCOME, "lengths", *TWO, actor=actor, kwargs={"weight": 0.25})
    assert functions(compute)[0]["where"] == "program"


@pytest.mark.usefixtures("interpreted")
def test_outcome_shaping_in_the_program_follows_the_dtype_of_the_rewards() -> None:
    whole, half = batch(rewards=torch.tensor([1, 2, 3])), batch(rewards=torch.tensor([1.0, 2.0, 3.0]).bfloat16())
    assert_as_eager(OUTCOME, "lengths", (whole, None), (half, None), (batch(), None), kwargs={"weight": 0.25})


def test_an_estimator_in_the_program_asks_for_the_configured_lambda() -> None:
    compute = assert_as_eager(ESTIMATOR, "with_lambda", *TWO, actor={"kl_ctl": 0.1, "discount": 0.9})
    assert functions(compute)[0]["where"] == "program"


@pytest.mark.usefixtures("interpreted")
def test_a_lambda_function_in_the_program() -> None:
    actor = {"gae_lambda": PATH + "half_lambda", "gae_lambda_kwargs": {"q": 0.5}}
    compute = assert_as_eager(PROCESS, "scaled", *TWO, actor=actor)
    assert [found["where"] for found in functions(compute)] == ["program", "program"]


@pytest.mark.usefixtures("interpreted")
def test_a_replacement_of_the_whole_computation_in_the_program_follows_the_calls_values() -> None:
    compute, eager = build(COMPUTE, "gvpo_of_its_own"), build(COMPUTE, "gvpo_of_its_own", "eager")
    for value in (0.1, 0.2, 0.3, 0.7):
        call = {"advantage_shaping_mode": "gvpo", "gvpo_zero_penalty": value}
        assert_same(run(compute, batch(), **call), run(eager, batch(), **call), 1e-5)
    assert compute.cache.info().compiles == 1


@pytest.mark.usefixtures("interpreted")
def test_outcome_shaping_without_references_is_refused_on_a_later_batch_that_has_some() -> None:
    compute = build(OUTCOME, "raw", actor={"reward_norm": {}})
    run(compute, batch(), meta(2, 1))
    groups = [{"row_counts": [1, 1], "rewards": [0.5, None]}, None]
    with pytest.raises(errors.MissingReferences):
        run(compute, batch(), meta(2, 1, groups=groups))
    run(compute, batch(), meta(2, 1))


# ---- what a function reads beside its arguments ----


def test_a_global_that_changes_is_seen_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = build(PROCESS, "scaled")
    first = run(compute, batch())["advantages"]
    monkeypatch.setattr(placed_plugins, "SCALE", 3.0)
    torch.testing.assert_close(run(compute, batch())["advantages"], first * 3)
    monkeypatch.setattr(placed_plugins, "SCALE", 1.0)
    torch.testing.assert_close(run(compute, batch())["advantages"], first)


def test_a_function_whose_globals_keep_changing_leaves_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_adv.inductor.MOST_STATES", 1)
    compute = build(PROCESS, "scaled")
    first = run(compute, batch())["advantages"]
    monkeypatch.setattr(placed_plugins, "SCALE", 2.0)
    torch.testing.assert_close(run(compute, batch())["advantages"], first * 2)
    assert functions(compute)[0]["why"] == "what it reads beside its arguments keeps changing"


@pytest.mark.parametrize("slot", [OUTCOME, COMPUTE])
def test_what_a_later_batch_carries_beside_is_no_business_of_the_program(slot: str) -> None:
    """Keys that a function of the rollout does not read, tensors or not."""
    compute = build(slot, "raw" if slot == OUTCOME else "gvpo_of_its_own")
    for more in ({}, {"tasks": ["a"] * 3}, {"images": torch.ones(5, 2)}, {"scores": torch.ones(3, 7)}):
        run(compute, batch(**more))
    assert compute.cache.info().fallbacks == 0


# ---- when what is compiled ----


def test_other_shapes_of_one_bucket_compile_nothing() -> None:
    compute = build(PROCESS, "scaled")
    run(compute, batch())
    with nothing_compiles():
        run(compute, batch(4, 11, seed=2))


def test_an_undeclared_function_is_compiled_once_for_all_shapes() -> None:
    compute, eager = build(PROCESS, "undeclared"), build(PROCESS, "undeclared", "eager")
    run(compute, batch())
    before = graphs_captured()
    for rows, tokens in ((2, 9), (4, 128), (3, 5), (4, 4)):
        given = batch(rows, tokens, seed=3)
        assert_same(run(compute, given), run(eager, given), 1e-5)
    assert graphs_captured() == before


@pytest.mark.parametrize("name", ["scaled", "undeclared"])
def test_after_warm_up_a_first_batch_compiles_no_segment(name: str) -> None:
    compute = build(PROCESS, name)
    compute.warmup(channels=("values",), freeze=True)
    before = compute.cache.info().compiles
    run(compute, batch())
    assert compute.cache.info().compiles == before and compute.cache.info().hits == 1


@pytest.mark.usefixtures("interpreted")
def test_warm_up_by_an_example_serves_a_function_of_one_prompt() -> None:
    compute = build(OUTCOME, EXAMPLES + "leave_one_out")
    compute.warmup(batch(), meta(2, 1), freeze=True)
    run(compute, batch(seed=5), meta(1, 2))
    assert compute.cache.info().fallbacks == 0


# ---- the worked examples, some of them compiled in tests/contracts/test_plugin_table.py too ----


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("sizes", [(2, 1), (1, 1, 1), (3,)])
def test_a_function_of_one_prompt_equals_its_built_in_cousin(sizes: tuple[int, ...]) -> None:
    compute = assert_as_eager(OUTCOME, EXAMPLES + "leave_one_out", (batch(), meta(*sizes)))
    cousin = build(PROCESS, "scaled", "eager", actor={"reward_norm": GROUP})
    want = run(cousin, batch(), meta(*sizes))
    torch.testing.assert_close(run(compute, batch(), meta(*sizes))["advantages"], want["advantages"])


@pytest.mark.usefixtures("interpreted")
def test_a_function_of_one_prompt_takes_slices_where_there_is_no_metadata() -> None:
    given = batch()
    assert_as_eager(OUTCOME, EXAMPLES + "leave_one_out", (given, None), kwargs={"group_size": 2})
    out = run(build(OUTCOME, EXAMPLES + "leave_one_out", kwargs={"group_size": 2}), given)["rewards"]
    a, b, _ = given["rewards"].tolist()
    torch.testing.assert_close(out, torch.tensor([a - b, b - a, 0.0]))


def test_the_length_penalty_of_one_row_equals_its_built_in_cousin() -> None:
    kwargs = {"budget": 4, "ramp": 3, "factor": 0.5}
    compute = assert_as_eager(OUTCOME, EXAMPLES + "overlong", *TWO, kwargs=kwargs)
    penalty = {"overlong_reward_penalty": True, "overlong_tokens": 3, "overlong_penalty_factor": 0.5}
    cousin = build(PROCESS, "scaled", "eager", actor=penalty | {"max_new_tokens": 4})
    assert_same(run(compute, batch()), run(cousin, batch()), 1e-5)
    assert functions(compute)[0]["where"] == "program"


def test_td_lambda_of_one_row_equals_token_gae_where_no_turn_is_rewarded() -> None:
    actor = {"discount": 0.9, "kl_ctl": 0.1}
    kwargs = {"decay": 0.9, "at_turn_end": 0.5}
    compute = assert_as_eager(ESTIMATOR, EXAMPLES + "td_lambda", *TWO, actor=actor, kwargs=kwargs)
    cousin = build(PROCESS, "scaled", "eager", actor=actor)
    assert_same(run(compute, batch()), run(cousin, batch()), 1e-5)
    assert functions(compute)[0]["where"] == "program"


def test_td_lambda_discounts_by_its_own_number_where_a_turn_is_rewarded() -> None:
    given, advantages = batch(token_rewards=torch.full((3, 7), 0.5)), []
    for discount in (1.0, 0.0):
        kwargs = {"decay": 1.0, "at_turn_end": discount}
        folded = {"token_rewards_as_adv": False}
        compute = build(ESTIMATOR, EXAMPLES + "td_lambda", "eager", actor=folded, kwargs=kwargs)
        advantages.append(run(compute, given)["advantages"])
    assert not torch.equal(*advantages)


@pytest.mark.usefixtures("interpreted")
def test_centred_process_rewards_add_nothing_to_a_row_in_all() -> None:
    given = batch(token_rewards=torch.rand(3, 7))
    compute = assert_as_eager(PROCESS, EXAMPLES + "centred", (given, None), kwargs={"weight": 2.0})
    plain = run(build(OUTCOME, "raw", "eager"), batch(rewards=given["rewards"] * 2))
    shaped = run(compute, given)
    mask = shaped["loss_mask"]
    difference = (shaped["advantages"] - plain["advantages"]) * mask
    torch.testing.assert_close(difference.sum(1), torch.zeros(3), atol=1e-5, rtol=0)
    assert difference.abs().max() > 0.1
