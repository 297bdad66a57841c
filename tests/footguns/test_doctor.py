"""doctor: every warning with its rows, what it costs and what to do; the text is held to golden files.

UPDATE_GOLDEN=1 writes them anew.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from compiled_adv import concat_batch, load_config
from compiled_adv.diagnosis import Diagnosis, text
from compiled_adv.doctor import REMEDIES, Rollouts, diagnose, under
from compiled_adv.errors import CompiledAdvError, MissingKey, NonFinite
from compiled_adv.pipeline import wire
from compiled_adv.resolve import resolve_spec
from compiled_adv.rollouts import EMBEDDED, find_rollouts, read_groups
from compiled_adv.stages.strict import STRICT
from compiled_adv.status import WARNINGS
from tests.contracts.small import group, meta_of, rows

GOLDEN = Path(__file__).parent

# Every warning but weighted_flip, which excludes mask_no_eos_with_zero, and loo_alone, which needs a lone row.
PLANTED = {
    "kl_ctl": 0.1,
    "reward_norm": {"mean_level": "batch", "mean_leave1out": True, "std_level": "group", "group_size": 2},
    "overlong_reward_penalty": True,
    "overlong_tokens": 1,
    "overlong_penalty_factor": 0.5,
    "max_new_tokens": 3,
    "mask_no_eos_with_zero": True,
}
MANY = rows(
    *("pgggggg", "pggp...", "gpgg...", "pggg...", "pgg...."),
    rewards=[1, 0.75, 1, 1, 0.25],
    logprobs=[[-0.5] * 7] * 5,
    is_truncated=None,
)
LONE = rows("pgg.", rewards=[2], logprobs=[[0, -1, -2, 0]], is_truncated=None)
WEIGHTED = {
    "kl_ctl": 0.0,
    "kl_estimator": "k3",
    "gae_lambda_kwargs": {"alpha": 0.5},
    "overlong_tokens": 8,
    "reward_norm": {"mean_level": "batch", "std_level": None, "group_size": 4, "std_unbiased": False},
    "discuont": 0.9,
    "rules": "strict",
    "gvpo_zero_penalty": 0.3,
    "advantage": {
        "process_adv_shaping": {"implementation": "process_weighted"},
        "outcome_reward_shaping": {"implementation": "tests.footguns.override.not_declared"},
    },
}
FLIPPED = rows("pgg", "pgg", rewards=[1, -1], logprobs=[[0, -1, -1]] * 2, token_rewards=[[0, 0.5, 1], [0, 0.25, 0]])


@pytest.fixture(autouse=True)
def _configured_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPILED_ADV_BACKEND", raising=False)


def seen(config: Any, *batches: dict[str, Any], meta: Any = None) -> Diagnosis:
    return diagnose(config, [Rollouts(f"batch {i}", batch, meta) for i, batch in enumerate(batches)])


def names(diagnosis: Diagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.findings]


def rows_of(diagnosis: Diagnosis, name: str) -> list[int]:
    (finding,) = [each for each in diagnosis.findings if each.name == name]
    return finding.sights[0].rows


def keys(diagnosis: Diagnosis) -> dict[str, str]:
    return {idle.key: idle.why for idle in diagnosis.keys}


def embedded() -> list[Rollouts]:
    return [
        Rollouts(str(folder), *concat_batch(read_groups(paths))) for folder, paths in find_rollouts(EMBEDDED).items()
    ]


# ---- golden text ----


def planted() -> str:
    return "\n\n----\n\n".join((text(seen(PLANTED, MANY, LONE)), text(seen(WEIGHTED, FLIPPED))))


TEXTS: dict[str, Callable[[], str]] = {"embedded": lambda: text(diagnose("default", embedded())), "planted": planted}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_golden_one(name: str) -> None:
    path, got = GOLDEN / f"golden_doctor_{name}.txt", TEXTS[name]() + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8")


def test_every_warning_is_planted() -> None:
    assert {*names(seen(PLANTED, MANY, LONE)), *names(seen(WEIGHTED, FLIPPED))} == {*WARNINGS}


@pytest.mark.parametrize("name", TEXTS)
def test_no_line_is_too_long_to_read(name: str) -> None:
    assert max(map(len, TEXTS[name]().splitlines())) <= 130


# ---- what a warning costs ----


def test_every_warning_has_advice() -> None:
    assert REMEDIES.keys() == WARNINGS.keys()


def test_every_strict_stage_belongs_to_one_warning() -> None:
    stages = [stage for rules, _ in REMEDIES.values() for stage in rules]
    assert sorted(map(str, stages)) == sorted(map(str, STRICT))


def test_all_strict_stages_together_are_the_strict_rules() -> None:
    spec = load_config(PLANTED)
    strict = load_config(PLANTED | {"advantage": {"rules": "strict"}})
    inputs = frozenset(("attention_words", "loss_mask", "rewards", "logprobs", "is_truncated", "member_of_row"))
    inputs |= {"first_row", "references", "group_of_row", "facts", "gvpo"}
    default, wanted = (wire(each, resolve_spec(each), inputs, "additive") for each in (spec, strict))
    assert [replace(node, name="") for node in under(default, STRICT).nodes] == [
        replace(node, name="") for node in wanted.nodes
    ]


def test_a_warning_costs_what_its_strict_rule_alone_changes() -> None:
    (finding,) = seen({"kl_ctl": 0.0}, rows("pgp", "pgg", rewards=[1, 1])).findings
    (sight,) = finding.sights
    assert (sight.rows, sight.of) == ([0], 2)
    # the outcome of 1 reaches the one token of row 0, of three active ones
    assert sight.change is not None and (sight.change.rows, sight.change.largest) == (1, 1)
    assert sight.change.mean == pytest.approx(1 / 3)


def test_rows_cut_by_the_width_cost_what_their_bootstrap_adds() -> None:
    batch = rows("pgg", "pg.", rewards=[1, 1], values=[[0, 0, 4], [0, 0, 0]], is_truncated=None)
    (finding,) = seen({"kl_ctl": 0.0}, batch).findings
    assert finding.name == "truncated_by_width"
    assert finding.sights[0].change is not None and finding.sights[0].change.largest == 4


def test_what_moves_advantages_most_comes_first() -> None:
    batch = rows("pgp", "pgg", rewards=[1, 1], logprobs=[[0, -3, 0], [0, -3, -3]])
    ranked = seen({"kl_ctl": 1.0}, batch)
    assert names(ranked) == ["kl_without_reference", "outcome_on_masked_token"]
    assert names(seen({"kl_ctl": 1e-3}, batch)) == ["outcome_on_masked_token", "kl_without_reference"]


def test_what_no_rule_repairs_comes_after_what_moves_advantages() -> None:
    batch = rows("pgp", "pgg", "pgg", "pgg", rewards=[1, 0, 1, 1])
    norm = {"mean_level": "group", "std_level": None, "group_size": 2}
    assert names(seen({"kl_ctl": 0.0, "reward_norm": norm}, batch)) == ["outcome_on_masked_token", "zero_spread_groups"]


def test_rows_under_the_other_rules_show_where_they_differ() -> None:
    norm = {"mean_level": "batch", "std_level": None, "mean_leave1out": True}
    batch = rows("pgg", "pgg", is_truncated=[True, False], rewards=[0, 1])
    (sight,) = next(
        each.sights
        for each in seen({"kl_ctl": 0.0, "reward_norm": norm, "mask_no_eos_with_zero": True}, batch).findings
        if each.name == "loo_alone"
    )
    assert (sight.rows, sight.other_rows) == ([], [1])


def test_strict_rules_as_configured_still_say_what_they_repair() -> None:
    diagnosis = seen({"kl_ctl": 0.0, "advantage": {"rules": "strict"}}, rows("pgp", rewards=[1]))
    assert rows_of(diagnosis, "outcome_on_masked_token") == [0]
    assert "or set advantage.rules: strict" not in text(diagnosis)


def test_nothing_wrong_is_said_in_one_line() -> None:
    diagnosis = seen({"kl_ctl": 0.0}, rows("pgg", "pgg", rewards=[1, 0]))
    assert not diagnosis.findings
    assert (
        text(diagnosis).splitlines()[0]
        == "2 rows, 4 generated tokens, default rules: nothing found that harms training"
    )


# ---- refusals ----


def test_a_batch_that_both_rule_sets_refuse_is_refused_with_its_name() -> None:
    with pytest.raises(NonFinite) as caught:
        seen({}, rows("pgg", rewards=[float("nan")]))
    assert caught.value.__notes__ == ["  in    batch 0"]


def test_a_batch_that_only_the_configured_rules_refuse_is_the_worst_finding() -> None:
    batch = rows("gpg", turn_ids=[[0, -1, 1]], rewards=[1])
    diagnosis = seen({"kl_ctl": 0.0, "gae_timestep_unit": "turn"}, batch)
    assert names(diagnosis)[0] == "refused"
    assert "default rules refuse it: BadTurnIds" in text(diagnosis)


def test_strict_rules_without_is_truncated_say_that_they_refuse() -> None:
    diagnosis = seen({"kl_ctl": 0.0}, rows("pgp", rewards=[1], is_truncated=None))
    assert "strict rules refuse it: MissingKey" in text(diagnosis)
    assert diagnosis.batches[0].strict is not None  # as if it were given


def test_strict_rules_as_configured_refuse_as_the_computation_does() -> None:
    diagnosis = seen({"kl_ctl": 0.0, "advantage": {"rules": "strict"}}, rows("pgg", is_truncated=None))
    assert names(diagnosis)[0] == "refused"


@pytest.mark.parametrize("missing", ["loss_mask", "rewards"])
def test_a_batch_without_its_tensors_is_refused(missing: str) -> None:
    with pytest.raises(MissingKey, match=missing):
        seen({}, rows("pgg", **{missing: None}))


# ---- keys without effect ----

WHOLE = rows("pgg.", "pgg.", rewards=[1, 0], logprobs=[[-1] * 4] * 2)
IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "actor.gae_lambda_kwargs": ({"gae_lambda_kwargs": {"alpha": 1.0}}, "gae_lambda is a number"),
    "actor.overlong_tokens": ({"overlong_tokens": 4}, "overlong_reward_penalty is false"),
    "actor.overlong_penalty_factor": ({"overlong_penalty_factor": 4.0}, "overlong_reward_penalty is false"),
    "actor.max_new_tokens": ({"max_new_tokens": 4}, "overlong_reward_penalty is false"),
    "actor.kl_estimator": ({"kl_estimator": "k2"}, "there is no KL penalty"),
    "actor.token_rewards_as_adv": ({"token_rewards_as_adv": False}, "the rollouts carry no token_rewards"),
    "actor.advantage.process_adv_shaping": (
        {"advantage": {"process_adv_shaping": {"implementation": "gvpo", "kwargs": {"zero_penalty": 0.1}}}},
        "the rollouts carry no token_rewards",
    ),
    "actor.reward_norm.group_size": ({"reward_norm": {"group_size": 2}}, "no level is group"),
    "actor.reward_norm.mean_leave1out": (
        {"reward_norm": {"mean_level": None, "mean_leave1out": True}},
        "mean_level is null",
    ),
    "actor.adv_norm.eps": ({"adv_norm": {"std_level": None, "eps": 1e-3}}, "std_level is null"),
    "actor.adv_norm.std_unbiased": ({"adv_norm": {"std_level": None, "std_unbiased": False}}, "std_level is null"),
    "actor.gae_timestep_unit": (
        {"gae_timestep_unit": "turn", "advantage": {"estimator": {"implementation": "token_gae"}}},
        "advantage.estimator is token_gae, whatever the unit",
    ),
    "actor.gae_lambda": (
        {
            "gae_lambda": 0.5,
            "advantage": {"estimator": {"implementation": "tests.known_faults.plugins.values_as_advantages"}},
        },
        "tests.known_faults.plugins.values_as_advantages is the estimator: it alone may read it",
    ),
    "actor.recompute_logprob": (
        {"recompute_logprob": True, "use_decoupled_loss": True},
        "use_decoupled_loss does not read it",
    ),
    "actor.advantage.compiled.max_rows": (
        {"advantage": {"backend": "eager", "compiled": {"max_rows": 4}}},
        "the backend is eager",
    ),
    "actor.advantage.compiled.max_tokens": (
        {"advantage": {"compiled": {"max_tokens": 4, "buckets": {"rows": [4], "tokens": [8]}}}},
        "buckets are declared",
    ),
    "actor.mask_no_eos_with_zero": (
        {"mask_no_eos_with_zero": True},
        "the default, false, computes the same of these rollouts",
    ),
    "actor.reward_clip": ({"reward_clip": 3.0}, "the default, 20.0, computes the same of these rollouts"),
    "actor.reward_norm": (
        {"reward_norm": {"mean_level": None, "std_level": None, "group_size": 3}},
        "the default, null, computes the same of these rollouts",
    ),
    "actor.lambda": ({"lambda": 0.9}, "not a key of ours: gae_lambda?"),
    "actor.discounts": ({"discounts": 0.9}, "not a key of ours: discount?"),
    "actor.backend": ({"backend": "eager"}, "not read here: actor.advantage.backend"),
    "actor.fuel": ({"fuel": 1}, "not read here: actor.advantage.compiled.fuel"),
    "actor.group_size": ({"group_size": 1}, "not read here: actor.reward_norm.group_size"),
    "actor.gvpo_zero_eps": ({"gvpo_zero_eps": 1}, "a per-call value: compute(batch, meta, gvpo_zero_eps=...)"),
    "actor.estimator": ({"estimator": "turn_gae"}, "not read here: actor.advantage.estimator"),
}


@pytest.mark.parametrize("key", IDLE)
def test_a_key_without_effect_is_named_with_the_reason(key: str) -> None:
    actor, why = IDLE[key]
    assert keys(seen({"kl_ctl": 0.0} | actor, WHOLE)).get(key) == why


@pytest.mark.parametrize(
    "key", [key for key in IDLE if "." in key.removeprefix("actor.") or key in ("actor.reward_norm",)]
)
def test_a_block_that_is_idle_is_named_once(key: str) -> None:
    found = [idle.key for idle in seen({"kl_ctl": 0.0} | IDLE[key][0], WHOLE).keys]
    assert len([each for each in found if each.startswith("actor.reward_norm")]) <= 1


def test_keys_with_an_effect_are_not_named() -> None:
    actor = {
        "kl_ctl": 0.0,
        "reward_scaling": 2.0,
        "reward_bias": 0.5,
        "discount": 0.5,
        "adv_norm": {"mean_level": None, "std_level": "batch", "std_unbiased": False},
        "temperature": 1.0,
        "optimizer": {"lr": 1e-6},
    }
    assert keys(seen(actor, WHOLE)) == {}


def test_keys_as_the_defaults_have_them_are_not_named() -> None:
    assert keys(diagnose("default", [Rollouts("x", WHOLE)])) == {}


def test_the_group_size_beside_metadata_has_no_effect() -> None:
    actor = {"kl_ctl": 0.0, "reward_norm": {"mean_level": "group", "std_level": "batch", "group_size": 2}}
    meta = meta_of(2, groups=[group(1, 1)])
    assert "actor.reward_norm.group_size" not in keys(seen(actor, WHOLE))
    found = keys(seen(actor, WHOLE, meta=meta))
    assert found["actor.reward_norm.group_size"] == "the metadata of the rollouts tells the groups"


def test_keys_beside_the_actor_block_are_named() -> None:
    found = keys(seen({"actor": {"kl_ctl": 0.0}, "advantage": {"rules": "strict"}, "rollout": {}}, WHOLE))
    assert found == {"advantage": "beside `actor`: only the actor block is read, as actor.advantage"}


def test_a_full_override_leaves_every_other_key_without_effect() -> None:
    override = {"compute": {"implementation": "tests.footguns.override.as_given"}}
    diagnosis = seen({"discount": 0.5, "reward_clip": 2.0, "advantage": override}, WHOLE)
    assert keys(diagnosis).keys() == {"actor.discount", "actor.reward_clip"}
    assert not diagnosis.findings and "rules and warnings do not apply" in text(diagnosis)


def test_the_environment_that_overrules_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "eager")
    found = keys(seen({"kl_ctl": 0.0, "advantage": {"backend": "compiled"}}, WHOLE))
    assert found == {"actor.advantage.backend": "COMPILED_ADV_BACKEND=eager overrules it"}


# ---- padding and functions ----


def test_padding_is_counted_in_the_batch_and_in_its_bucket() -> None:
    compiled = {"backend": "compiled", "compiled": {"buckets": {"rows": [4], "tokens": [8]}}}
    (facts,) = seen({"kl_ctl": 0.0, "advantage": compiled}, rows("pggg", "pg..")).batches
    assert facts.padding == 0.25  # 6 of 8
    assert (facts.bucket, facts.bucket_padding) == ("4x8", 1 - 6 / 32)


def test_a_batch_above_every_bucket_is_said() -> None:
    compiled = {"backend": "compiled", "compiled": {"buckets": {"rows": [1], "tokens": [2]}, "overflow": "error"}}
    diagnosis = seen({"kl_ctl": 0.0, "advantage": compiled}, rows("pggg"))
    assert "the batch is larger than every bucket" in text(diagnosis)


def test_a_function_that_splits_the_program_is_named_with_the_reason() -> None:
    shaping = {
        "outcome_reward_shaping": {
            "implementation": "tests.known_faults.plugins.scale_outcome",
            "kwargs": {"factor": 0.5},
        }
    }
    diagnosis = seen({"kl_ctl": 0.0, "advantage": {"backend": "compiled"} | shaping}, rows("pgg"))
    (function,) = diagnosis.functions
    assert function["where"] != "program" and function["why"]
    assert (
        f"tests.known_faults.plugins.scale_outcome (actor.advantage.outcome_reward_shaping) runs {function['where']}"
        in text(diagnosis)
    )


def test_functions_are_not_looked_at_where_nothing_is_compiled() -> None:
    shaping = {
        "outcome_reward_shaping": {
            "implementation": "tests.known_faults.plugins.scale_outcome",
            "kwargs": {"factor": 0.5},
        }
    }
    assert seen({"kl_ctl": 0.0, "advantage": {"backend": "eager"} | shaping}, rows("pgg")).functions == []


def test_doctor_never_writes_to_a_batch() -> None:
    before = {key: x.clone() for key, x in MANY.items()}
    seen(PLANTED, MANY)
    assert all(torch.equal(MANY[key], before[key]) for key in MANY)


# ---- the command ----


def command(*words: object) -> Result:
    from compiled_adv.cli import app

    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def test_the_command_prints_the_text_of_the_embedded_rollouts() -> None:
    result = command()
    assert result.exit_code == 0
    assert result.stdout == (GOLDEN / "golden_doctor_embedded.txt").read_text(encoding="utf-8")


def test_the_command_prints_facts_for_machines(tmp_path: Path) -> None:
    save_file(rows("pgp", "pgg", logprobs=[[-9.0] * 3] * 2), tmp_path / "a.safetensors")
    result = command("--rollouts", tmp_path, "--json")
    facts = json.loads(result.stdout)
    assert [finding["name"] for finding in facts["findings"]][:1] == ["kl_without_reference"]
    assert facts["batches"][0]["rows"] == 2


@pytest.mark.parametrize("words", [("--config", "nowhere.yaml"), ("--rollouts", "nowhere")])
def test_bad_input_is_one_message_and_exit_code_2(words: tuple[str, str]) -> None:
    result = command(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert "nowhere" in result.stderr and "Traceback" not in result.stderr


def test_a_refused_folder_is_named(tmp_path: Path) -> None:
    save_file(rows("pgg", rewards=[float("inf")]), tmp_path / "a.safetensors")
    result = command("--rollouts", tmp_path)
    assert result.exit_code == 2 and f"in    {tmp_path.name}" in result.stderr


def test_errors_of_both_rule_sets_are_errors_of_ours() -> None:
    with pytest.raises(CompiledAdvError):
        diagnose({}, [Rollouts("x", {})])
