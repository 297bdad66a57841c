"""The comparer of golden files: it must fail on every kind of mistake, or no golden case means anything."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from compiled_adv import conformance
from compiled_adv.advantage import OutcomeRewardInputs
from compiled_adv.batch import RolloutGroup, TrajBatchMeta
from compiled_adv.conformance import affine, check_case, run_folder
from compiled_adv.errors import CompiledAdvError


def array(data, dtype="float64"):
    return {"dtype": dtype, "shape": list(torch.tensor(data).shape), "data": data}


CASE = {
    "name": "small",
    "config": {"gae_lambda": 1.0},
    "batch": {"rewards": array([1, 2], "int64")},
    "meta": None,
    "expected": {"advantages": array([[1.0, -3.0]]), "rewards": array([1, 2], "int64")},
    "expected_warnings": {"loo_alone": [0]},
}
ERROR_CASE = {key: CASE[key] for key in ("name", "config", "batch", "meta")} | {"error": "no good"}


def right():
    return {"advantages": torch.tensor([[1.0, -3.0]]), "rewards": torch.tensor([1, 2])}


def gives(outputs=None, warnings=None):
    return lambda *_: (right() if outputs is None else outputs, {"loo_alone": [0]} if warnings is None else warnings)


def raises(error):
    def compute(*_):
        raise error

    return compute


def reason_of_failure(case, compute_fn):
    result = check_case(case, compute_fn)
    assert result.status == "failed"
    return result.reason


def test_right_outputs_and_warnings_pass():
    assert check_case(CASE, gives()).status == "passed"


def test_a_wrong_number_fails_and_is_located():
    wrong = right() | {"advantages": torch.tensor([[1.0, -3.001]])}
    assert "advantages[0, 1] is -3.001, should be -3" in reason_of_failure(CASE, gives(wrong))


def test_tolerance_grows_with_the_expected_number():
    close = right() | {"advantages": torch.tensor([[1.0, -3.0003]])}  # within 1e-4 * (1 + 3)
    assert check_case(CASE, gives(close)).status == "passed"


def test_a_nan_fails():
    wrong = right() | {"advantages": torch.tensor([[1.0, math.nan]])}
    assert "advantages[0, 1] is nan" in reason_of_failure(CASE, gives(wrong))


def test_a_missing_key_fails():
    assert "advantages is missing" in reason_of_failure(CASE, gives({"rewards": torch.tensor([1, 2])}))


def test_a_wrong_expected_extra_fails():
    case = CASE | {"expected_extra": {"ref_logp": array([[0.5, 0.5]])}}
    wrong = right() | {"ref_logp": torch.tensor([[0.5, 0.0]])}
    assert "ref_logp[0, 1] is 0" in reason_of_failure(case, gives(wrong))


def test_another_shape_fails_even_if_it_broadcasts():
    wrong = right() | {"advantages": torch.tensor([1.0, -3.0])}
    assert "advantages has shape [2]" in reason_of_failure(CASE, gives(wrong))


def test_float_rewards_fail_where_integers_are_due():
    wrong = right() | {"rewards": torch.tensor([1.0, 2.0])}
    assert "rewards is torch.float32, should be int" in reason_of_failure(CASE, gives(wrong))


def test_the_kind_of_other_channels_is_not_looked_at():
    fine = right() | {"advantages": torch.tensor([[1, -3]])}
    assert check_case(CASE, gives(fine)).status == "passed"


@pytest.mark.parametrize("warnings", [{}, {"loo_alone": [1]}, {"loo_alone": [0], "weighted_flip": [0]}])
def test_missing_moved_or_extra_warnings_fail(warnings):
    assert "warnings are" in reason_of_failure(CASE, gives(warnings=warnings))


def test_a_case_without_expected_warnings_says_nothing_about_them():
    case = {key: value for key, value in CASE.items() if key != "expected_warnings"}
    assert check_case(case, gives(warnings={"weighted_flip": [0]})).status == "passed"


def test_a_refusal_passes_an_error_case():
    assert check_case(ERROR_CASE, raises(CompiledAdvError("no"))).status == "passed"


def test_an_error_that_is_not_raised_fails():
    assert "should be refused: no good" in reason_of_failure(ERROR_CASE, gives())


def test_an_error_that_is_not_ours_fails_an_error_case():
    assert "raised ValueError: shapes" in reason_of_failure(ERROR_CASE, raises(ValueError("shapes")))


def test_a_refusal_fails_a_case_with_outputs():
    assert "refused: CompiledAdvError: no" in reason_of_failure(CASE, raises(CompiledAdvError("no")))


def test_a_case_that_expects_nothing_fails():
    assert "expects nothing" in reason_of_failure(CASE | {"expected": {}}, gives({}))


def test_non_finite_config_numbers_are_read():
    seen = []
    case = CASE | {"config": {"reward_clip": {"float": "nan"}, "adv_norm": {"eps": {"float": "inf"}}}}
    check_case(case, lambda config, *_: seen.append(config["actor"]))
    assert math.isnan(seen[0]["reward_clip"]) and seen[0]["adv_norm"] == {"eps": math.inf}


def test_bare_names_become_paths_and_call_values_leave_the_config():
    seen = []
    stage = {"implementation": "affine", "kwargs": {"factor": 2.0}}
    config = {
        "gae_lambda": "vapo_length_adaptive_gae",
        "advantage": {"outcome_reward_shaping": stage, "rules": "strict"},
        "call": {"advantage_shaping_mode": "gvpo"},
    }
    before = copy.deepcopy(config)
    check_case(CASE | {"config": config}, lambda *args: seen.append(args))
    assert seen[0][0] == {
        "actor": {
            "gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae",
            "advantage": {
                "outcome_reward_shaping": {
                    "implementation": "compiled_adv.conformance.affine",
                    "kwargs": {"factor": 2.0},
                },
                "rules": "strict",
            },
        }
    }
    assert seen[0][3] == {"advantage_shaping_mode": "gvpo"}
    assert config == before


def write(folder: Path, name: str, case: object) -> None:
    (folder / f"{name}.json").write_text(case if isinstance(case, str) else json.dumps(case))


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(CompiledAdvError, match="no golden file"):
        run_folder(tmp_path)


def test_a_broken_file_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(conformance, "through_build", lambda backend: gives())
    write(tmp_path, "a", CASE)
    write(tmp_path, "b", "{")
    write(tmp_path, "c", CASE | {"batch": None})
    results = run_folder(tmp_path)
    assert [result.status for result in results] == ["passed", "failed", "failed"]
    assert all("not a golden file" in result.reason for result in results[1:])


@pytest.mark.parametrize("rules, skipped", [("default", ["s"]), ("strict", ["d", "n"]), ("all", [])])
def test_cases_of_another_rule_set_are_skipped(tmp_path, monkeypatch, rules, skipped):
    monkeypatch.setattr(conformance, "through_build", lambda backend: gives())
    write(tmp_path, "d", CASE | {"name": "d", "config": {"advantage": {"rules": "default"}}})
    write(tmp_path, "n", CASE | {"name": "n", "config": {"advantage": None}})
    write(tmp_path, "s", CASE | {"name": "s", "config": {"advantage": {"rules": "strict"}}})
    assert [result.name for result in run_folder(tmp_path, rules=rules) if result.status == "skipped"] == skipped


REFERENCES = TrajBatchMeta(2, [3, 1], [4, 4], [RolloutGroup((2, 1), (5.0, None)), None])


def shaped(meta, **kwargs):
    inputs = OutcomeRewardInputs({"rewards": torch.tensor([1, 1, 2, 3])}, None, meta)
    return affine(inputs, factor=2.0, shift=1.0, **kwargs)


def test_affine_shapes_rewards():
    assert shaped(None).rewards.tolist() == [3.0, 3.0, 5.0, 7.0]


def test_affine_shapes_references_or_first_rows():
    assert shaped(REFERENCES).normalization_rewards.tolist() == [11.0, 5.0, 7.0]


def test_affine_keeps_references_back_when_told_so():
    assert shaped(REFERENCES, references=False).normalization_rewards is None


def test_affine_gives_no_references_where_none_is_explicit():
    meta = TrajBatchMeta(2, [3, 1], [4, 4], [RolloutGroup((2, 1)), None])
    assert shaped(meta).normalization_rewards is None
