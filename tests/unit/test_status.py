"""Flags: each has a meaning, the first in the table is raised, warnings are told once, rows are kept."""

import ast
import inspect
import itertools
import warnings

import pytest
import torch

from compiled_adv import reference
from compiled_adv.errors import AdvantageWarning, BatchError
from compiled_adv.status import ERRORS, WARNINGS, raise_errors, union, warn
from tests.contracts.small import Runner, group, meta_of, rows
from tests.unit.wiring import all_stages

# ---- the table ----

GATHERED = "invalid"  # several checks read as one; the eager path tells them apart


def test_every_flag_that_a_stage_declares_has_a_meaning():
    declared = {flag for kind in all_stages() for flag in kind.flags} - {GATHERED}
    assert declared <= ERRORS.keys() | WARNINGS.keys()


def test_every_meaning_belongs_to_a_flag_that_a_stage_declares():
    assert ERRORS.keys() | WARNINGS.keys() <= {flag for kind in all_stages() for flag in kind.flags}


def test_a_flag_is_an_error_or_a_warning_and_not_both():
    assert not ERRORS.keys() & WARNINGS.keys()


def test_the_reference_raises_flags_of_the_same_table():
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(reference))) if isinstance(node, ast.Call)]
    flags = {
        node.args[0].value
        for node in calls
        if getattr(node.func, "id", getattr(node.func, "attr", "")) in ("refuse", "read_active", "warn", "Refused")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(flags) > 15
    # masks are refused before any backend runs, whatever a backend would make of them
    assert flags - {"nonfinite_attention_mask", "nonfinite_loss_mask"} <= ERRORS.keys() | WARNINGS.keys()


def test_the_warnings_are_the_ten_documented_ones():
    assert {*WARNINGS} == {
        "outcome_on_masked_token",
        "first_token_generated",
        "truncated_by_width",
        "rows_outside_groups",
        "kl_without_reference",
        "zero_spread_groups",
        "uncapped_length_penalty",
        "loo_alone",
        "discarded_rows_counted",
        "weighted_flip",
    }


@pytest.mark.parametrize("flag", ERRORS)
def test_an_error_says_what_where_which_rows_and_what_would_work(flag):
    error, what, at, hint = ERRORS[flag]
    with pytest.raises(error) as caught:
        raise_errors({flag: [2, 5]})
    assert issubclass(error, BatchError)
    for part in (what, at, hint, "rows [2, 5]"):
        assert part and part in str(caught.value)


# ---- raising ----


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(ERRORS)))
def test_the_first_error_of_the_table_is_raised(first, second):
    with pytest.raises(BatchError) as caught:
        raise_errors({second: [0], first: [1]})
    assert caught.value.what == ERRORS[first][1]


@pytest.mark.parametrize("flags", [{}, {"nonfinite_rewards": []}, {"loo_alone": [0]}])
def test_without_an_error_nothing_is_raised(flags):
    raise_errors(flags)


def test_many_rows_are_cut_short():
    with pytest.raises(BatchError) as caught:
        raise_errors({"nonfinite_rewards": [*range(20)]})
    assert "rows [0, 1, 2, 3, 4, 5, 6, 7] and 12 more" in str(caught.value)


# ---- warning ----


def told(flags, known):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = warn(flags, known)
    return found, [str(w.message) for w in caught if w.category is AdvantageWarning]


def test_a_warning_says_its_name_its_meaning_and_its_rows():
    found, messages = told({"loo_alone": [3, 4]}, set())
    assert found == {"loo_alone": [3, 4]}
    (message,) = messages
    assert message.startswith("loo_alone: ") and WARNINGS["loo_alone"] in message
    assert "2 rows" in message and "first 3" in message


def test_a_known_warning_is_kept_and_not_told():
    known: set[str] = set()
    told({"loo_alone": [3]}, known)
    assert told({"loo_alone": [4], "weighted_flip": [1]}, known)[0] == {"loo_alone": [4], "weighted_flip": [1]}
    assert told({"loo_alone": [4], "weighted_flip": [1]}, known)[1] == []


def test_a_name_without_rows_is_dropped():
    assert told({"loo_alone": []}, set()) == ({}, [])


# ---- merging ----


def test_merging_unites_rows_in_order():
    assert union({"a": [3, 1]}, {"b": [0]}, {"a": [2, 1]}) == {"a": [1, 2, 3], "b": [0]}


def test_merging_nothing_gives_nothing():
    assert union() == {} and union({}, {}) == {}


# ---- which of two mistakes is named ----

NAN = float("nan")


def cell(b, t, x):
    grid = torch.zeros(2, 5)
    grid[b, t] = x
    return grid


ACTOR = {
    "recompute_logprob": True,
    "gae_timestep_unit": "turn",
    "token_rewards_as_adv": False,
    "reward_norm": {},
    "kl_ctl": 0.1,
}
FAULTS = {
    "attention_not_prefix": {"attention_mask": [[1, 1, 1, 1, 0], [1, 0, 1, 1, 0]]},
    "loss_mask_outside_attention": {"loss_mask": [[0, 1, 1, 0, 1], [0, 1, 1, 0, 0]]},
    "nonfinite_rewards": {"rewards": [NAN, NAN]},
    "nonfinite_logprobs": {"logprobs": cell(0, 1, NAN)},
    "nonfinite_prox_logp": {"prox_logp": cell(1, 0, NAN)},
    "nonfinite_ref_logp": {"ref_logp": cell(0, 0, NAN)},
    "nonfinite_values": {"values": cell(1, 1, NAN)},
    "nonfinite_token_rewards": {"token_rewards": cell(0, 1, NAN)},
    "turn_id_out_of_range": {"turn_ids": [[-1, 0, 9, -1, -1], [-1, 0, 0, -1, -1]]},
    "turn_ids_decrease": {"turn_ids": [[-1, 0, 0, -1, -1], [-1, 1, 0, -1, -1]]},
    "nonuniform_folded_rewards": {"token_rewards": cell(1, 2, 0.5)},
    "split_rows_differ": {"rewards": [1.0, 2.0]},
}
PAIRS = [(a, b) for a, b in itertools.combinations(FAULTS, 2) if not FAULTS[a].keys() & FAULTS[b].keys()]


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_of_two_mistakes_the_first_of_the_table_is_named_on_every_backend(first, second, backend):
    whole = {
        "turn_ids": [[-1, 0, 0, -1, -1]] * 2,
        **{key: torch.zeros(2, 5) for key in ("prox_logp", "ref_logp", "values", "token_rewards")},
    }
    batch = rows("pggp.", "pggp.", **(whole | FAULTS[first] | FAULTS[second]))
    error = Runner(backend).refusal(batch, ACTOR, meta_of(2, groups=[group(2)]))
    assert error.what == ERRORS[min(first, second, key=[*ERRORS].index)][1]
