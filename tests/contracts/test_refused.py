"""semantics.md, "Refused": each entry by its own error, in words that name it; and what is legal beside it.

| entry | proven elsewhere |
|---|---|
| unknown names, kwargs on default compute or process auto | tests/unit/test_spec.py, test_resolve.py |
| group_size < 1, eps < 0, reward_clip negative or NaN, unset penalty parameters | tests/unit/test_spec.py |
| alpha not > 0, q not in (0, 1], either a bool; lambda a bool | tests/unit/test_resolve.py, test_spec.py |
| gvpo parameters of the call, unknown mode | test_stage_choice.py |
| custom shaping with explicit references but no shaped ones | test_plugins_outcome.py |
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import AdvantageWarning
from compiled_adv.errors import UnknownName
from tests.contracts import plugins_under_test
from tests.contracts.small import group, meta_of, rows

NAN, INF = float("nan"), float("inf")
TURN = {"gae_timestep_unit": "turn"}
LAMBDA = {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 0.5}}
FOLD = {"token_rewards_as_adv": False}
MASK_NO_EOS = {"mask_no_eos_with_zero": True}
GROUP = {"mean_level": "group"}
PENALTY = {
    "overlong_reward_penalty": True,
    "overlong_tokens": 2,
    "overlong_penalty_factor": 1.0,
    "max_new_tokens": 3,
}


def stage(slot, name, **kwargs):
    return {"advantage": {slot: {"implementation": name, "kwargs": kwargs}}}


@dataclass
class Case:
    """One refusal. The drawn rows are two of "pgg." and "pggg" unless `drawn` says otherwise."""

    error: str
    words: list[str]
    actor: dict[str, Any] = field(default_factory=dict)
    channels: dict[str, Any] = field(default_factory=dict)
    meta: Any = None
    call: dict[str, Any] = field(default_factory=dict)
    drawn: tuple[str, ...] = ("pgg.", "pggg")

    def batch(self):
        return rows(*self.drawn, **self.channels)


def ids(second, first=(-1, 0, 0, -1)):
    return {"turn_ids": [list(first), list(second)]}


def cell(b, t, x, shape=(2, 4)):
    grid = torch.zeros(shape)
    grid[b, t] = x
    return grid


CASES = {
    # turn ids
    "turn unit without turn_ids": Case("MissingKey", ["turn_ids"], TURN),
    "turn unit, turn_ids None": Case("MissingKey", ["turn_ids"], TURN, {"turn_ids": None}),
    "turn_ids not [B,T]": Case("WrongShape", ["turn_ids", "[2, 3]"], TURN, {"turn_ids": torch.zeros(2, 3).long()}),
    "turn_ids one row": Case("WrongShape", ["turn_ids"], TURN, {"turn_ids": torch.zeros(1, 4).long()}),
    "turn_ids not integer": Case("WrongDtype", ["turn_ids", "integer"], TURN, {"turn_ids": torch.zeros(2, 4)}),
    "turn_ids bool": Case("WrongDtype", ["turn_ids"], TURN, {"turn_ids": torch.zeros(2, 4).bool()}),
    "active turn id negative": Case("BadTurnIds", ["turn", "rows [1]"], TURN, ids([-1, 0, -1, 1])),
    "active turn id >= T": Case("BadTurnIds", ["turn", "rows [1]"], TURN, ids([-1, 0, 0, 4])),
    "active turn ids decrease": Case("BadTurnIds", ["go back", "rows [1]"], TURN, ids([-1, 1, 0, 0])),
    "turn ids decrease over a gap": Case(
        "BadTurnIds", ["go back", "rows [0]"], TURN, {"turn_ids": [[-1, 1, -1, 0]]}, drawn=("pgpg",)
    ),
    "lambda function, turn_ids not [B,T]": Case(
        "WrongShape", ["turn_ids"], LAMBDA, {"turn_ids": torch.zeros(2, 3).long()}
    ),
    "lambda function, turn_ids not integer": Case("WrongDtype", ["turn_ids"], LAMBDA, {"turn_ids": torch.zeros(2, 4)}),
    "lambda function, id negative": Case("BadTurnIds", ["rows [1]"], LAMBDA, ids([-1, 0, -1, 1])),
    "lambda function, id >= T": Case("BadTurnIds", ["rows [1]"], LAMBDA, ids([-1, 0, 0, 4])),
    "lambda function, ids decrease": Case("BadTurnIds", ["rows [1]"], LAMBDA, ids([-1, 1, 0, 0])),
    "any lambda function, even a constant": Case(
        "BadTurnIds",
        ["rows [1]"],
        {"gae_lambda": "compiled_adv.gae.constant_gae_lambda", "gae_lambda_kwargs": {"value": 1.0}},
        ids([-1, 1, 0, 0]),
    ),
    # process rewards
    "token_rewards [B]": Case("WrongShape", ["token_rewards", "[2]"], {}, {"token_rewards": [1.0, 2.0]}),
    "token_rewards [B,T-1]": Case("WrongShape", ["token_rewards"], {}, {"token_rewards": torch.zeros(2, 3)}),
    "token_rewards [B,T,1]": Case("WrongShape", ["token_rewards"], {}, {"token_rewards": torch.zeros(2, 4, 1)}),
    "token_rewards broadcast": Case("WrongShape", ["token_rewards"], {}, {"token_rewards": torch.zeros(1, 4)}),
    "folded rewards differ inside a turn": Case(
        "RowsDiffer",
        ["token_rewards", "rows [1]"],
        FOLD,
        {"token_rewards": cell(1, 2, 0.5)} | ids([-1, 0, 0, 1]),
    ),
    "folded rewards differ inside a run without turn_ids": Case(
        "RowsDiffer", ["token_rewards", "rows [1]"], FOLD, {"token_rewards": cell(1, 3, 0.5)}
    ),
    "folding with turn_ids not [B,T]": Case(
        "WrongShape", ["turn_ids"], FOLD, {"token_rewards": torch.zeros(2, 4), "turn_ids": torch.zeros(2, 3).long()}
    ),
    "folding with turn_ids not integer": Case(
        "WrongDtype", ["turn_ids"], FOLD, {"token_rewards": torch.zeros(2, 4), "turn_ids": torch.zeros(2, 4)}
    ),
    "gvpo chosen, folding": Case(
        "ConflictingSettings", ["gvpo", "token_rewards_as_adv"], FOLD | stage("process_adv_shaping", "gvpo")
    ),
    "weighted chosen, folding": Case(
        "ConflictingSettings",
        ["process_weighted", "token_rewards_as_adv"],
        FOLD | stage("process_adv_shaping", "process_weighted"),
    ),
    "gvpo called, folding, no token_rewards": Case(
        "CallError", ["gvpo", "token_rewards_as_adv"], FOLD, call={"advantage_shaping_mode": "gvpo"}
    ),
    "weighted called, folding, no token_rewards": Case(
        "CallError",
        ["process_weighted", "token_rewards_as_adv"],
        FOLD,
        call={"advantage_shaping_mode": "process_weighted"},
    ),
    "weighted chosen, mask_no_eos": Case(
        "ConflictingSettings",
        ["process_weighted", "mask_no_eos_with_zero"],
        MASK_NO_EOS | stage("process_adv_shaping", "process_weighted"),
    ),
    "weighted called, mask_no_eos": Case(
        "CallError",
        ["process_weighted", "mask_no_eos_with_zero"],
        MASK_NO_EOS,
        call={"advantage_shaping_mode": "process_weighted"},
    ),
    "weighted, reward above 1": Case(
        "OutOfRange",
        ["token_rewards", "[0, 1]", "rows [1]"],
        {},
        {"token_rewards": cell(1, 2, 1.5)},
        call={"advantage_shaping_mode": "process_weighted"},
    ),
    "weighted, reward below 0": Case(
        "OutOfRange",
        ["token_rewards", "rows [0]"],
        stage("process_adv_shaping", "process_weighted"),
        {"token_rewards": cell(0, 1, -0.5)},
    ),
    "gvpo parameter negative": Case("InvalidValue", ["zero_eps"], stage("process_adv_shaping", "gvpo", zero_eps=-1.0)),
    # lambda
    "lambda nan": Case("InvalidValue", ["gae_lambda"], {"gae_lambda": NAN}),
    "lambda inf": Case("InvalidValue", ["gae_lambda"], {"gae_lambda": INF}),
    "lambda bool": Case("InvalidValue", ["gae_lambda"], {"gae_lambda": True}),
    "lambda constant nan": Case(
        "BadKwargs",
        ["value", "nan"],
        {"gae_lambda": "compiled_adv.gae.constant_gae_lambda", "gae_lambda_kwargs": {"value": NAN}},
    ),
    "alpha zero": Case("InvalidValue", ["alpha"], LAMBDA | {"gae_lambda_kwargs": {"alpha": 0.0}}),
    "alpha bool": Case("InvalidValue", ["alpha"], LAMBDA | {"gae_lambda_kwargs": {"alpha": True}}),
    "q above one": Case(
        "InvalidValue",
        ["q"],
        {"gae_lambda": "compiled_adv.gae.relative_position_gae_lambda", "gae_lambda_kwargs": {"q": 1.5}},
    ),
    # metadata
    "group size zero": Case("BadMeta", ["group size"], {"reward_norm": GROUP}, meta=meta_of(0, 2)),
    "group size negative": Case("BadMeta", ["group size"], {"adv_norm": GROUP}, meta=meta_of(-1, 3)),
    "group size bool": Case("BadMeta", ["group size"], {"reward_norm": GROUP}, meta=meta_of(True, 1)),
    "group sizes do not sum to B": Case(
        "BadMeta", ["group sizes", "2 rows"], {"reward_norm": GROUP}, meta=meta_of(1, 2)
    ),
    "group sizes, adv_norm": Case("BadMeta", ["group sizes"], {"adv_norm": GROUP}, meta=meta_of(1, 2)),
    "group sizes, std level": Case(
        "BadMeta", ["group sizes"], {"reward_norm": {"mean_level": None, "std_level": "group"}}, meta=meta_of(1)
    ),
    "row count zero": Case("BadMeta", ["row count"], {}, meta=meta_of(2, groups=[group(0, 2)])),
    "row count float": Case("BadMeta", ["row count"], {}, meta=meta_of(2, groups=[group(1.0, 1)])),
    "row count bool": Case("BadMeta", ["row count"], {}, meta=meta_of(2, groups=[group(True, 1)])),
    "row counts do not sum to the prompt": Case("BadMeta", ["row counts"], {}, meta=meta_of(2, groups=[group(1)])),
    "reference nan": Case("BadMeta", ["reference"], {}, meta=meta_of(2, groups=[group(1, 1, rewards=(NAN, 0.0))])),
    "reference inf": Case("BadMeta", ["reference"], {}, meta=meta_of(2, groups=[group(1, 1, rewards=(0.0, INF))])),
    "reference bool": Case("BadMeta", ["reference"], {}, meta=meta_of(2, groups=[group(1, 1, rewards=(True, 0.0))])),
    "reference count": Case("BadMeta", ["references"], {}, meta=meta_of(2, groups=[group(1, 1, rewards=(0.0,))])),
    "rows of a split rollout differ": Case(
        "RowsDiffer",
        ["logical rollout", "rows [1]", "reward_norm"],
        {"reward_norm": {}},
        {"rewards": [1.0, 2.0]},
        meta_of(2, groups=[group(2)]),
    ),
    "rows of a split rollout differ after the penalty": Case(
        "RowsDiffer", ["rows [1]"], {"reward_norm": {}} | PENALTY, {}, meta_of(2, groups=[group(2)])
    ),
    "rows of a split rollout differ before the penalty alone": Case(
        # generated 2 and 3 of a budget of 1: penalties -0.5 and -1 make 1.0 and 1.5 equal
        "RowsDiffer",
        ["rows [1]"],
        {"reward_norm": {}} | PENALTY,
        {"rewards": [1.0, 1.5]},
        meta_of(2, groups=[group(2)]),
    ),
    # shapes and keys
    "is_truncated [B,1]": Case("WrongShape", ["is_truncated"], {}, {"is_truncated": torch.zeros(2, 1).bool()}),
    "is_truncated [1]": Case("WrongShape", ["is_truncated"], {}, {"is_truncated": torch.zeros(1).bool()}),
    "recompute without prox_logp": Case("MissingKey", ["prox_logp"], {"recompute_logprob": True}),
    # masks
    "left padding": Case(
        "BadMask", ["attention_mask", "rows [1]"], {}, {"attention_mask": [[1, 1, 1, 0], [0, 1, 1, 1]]}
    ),
    "a hole": Case("BadMask", ["attention_mask", "rows [0]"], {}, {"attention_mask": [[1, 0, 1, 0], [1, 1, 1, 1]]}),
    "a hole at a word's edge": Case(
        "BadMask", ["attention_mask"], {}, {"attention_mask": [[1, 1, 1, 1, 0, 1]]}, drawn=("pppppp",)
    ),
    "loss_mask outside": Case("BadMask", ["loss_mask", "rows [0]"], {}, {"loss_mask": [[0, 1, 1, 1], [0, 1, 1, 1]]}),
    "loss_mask in an all-padding row": Case(
        "BadMask", ["loss_mask"], {}, {"loss_mask": [[1, 0, 0, 0]]}, drawn=("....",)
    ),
    # numbers of the configuration
    "group_size 0": Case("InvalidValue", ["group_size"], {"reward_norm": {"group_size": 0}}),
    "eps negative": Case("InvalidValue", ["eps"], {"adv_norm": {"eps": -1e-5}}),
    "overlong_tokens 0": Case("InvalidValue", ["overlong_tokens"], PENALTY | {"overlong_tokens": 0}),
    "overlong_tokens unset": Case("InvalidValue", ["overlong_tokens"], PENALTY | {"overlong_tokens": None}),
    "factor unset": Case("InvalidValue", ["overlong_penalty_factor"], PENALTY | {"overlong_penalty_factor": None}),
    "max_new_tokens 0": Case("InvalidValue", ["max_new_tokens"], PENALTY | {"max_new_tokens": 0}),
    "reward_clip negative": Case("InvalidValue", ["reward_clip"], {"reward_clip": -1.0}),
    "reward_clip nan": Case("InvalidValue", ["reward_clip"], {"reward_clip": NAN}),
    "unknown estimator": Case("UnknownName", ["tokn_gae", "token_gae"], stage("estimator", "tokn_gae")),
    "unknown level": Case("UnknownName", ["mean_level"], {"reward_norm": {"mean_level": "none"}}),
    "unknown unit": Case("UnknownName", ["gae_timestep_unit"], {"gae_timestep_unit": "step"}),
    "unknown KL kind, kl_ctl 0": Case("UnknownName", ["kl_estimator"], {"kl_estimator": "k4", "kl_ctl": 0.0}),
    "unknown KL kind": Case("UnknownName", ["kl_estimator"], {"kl_estimator": "k4", "kl_ctl": 1.0}),
    "kwargs on default compute": Case("BadKwargs", ["compute"], stage("compute", "default", x=1)),
    "kwargs on process auto": Case("BadKwargs", ["auto"], stage("process_adv_shaping", "auto", zero_eps=0.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused_in_words_that_name_it(run, name):
    case = CASES[name]
    error = run.refusal(case.batch(), case.actor, case.meta, **case.call)
    assert type(error).__name__ == case.error, error
    for word in case.words:
        assert word in str(error)


@pytest.mark.parametrize("drawn", [(), ("",)], ids=["no rows", "no tokens"])
def test_an_empty_batch_is_refused(run, drawn):
    shape = (len(drawn), 0) if drawn else (0, 3)
    batch = {key: torch.zeros(shape) for key in ("input_ids", "attention_mask", "loss_mask", "logprobs")}
    error = run.refusal(batch | {"rewards": torch.zeros(shape[0])})
    assert type(error).__name__ == "EmptyBatch"


@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "loss_mask", "rewards", "logprobs"])
def test_a_required_key_that_is_missing_is_named(run, key):
    error = run.refusal(rows("pg", **{key: None}))
    assert type(error).__name__ == "MissingKey" and f"'{key}'" in str(error)


@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "loss_mask", "rewards", "logprobs"])
def test_a_required_key_that_is_no_tensor_is_named(run, key):
    error = run.refusal(rows("pg") | {key: [1.0]})
    assert type(error).__name__ == "WrongType" and f"'{key}'" in str(error)


@pytest.mark.parametrize("key", ["attention_mask", "input_ids", "logprobs", "prox_logp", "ref_logp", "values"])
def test_a_tensor_per_token_of_another_shape_is_named(run, key):
    batch = rows("pg", prox_logp=[[0.0, 0.0]])
    error = run.refusal(batch | {key: torch.zeros(1, 3)}, {"recompute_logprob": True})
    assert type(error).__name__ == "WrongShape" and f"'{key}'" in str(error)


@pytest.mark.parametrize("shape", [(1,), (2, 1), (3,), ()])
def test_rewards_are_one_number_per_row(run, shape):
    error = run.refusal(rows("pg", "pg", rewards=torch.zeros(shape)))
    assert type(error).__name__ == "WrongShape" and "'rewards'" in str(error)


@pytest.mark.parametrize("key", ["logprobs", "rewards", "loss_mask", "attention_mask", "values", "token_rewards"])
def test_a_complex_tensor_is_named(run, key):
    x = rows("pg", values=[[0.0, 0.0]], token_rewards=[[0.0, 0.0]])
    error = run.refusal(x | {key: x[key].to(torch.complex64)})
    assert type(error).__name__ == "WrongDtype" and f"'{key}'" in str(error)


@pytest.mark.parametrize("key", ["logprobs", "rewards", "loss_mask", "attention_mask", "values"])
@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_tensor_that_is_not_plain_is_named(run, key, kind):
    x = rows("pg", values=[[0.0, 0.0]])
    odd = x[key].to_sparse() if kind == "sparse" else x[key].to("meta")
    error = run.refusal(x | {key: odd})
    assert type(error).__name__ in ("WrongType", "WrongDevice") and f"'{key}'" in str(error)


@pytest.mark.parametrize("batch", [None, [], "batch", torch.zeros(2, 2)])
def test_a_batch_that_is_no_mapping_is_refused(run, batch):
    assert type(run.refusal(batch)).__name__ == "WrongType"


# ---- what is legal beside it ----

LEGAL = {
    "inactive turn ids may be anything": Case("", [], TURN, ids([7, 0, 0, 1], first=(9, 0, 2, -5))),
    "turn_ids of int32": Case("", [], TURN, {"turn_ids": torch.zeros(2, 4, dtype=torch.int32)}),
    "skipped turn ids": Case("", [], TURN, ids([-1, 0, 2, 3])),
    "a custom number lambda leaves turn_ids alone": Case("", [], {}, {"turn_ids": torch.zeros(1)}),
    "folded rewards may differ between turns": Case(
        "", [], FOLD, {"token_rewards": cell(1, 3, 0.5)} | ids([-1, 0, 0, 1])
    ),
    "folded rewards may differ on both sides of a gap": Case(
        "", [], FOLD, {"token_rewards": [[0.0, 0.5, 0.0, 0.25]], "turn_ids": [[-1, 0, -1, 0]]}, drawn=("pgpg",)
    ),
    "folded rewards of a truncated row are zeroed before they are compared": Case(
        "", [], FOLD | MASK_NO_EOS, {"token_rewards": cell(1, 3, 0.5), "is_truncated": [False, True]}
    ),
    "gvpo beside mask_no_eos": Case("", [], MASK_NO_EOS, call={"advantage_shaping_mode": "gvpo"}),
    "additive call, folding": Case("", [], FOLD, call={"advantage_shaping_mode": "additive"}),
    "additive chosen, folding, gvpo called": Case(
        "", [], FOLD | stage("process_adv_shaping", "additive"), call={"advantage_shaping_mode": "gvpo"}
    ),
    "weighted rewards at both ends": Case(
        "", [], {}, {"token_rewards": cell(1, 2, 1.0)}, call={"advantage_shaping_mode": "process_weighted"}
    ),
    "weighted reward out of range where inactive": Case(
        "", [], {}, {"token_rewards": cell(1, 0, 9.0)}, call={"advantage_shaping_mode": "process_weighted"}
    ),
    "additive reward out of range": Case("", [], {}, {"token_rewards": cell(1, 2, -9.0)}),
    "group sizes unread": Case("", [], {"reward_norm": {}}, meta=meta_of(7)),
    "rows of a split rollout differ without reward_norm": Case(
        "", [], {}, {"rewards": [1.0, 2.0]}, meta_of(2, groups=[group(2)])
    ),
    "rows of a split rollout differ beside a reference": Case(
        "", [], {"reward_norm": {}}, {"rewards": [1.0, 2.0]}, meta_of(2, groups=[group(2, rewards=(0.0,))])
    ),
    "recompute without prox_logp under decoupled loss": Case(
        "", [], {"recompute_logprob": True, "use_decoupled_loss": True}
    ),
    "prox_logp of another shape where it is not read": Case("", [], {}, {"prox_logp": torch.zeros(1)}),
    "a penalty that is off": Case("", [], PENALTY | {"overlong_reward_penalty": False, "overlong_tokens": 0}),
    "eps zero": Case("", [], {"adv_norm": {"eps": 0.0}}, {"rewards": [1.0, 2.0]}),
    "reward_clip zero": Case("", [], {"reward_clip": 0.0}),
    "an optional key that is None is absent": Case(
        "", [], {"kl_ctl": 0.1}, {"values": None, "ref_logp": None, "token_rewards": None}
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_is_accepted(run, name):
    case = LEGAL[name]
    run(case.batch(), case.actor, case.meta, **case.call)


def test_keys_that_are_none_read_as_absent(run):
    optional = ("values", "ref_logp", "token_rewards", "turn_ids", "prox_logp", "is_truncated", "mopd_teacher_logp_sum")
    batch = rows("pgg", "pg.", rewards=[1.0, 2.0], is_truncated=None)
    out, want = run(batch | dict.fromkeys(optional)), run(batch)
    assert out["is_truncated"].tolist() == [True, False]
    assert torch.equal(out["advantages"], want["advantages"])
    assert {key for key, x in out.items() if x is not None} == {*want}


def test_the_next_valid_call_works_after_a_refusal(run):
    compute = run.build(TURN)
    with pytest.raises(ValueError):
        compute(rows("pg"))
    assert compute(rows("pg", rewards=[1.0], turn_ids=[[-1, 0]]))["advantages"].tolist() == [[1.0, 0.0]]


def test_a_refusal_leaves_the_last_warnings_alone(run):
    compute = run.build({})
    with pytest.warns(AdvantageWarning):
        compute(rows("gp"))
    before = dict(compute.last_warnings)
    with pytest.raises(ValueError):
        compute(rows("pg", rewards=[NAN]))
    assert "first_token_generated" in before and compute.last_warnings == before


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        ({"logprobs": cell(1, 2, NAN)}, "logprobs"),
        ({"values": cell(1, 2, NAN)}, "values"),
        ({"attention_mask": [[1, 0, 1, 0], [1, 1, 1, 1]]}, "attention_mask"),
        ({"token_rewards": cell(1, 2, NAN)}, "token_rewards"),
        ({"ref_logp": cell(1, 2, NAN)}, "ref_logp"),
    ],
)
def test_what_the_batch_alone_shows_is_refused_before_a_users_function_runs(run, channels, words):
    plugins_under_test.SEEN.clear()
    actor = stage("outcome_reward_shaping", "tests.contracts.plugins_under_test.see_outcome")
    error = run.refusal(rows("pgg.", "pggg", **channels), actor)
    assert words in str(error)
    assert plugins_under_test.SEEN == []


def test_an_unknown_backend_in_the_environment_is_named_and_nothing_else_runs(run, monkeypatch):
    compute = compiled_adv.build({})
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "referense")
    with pytest.raises(UnknownName) as refused:
        compute(rows("pg"))
    assert all(word in str(refused.value) for word in ("COMPILED_ADV_BACKEND", "referense", "reference"))
