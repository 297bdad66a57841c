"""Day-one safety: a wrong result, a stage that does not compile and a missing compiler show at once, with a way out."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml

import compiled_adv
from compiled_adv.errors import CompileFailed, CompilerMissing, NonFinite, ResultsDiffer
from compiled_adv.inductor import graphs_captured
from tests.compiled.shared import CRITIC, assert_right, assert_same, built, case_of, configured, expected, run
from tests.random_cases import Template

USERS = "tests.passes.users."


def build(*passes: str, template: Template = CRITIC, **compiled: object) -> compiled_adv.Compute:
    return compiled_adv.build(configured(template.actor, passes=["drop_idle", *passes], **compiled))


# ---- the first batch of each program runs eager too ----


@pytest.mark.usefixtures("interpreted")
def test_a_difference_from_eager_is_an_error_that_says_where():
    compute, case = build(USERS + "wrong"), case_of(CRITIC)
    want, have = expected(case)[0], run(build(USERS + "wrong", verify_steps=0), case)[0]
    with pytest.raises(ResultsDiffer) as caught:
        run(compute, case)
    key, row, column = re.fullmatch(r"channel (\w+), row (\d+), column (\d+)", str(caught.value.at)).groups()
    differs = (want[key] - have[key]).abs() > 1e-5 * (1 + want[key].abs())
    assert [int(row), int(column)] == differs.nonzero()[0].tolist()
    assert "COMPILED_ADV_BACKEND=eager" in str(caught.value.hint)


@pytest.mark.usefixtures("interpreted")
def test_a_wrong_program_stays_refused():
    compute = build(USERS + "wrong")
    for _ in range(3):
        with pytest.raises(ResultsDiffer):
            run(compute, case_of(CRITIC))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_so_many_first_batches_of_a_program_are_verified(steps: int, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("compiled_adv.compiler.compare", lambda got, want: seen.append(list(want)))
    compute = build(verify_steps=steps)
    for rows in (1, 2, 3, 4):
        run(compute, case_of(CRITIC, rows))
    assert len(seen) == steps
    for rows in (1, 2, 3, 4):
        run(compute, case_of(Template(CRITIC.actor, CRITIC.keys - {"values"}), rows))
    assert len(seen) == 2 * steps


NAN = float("nan")


@pytest.mark.parametrize(
    "have, want, at",
    [
        ([[1.0, 2.0]], [[1.0, 2.1]], "row 0, column 1"),
        ([[1.0], [NAN]], [[1.0], [2.0]], "row 1, column 0"),
        ([1.0, 2.0, 4.0], [1.0, 2.0, 3.0], "row 2"),
        ([[True, False]], [[True, True]], "row 0, column 1"),
    ],
)
def test_one_wrong_number_is_found(have, want, at):
    from compiled_adv.compiler import compare

    with pytest.raises(ResultsDiffer) as caught:
        compare({"x": torch.tensor(have)}, {"x": torch.tensor(want)})
    assert caught.value.at == f"channel x, {at}"


def test_rounding_is_no_difference():
    from compiled_adv.compiler import compare

    x = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1000
    compare({"x": x * (1 + 1e-6)}, {"x": x})


# ---- the environment switch ----


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_the_switch_rules_the_compiler_out(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMPILED_ADV_BACKEND", backend)
    before = graphs_captured()
    compute = build(USERS + "untraceable")
    compute.warmup(example=case_of(CRITIC).batch, freeze=True)
    assert_right(compute, case_of(CRITIC))
    assert graphs_captured() == before and compute.cache.info().compiles == 0


@pytest.mark.usefixtures("interpreted")
def test_the_switch_works_in_a_running_job(monkeypatch: pytest.MonkeyPatch):
    compute = build(USERS + "wrong", verify_steps=0)
    wrong, _ = run(compute, case_of(CRITIC))
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "eager")
    assert_right(compute, case_of(CRITIC))
    monkeypatch.delenv("COMPILED_ADV_BACKEND")
    assert_same(run(compute, case_of(CRITIC))[0], wrong)


# ---- a stage that does not compile ----


def test_a_stage_that_does_not_compile_is_named_with_its_place_in_the_config():
    with pytest.raises(CompileFailed) as caught:
        run(build(USERS + "untraceable"), case_of(CRITIC))
    assert "ReadsTheHost(discount=0.99)" in caught.value.what
    assert caught.value.at == "actor.advantage.estimator"
    assert any(words in str(caught.value.found) for words in ("data-dependent", "Tensor.item()"))  # torch's own
    assert "on_compile_error: eager" in str(caught.value.hint)


def test_its_place_in_the_config_has_file_and_line(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    actor = CRITIC.actor | {"advantage": {"estimator": {"implementation": "token_gae"}}}
    file.write_text(yaml.safe_dump(configured(actor, passes=[USERS + "untraceable"]), sort_keys=False))
    line = 1 + next(i for i, text in enumerate(file.read_text().splitlines()) if text.strip() == "estimator:")
    with pytest.raises(CompileFailed) as caught:
        run(compiled_adv.build(file), case_of(CRITIC))
    assert caught.value.at == f"actor.advantage.estimator (mine.yaml:{line})"


def test_a_failed_compile_leaves_the_next_batch_alone():
    compute = build(USERS + "untraceable")
    for _ in range(2):
        with pytest.raises(CompileFailed):
            run(compute, case_of(CRITIC))
    assert compute.cache.info().compiles == 0
    assert_right(built(case_of(CRITIC).on("compiled")), case_of(CRITIC))


def test_a_failed_compile_falls_back_with_one_warning_where_configured():
    compute = build(USERS + "untraceable", on_compile_error="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 3, 4):
            compute(case_of(CRITIC, rows).batch)
    text = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(text) == 1 and "running eager" in text[0] and "ReadsTheHost" in text[0]
    assert compute.cache.info().fallbacks == 3
    assert_right(compute, case_of(CRITIC))


def test_a_failed_compile_is_not_tried_again_where_it_falls_back(monkeypatch: pytest.MonkeyPatch):
    tried = []

    def fails(*_, **__):
        tried.append(1)
        raise RuntimeError("out of registers")

    monkeypatch.setattr("compiled_adv.executable.compile_graph", fails)
    compute = build(on_compile_error="eager")
    with pytest.warns(RuntimeWarning, match="out of registers"):
        for _ in range(3):
            assert_right(compute, case_of(CRITIC))
    assert len(tried) == 1


def test_where_the_compiler_itself_fails_the_program_is_named(monkeypatch: pytest.MonkeyPatch):
    def fails(*_, **__):
        raise RuntimeError("out of registers")

    monkeypatch.setattr("compiled_adv.executable.compile_graph", fails)
    with pytest.raises(CompileFailed) as caught:
        run(build(), case_of(CRITIC))
    assert "the Program does not compile" in caught.value.what and "out of registers" in str(caught.value.found)


# ---- no C++ compiler ----


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """As on a machine without one, in a process that has built nothing yet."""
    from compiled_adv.kernels import build as builder
    from compiled_adv.kernels import cpu

    def missing():
        return builder.library(tmp_path)

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(cpu, "operators", missing)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("on_compile_error", ["raise", "eager"])
def test_without_a_compiler_everything_runs_eager_with_one_clear_warning(on_compile_error: str):
    compute = build(on_compile_error=on_compile_error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compute(case_of(CRITIC).batch)
        compute(case_of(Template(CRITIC.actor, CRITIC.keys - {"values"})).batch)
    text = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(text) == 1
    assert "running eager" in text[0] and "no-such-compiler" in text[0] and "install g++" in text[0]
    assert compute.cache.info().fallbacks == 2
    assert_right(compute, case_of(CRITIC))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_operators_say_so():
    from compiled_adv.kernels import native

    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        native(torch.device("cpu"))


# ---- bad input ----


@pytest.mark.parametrize("key", ["values", "logprobs", "rewards", "ref_logp"])
def test_bad_input_is_named_as_on_the_eager_path_and_the_next_call_works(key: str):
    compute, case = built(case_of(CRITIC).on("compiled")), case_of(CRITIC)
    bad = case.with_batch(case.batch | {key: torch.full_like(case.batch[key], torch.nan)})
    errors = []
    for backend in (compute, compiled_adv.build(case.on("eager"))):
        with pytest.raises(NonFinite) as caught:
            run(backend, bad)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and key in errors[0]
    assert_right(compute, case)
