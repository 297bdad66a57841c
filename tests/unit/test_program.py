"""Lowering: a Program runs as its stages do one by one, prints as Python, and is cut at a user's function alone."""

import ast
from dataclasses import replace

import pytest
import torch
from torch import fx

from compiled_adv.executable import EagerExecutable
from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.program import lower
from compiled_adv.stages.plugin import EstimatorPlugin, LambdaPlugin, OutcomePlugin, ProcessPlugin
from tests.unit.wiring import DOUBLE, EVERYTHING, SMALL, SPLIT, WATCH, Double, a_batch, plugin, wired

CONFIGS = {
    "everything": EVERYTHING,
    "bare": {},
    "turn": {"gae_timestep_unit": "turn", "kl_ctl": 0.5},
    "folded": {"token_rewards_as_adv": False},
    "strict": EVERYTHING | {"advantage": {"rules": "strict"}},
    "lambda": {"gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae", "gae_lambda_kwargs": {"alpha": 1.0}},
    "mixed levels": {"reward_norm": {"mean_level": "group", "std_level": "batch", "group_size": 2}},
}


def one_by_one(pipeline, channels):
    """Every version by running each stage in turn."""
    env = dict(channels)
    for node in pipeline.nodes:
        result = node.stage.forward(*(None if v is None else env[v] for v in node.reads))
        results = result if len(node.produced) > 1 else (result,)
        env |= dict(zip(node.produced, results, strict=True))
    return env


def equal(a, b):
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


# ---- numbers ----


@pytest.mark.parametrize("name", CONFIGS)
def test_a_segment_gives_what_its_stages_give_one_by_one(name):
    pipeline, admitted = wired(CONFIGS[name])
    (segment,) = lower(pipeline).segments
    *outputs, raised = segment.module(*(admitted.channels[v] for v in segment.inputs))
    want = one_by_one(pipeline, admitted.channels)
    for version, x in zip(segment.outputs, outputs, strict=True):
        assert equal(x, want[version.removesuffix(".copy")] if version in want else x), version
    assert raised.tolist() == sum(want[flag].long() << i for i, flag in enumerate(segment.flags)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_stage_gives_one_thing_for_each_name_it_writes_and_flags(name):
    pipeline, admitted = wired(CONFIGS[name])
    env = one_by_one(pipeline, admitted.channels)  # zip is strict
    assert all(env[flag].dtype == torch.bool and env[flag].shape == (4,) for flag in pipeline.flags)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_stage_writes_to_what_it_reads(name):
    pipeline, admitted = wired(CONFIGS[name])
    env = dict(admitted.channels)
    for node in pipeline.nodes:
        given = {v: env[v] for v in node.reads if v is not None}
        before = {v: x.clone() for v, x in given.items()}
        env |= one_by_one(replace(pipeline, nodes=(node,)), env)
        assert all(equal(given[v], before[v]) for v in given), node.name


# ---- printing ----


@pytest.mark.parametrize("name", CONFIGS)
def test_a_segment_prints_as_python(name):
    for segment in lower(wired(CONFIGS[name])[0]).segments:
        (function,) = ast.parse(segment.module.code.strip()).body
        assert isinstance(function, ast.FunctionDef) and function.name == "forward"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_printed_code_runs_and_gives_the_same(name):
    pipeline, admitted = wired(CONFIGS[name])
    (segment,) = lower(pipeline).segments
    namespace = {"torch": torch}
    exec(segment.module.code, namespace)  # noqa: S102
    inputs = [admitted.channels[v] for v in segment.inputs]
    got, want = namespace["forward"](segment.module, *inputs), segment.module(*inputs)
    assert all(equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_code_names_stages_and_versions():
    (segment,) = lower(wired(EVERYTHING)[0]).segments
    for word in ("self.LengthPenalty", "self.RewardNorm", "self.TokenGAE", "rewards_1"):
        assert word in segment.module.code


def test_the_same_pipeline_prints_the_same():
    codes = {lower(wired(EVERYTHING)[0]).segments[0].module.code for _ in range(2)}
    assert len(codes) == 1


# ---- segments ----

OUTCOME = plugin("outcome_reward_shaping", "see_outcome")
PROCESS = plugin("process_adv_shaping", "see_process")
ESTIMATOR = plugin("estimator", "see_estimator")
LAMBDA = {"gae_lambda": "tests.contracts.plugins_under_test.see_lambda"}

CUT = {
    "none": ({}, []),
    "outcome": ({"advantage": OUTCOME}, [OutcomePlugin]),
    "estimator": ({"advantage": ESTIMATOR}, [EstimatorPlugin]),
    "process": ({"advantage": PROCESS}, [ProcessPlugin]),
    "lambda": (LAMBDA, [LambdaPlugin]),
    "outcome and process": ({"advantage": OUTCOME | PROCESS}, [OutcomePlugin, ProcessPlugin]),
    "three": ({"advantage": OUTCOME | ESTIMATOR | PROCESS}, [OutcomePlugin, EstimatorPlugin, ProcessPlugin]),
}


@pytest.mark.parametrize("name", CUT)
def test_a_program_is_cut_at_each_users_function_and_nowhere_else(name):
    actor, functions = CUT[name]
    segments = lower(wired(actor)[0]).segments
    assert [type(s.module.stage) for s in segments if s.opaque] == functions
    assert all(isinstance(s.module, fx.GraphModule) for s in segments if not s.opaque)
    assert not any(a.opaque is b.opaque is False for a, b in zip(segments, segments[1:], strict=False))


@pytest.mark.parametrize("name", CUT)
def test_what_a_segment_reads_came_in_or_left_an_earlier_one(name):
    program = lower(wired(CUT[name][0])[0])
    known = set(program.inputs)
    for segment in program.segments:
        assert {*segment.inputs} <= known
        known |= {*segment.outputs}
    assert {version for _, version in program.outputs} <= known


@pytest.mark.parametrize("name", CUT)
def test_every_flag_leaves_one_segment(name):
    pipeline, _ = wired(CUT[name][0])
    flags = [flag for segment in lower(pipeline).segments for flag in segment.flags]
    assert sorted(flags) == sorted(pipeline.flags)


@pytest.mark.parametrize("name", CUT)
def test_a_segment_gives_only_what_is_needed_after_it(name):
    program = lower(wired(CUT[name][0])[0])
    for i, segment in enumerate(program.segments):
        needed = {v for later in program.segments[i + 1 :] for v in later.inputs} | {v for _, v in program.outputs}
        if not segment.opaque:
            assert {*segment.outputs} <= needed


def test_checks_that_depend_on_no_users_function_run_before_the_first_one():
    first = lower(wired(EVERYTHING | {"advantage": OUTCOME})[0]).segments[0]
    assert not first.opaque
    for flag in ("nonfinite_logprobs", "nonfinite_values", "attention_not_prefix", "nonfinite_token_rewards"):
        assert f"flag:{flag}" in first.flags


@pytest.mark.parametrize("name", CUT)
def test_an_uncut_and_a_cut_program_run_to_the_same_outputs(name):
    # the functions of these configurations change nothing but the totals of the estimator
    actor = CUT[name][0]
    pipeline, admitted = wired(actor)
    outputs, flags = EagerExecutable(lower(pipeline)).run(admitted)
    assert set(outputs) == {version for version, _ in pipeline.outputs}
    assert all(isinstance(rows, list) for rows in flags.values())


# ---- outputs that share a version ----


def ran(pipeline, a):
    program = lower(pipeline)
    (segment,) = program.segments
    env = dict(zip(segment.outputs, segment.module(a)[:-1], strict=True))
    return {name: env[version] for name, version in program.outputs}


def test_two_outputs_of_one_version_are_copies_of_each_other():
    out = ran(replace(SMALL, outputs=(("d", "d"), ("again", "d"))), torch.ones(3))
    assert torch.equal(out["d"], out["again"])
    assert out["d"].data_ptr() != out["again"].data_ptr()


def test_an_output_that_is_an_input_is_a_copy_of_it():
    a = torch.ones(3)
    out = ran(replace(SMALL, outputs=(("a", "a"), ("d", "d"), ("e", "e"))), a)
    assert torch.equal(out["a"], a) and out["a"].data_ptr() != a.data_ptr()


def test_an_output_that_a_later_segment_reads_is_kept_for_both():
    class Opaque(Double):
        opaque = True

        def call(self, admitted, channel):
            return (channel("a") * 10,)

    cut = Node("Opaque", Opaque(), ("b",), ("x",))
    pipeline = Pipeline(
        (DOUBLE, SPLIT, WATCH, cut), ("a",), (("b", "b"), ("b2", "b"), ("d", "d"), ("e", "e"), ("x", "x"))
    )
    program = lower(pipeline)
    assert [segment.opaque for segment in program.segments][:2] == [False, True]
    versions = [version for _, version in program.outputs]
    assert len(versions) == len({*versions})
    assert {v for s in program.segments for v in s.outputs} >= {*versions}


def test_a_small_program_runs():
    (segment,) = lower(SMALL).segments
    d, e, raised = segment.module(torch.tensor([1.0, 3.0]))
    assert (d.tolist(), e.tolist(), raised.tolist()) == ([3.0, 7.0], [1.0, 5.0], [0, 1])


def test_a_program_without_flags_gives_none_for_them():
    pipeline = Pipeline((DOUBLE, SPLIT), ("a",), (("d", "d"), ("e", "e")))
    assert lower(pipeline).segments[0].module(torch.ones(2))[-1] is None


def test_optional_channels_that_are_absent_are_none_in_the_code():
    (segment,) = lower(wired(EVERYTHING, a_batch("ref_logp", "values", "token_rewards"))[0]).segments
    assert "None" in segment.module.code and "ref_logp" not in segment.inputs
