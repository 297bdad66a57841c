"""Wiring: order, versions, optional channels, strict replacements; and the stages that are wired."""

import inspect
from dataclasses import FrozenInstanceError, replace

import networkx as nx
import pytest

from compiled_adv.channel import INPUTS, base
from compiled_adv.errors import Cycle, MissingChannel
from compiled_adv.pipeline import Node, Pipeline, Wiring, flag_name, wire
from compiled_adv.resolve import resolve_spec
from compiled_adv.spec import Advantage, Spec, load_config
from compiled_adv.stage import Stage
from compiled_adv.stages.adv_norm import AdvNorm
from compiled_adv.stages.alignment import Alignment
from compiled_adv.stages.diagnostics import BatchStats
from compiled_adv.stages.estimator import AlignTurnIds, LambdaByLength, PlaceOutcome, TokenGAE, TurnGAE
from compiled_adv.stages.kl_rewards import KLRewards
from compiled_adv.stages.length_penalty import LengthPenalty
from compiled_adv.stages.logprobs import ProximalLogprobs
from compiled_adv.stages.plugin import EstimatorPlugin, LambdaPlugin, OutcomePlugin, ProcessPlugin
from compiled_adv.stages.process_adv_shaping import GVPO, Additive, ProcessWeighted
from compiled_adv.stages.process_rewards import DirectRewards, FoldedRewards
from compiled_adv.stages.reward_norm import RewardNorm, RowGroups, SameRawRewards, Score, Units
from compiled_adv.stages.statistics import LEVELS, levels
from compiled_adv.stages.strict import STRICT
from tests.unit.wiring import (
    DOUBLE,
    EVERYTHING,
    OPTIONAL,
    SMALL,
    SPLIT,
    WATCH,
    Double,
    Split,
    a_batch,
    all_stages,
    find,
    kinds,
    plugin,
    wired,
)

# ---- order ----

ORDER = [LengthPenalty, OutcomePlugin, Score, RewardNorm, PlaceOutcome, TokenGAE, AdvNorm, Additive]


@pytest.mark.parametrize(("earlier", "later"), list(zip(ORDER, ORDER[1:], strict=False)))
def test_each_step_depends_on_the_one_before_it(earlier, later):
    pipeline, _ = wired(EVERYTHING | {"advantage": plugin("outcome_reward_shaping", "see_outcome")})
    assert nx.has_path(pipeline.graph, find(pipeline, earlier).name, find(pipeline, later).name)


def test_every_version_is_written_before_it_is_read():
    pipeline, _ = wired(EVERYTHING)
    known = set(pipeline.inputs)
    for node in pipeline.nodes:
        assert {version for version in node.reads if version} <= known, node.name
        known |= {*node.produced}


def test_the_order_can_be_restored_from_the_graph_alone():
    pipeline, _ = wired(EVERYTHING)
    shuffled = replace(pipeline, nodes=tuple(sorted(pipeline.nodes, key=lambda node: hash(node.name))))
    known = set(pipeline.inputs)
    for node in shuffled.in_order().nodes:
        assert {version for version in node.reads if version} <= known
        known |= {*node.produced}


def test_a_pipeline_in_order_stays_as_it_is():
    pipeline, _ = wired(EVERYTHING)
    assert pipeline.in_order() == pipeline


def test_stages_that_wait_for_each_other_have_no_order():
    there, back = Node("There", Double(), ("y",), ("x",)), Node("Back", Double(), ("x",), ("y",))
    with pytest.raises(Cycle, match="There|Back"):
        Pipeline((there, back), (), (("x", "x"),)).in_order()


# ---- versions ----


def test_a_channel_that_is_written_again_gets_a_version():
    pipeline, _ = wired(EVERYTHING | {"advantage": plugin("outcome_reward_shaping", "see_outcome")})
    penalty, shaping = find(pipeline, LengthPenalty), find(pipeline, OutcomePlugin)
    assert (penalty.reads[0], penalty.writes[0], shaping.writes[0]) == ("rewards", "rewards.1", "rewards.2")
    assert find(pipeline, Score).reads == ("rewards.2",)
    assert dict(pipeline.outputs)["rewards"] == "rewards.2"


def test_the_comparison_of_raw_rows_reads_the_rewards_before_the_penalty():
    pipeline, _ = wired(EVERYTHING)
    assert find(pipeline, SameRawRewards).reads[0] == "rewards"


def test_a_stage_wired_twice_gets_a_name_of_its_own():
    pipeline, _ = wired(EVERYTHING)
    assert [node.name for node in pipeline.nodes if isinstance(node.stage, RowGroups)] == ["RowGroups", "RowGroups.1"]


def test_each_norm_block_reads_its_own_groups():
    actor = EVERYTHING | {"adv_norm": {"mean_level": "group", "group_size": 4}}
    pipeline, _ = wired(actor)
    sizes = [node.stage.group_size for node in pipeline.nodes if isinstance(node.stage, RowGroups)]
    assert sizes == [2, 4]
    assert find(pipeline, Units).reads != find(pipeline, AdvNorm).reads


def test_a_flag_raised_twice_is_one_flag_in_two_versions():
    pipeline, _ = wired(EVERYTHING)
    versions = [flag for flag in pipeline.flags if flag_name(flag) == "rows_outside_groups"]
    assert versions == ["flag:rows_outside_groups", "flag:rows_outside_groups.1"]


# ---- the graph ----


def test_edges_are_versions_from_writer_to_reader():
    edges = {(writer, reader, version) for writer, reader, version in SMALL.graph.edges(keys=True)}
    assert edges == {
        ("in", "Double", "a"),
        ("Double", "Split", "b"),
        ("Split", "Watch", "d"),
        ("Split", "out", "d"),
        ("Split", "out", "e"),
        ("Watch", "out", "flag:large"),
    }


def test_a_node_is_found_by_its_name():
    assert SMALL.node("Split") is SPLIT


# ---- what is absent or not configured ----


@pytest.mark.parametrize("channel", ["ref_logp", "values", "token_rewards"])
def test_a_channel_that_the_batch_does_not_carry_is_read_and_written_by_nothing(channel):
    def touched(pipeline):
        return {base(v) for node in pipeline.nodes for v in (*node.reads, *node.writes) if v}

    assert channel in touched(wired(EVERYTHING)[0])
    assert channel not in touched(wired(EVERYTHING, a_batch(channel))[0])


def test_without_token_rewards_no_process_shaping_is_wired():
    found = kinds(wired(EVERYTHING, a_batch("token_rewards"))[0])
    assert not found & {DirectRewards, FoldedRewards, Additive, GVPO, ProcessWeighted}


def test_a_stage_reads_none_where_an_optional_channel_is_absent():
    pipeline, _ = wired(EVERYTHING, a_batch("ref_logp"))
    reads = dict(zip(KLRewards.reads, find(pipeline, KLRewards).reads, strict=True))
    assert reads["ref_logp?"] is None and reads["logprobs"] is not None


def test_a_channel_that_a_stage_needs_is_missed_by_name():
    spec = load_config({"actor": {}})
    with pytest.raises(MissingChannel) as caught:
        wire(spec, resolve_spec(spec), frozenset(INPUTS) - {"rewards"}, "additive")
    assert "'rewards'" in str(caught.value)


def test_a_missing_channel_names_the_stage_and_its_place_in_the_config():
    wiring = Wiring(["lengths"], {})
    with pytest.raises(MissingChannel) as caught:
        wiring.add(AdvNorm())
    assert "AdvNorm reads 'advantages'" in str(caught.value) and caught.value.at == "actor.adv_norm"


@pytest.mark.parametrize(
    ("actor", "present", "absent"),
    [
        ({}, set(), {LengthPenalty, RewardNorm, AdvNorm, OutcomePlugin, ProximalLogprobs}),
        ({"reward_norm": {"mean_level": None, "std_level": None}}, set(), {RewardNorm, Units}),
        ({"adv_norm": {"mean_level": None, "std_level": None}}, {AdvNorm}, set()),
        ({"recompute_logprob": True}, {ProximalLogprobs}, set()),
        ({"recompute_logprob": True, "use_decoupled_loss": True}, set(), {ProximalLogprobs}),
        ({"token_rewards_as_adv": False}, {FoldedRewards}, {DirectRewards, Additive}),
        ({"gae_timestep_unit": "turn"}, {TurnGAE}, {TokenGAE}),
        ({"advantage": {"estimator": {"implementation": "turn_gae"}}}, {TurnGAE}, {TokenGAE}),
        ({}, {TokenGAE}, {TurnGAE, AlignTurnIds}),
        ({"overlong_reward_penalty": False, "overlong_tokens": 3}, set(), {LengthPenalty}),
    ],
)
def test_only_what_the_config_asks_for_is_wired(actor, present, absent):
    found = kinds(wired(actor)[0])
    assert present <= found and not absent & found


@pytest.mark.parametrize(
    ("mode", "choice", "kind"),
    [
        ("additive", "auto", Additive),
        ("gvpo", "auto", GVPO),
        ("process_weighted", "auto", ProcessWeighted),
        ("gvpo", "additive", Additive),
        ("additive", "gvpo", GVPO),
    ],
)
def test_process_shaping_follows_the_mode_unless_one_is_chosen(mode, choice, kind):
    actor = {"advantage": {"process_adv_shaping": {"implementation": choice}}}
    assert kinds(wired(actor, mode=mode)[0]) & {Additive, GVPO, ProcessWeighted} == {kind}


def test_explicit_gvpo_kwargs_are_numbers_of_the_stage_and_the_others_are_left_to_the_call():
    actor = {"advantage": {"process_adv_shaping": {"implementation": "gvpo", "kwargs": {"zero_eps": 0.5}}}}
    assert find(wired(actor)[0], GVPO).stage.numbers() == {
        "negative_scale": None,
        "zero_penalty": None,
        "zero_eps": 0.5,
    }


@pytest.mark.parametrize(
    ("actor", "kind"),
    [
        ({"advantage": plugin("outcome_reward_shaping", "see_outcome")}, OutcomePlugin),
        ({"advantage": plugin("estimator", "see_estimator")}, EstimatorPlugin),
        ({"advantage": plugin("process_adv_shaping", "see_process")}, ProcessPlugin),
        ({"gae_lambda": "tests.contracts.plugins_under_test.see_lambda"}, LambdaPlugin),
    ],
)
def test_a_users_function_is_a_stage_that_sees_exact_shapes(actor, kind):
    node = find(wired(actor)[0], kind)
    assert node.stage.opaque and "plugins_under_test" in str(node.stage)


def test_a_custom_process_function_is_wired_without_token_rewards():
    actor = {"advantage": plugin("process_adv_shaping", "see_process")}
    assert ProcessPlugin in kinds(wired(actor, a_batch("token_rewards"))[0])


def test_a_built_in_lambda_function_is_no_opaque_stage():
    actor = {"gae_lambda": "compiled_adv.gae.constant_gae_lambda", "gae_lambda_kwargs": {"value": 0.5}}
    assert not find(wired(actor)[0], LambdaByLength).stage.opaque


# ---- outputs ----

ALWAYS = ["advantages", "is_truncated", "kl_rewards", "logprobs", "loss_mask", "returns", "rewards", "tot_rewards"]


@pytest.mark.parametrize(
    ("actor", "without", "mopd", "extra"),
    [
        ({}, OPTIONAL, False, {"prox_logp"}),
        ({"use_decoupled_loss": True}, OPTIONAL, False, set()),
        ({}, (), False, {"prox_logp", "ref_logp"}),
        ({}, (), True, {"prox_logp", "ref_logp", "mopd_behavior_logprobs"}),
        ({"recompute_logprob": True}, (), True, {"prox_logp", "ref_logp", "mopd_behavior_logprobs"}),
    ],
)
def test_what_leaves_depends_on_config_and_batch(actor, without, mopd, extra):
    pipeline, _ = wired(actor, a_batch(*without), mopd=mopd)
    assert sorted(dict(pipeline.outputs)) == sorted({*ALWAYS, *extra})


# ---- strict rules ----

REPLACED = EVERYTHING | {"mask_no_eos_with_zero": True}


@pytest.mark.parametrize("kind", STRICT, ids=lambda kind: kind.__name__)
def test_strict_rules_put_another_stage_with_the_same_numbers_in_its_place(kind):
    default, strict = (find_all(rules, kind) for rules in ("default", "strict"))
    assert {type(stage) for stage in default} == {kind}
    assert {type(stage) for stage in strict} == {STRICT[kind]}
    assert [stage.numbers() for stage in default] == [stage.numbers() for stage in strict]


def find_all(rules, kind):
    pipeline, _ = wired(REPLACED | {"advantage": {"rules": rules}})
    return [node.stage for node in pipeline.nodes if isinstance(node.stage, kind)]


@pytest.mark.parametrize("kind", STRICT, ids=lambda kind: kind.__name__)
def test_a_replacement_reads_writes_and_flags_what_it_replaces_does(kind):
    other = STRICT[kind]
    assert issubclass(other, kind)
    assert (other.reads, other.writes, other.flags) == (kind.reads, kind.writes, kind.flags)


def test_default_rules_wire_no_replacement():
    assert not kinds(wired(REPLACED)[0]) & {*STRICT.values()}


# ---- equality ----


def test_the_same_config_wires_an_equal_pipeline():
    assert wired(EVERYTHING)[0] == wired(EVERYTHING)[0]


@pytest.mark.parametrize(
    "other", [{"discount": 0.5}, {"kl_ctl": 0.25}, {"reward_norm": None}, {"reward_clip": 1.0}, {"gae_lambda": 0.5}]
)
def test_another_number_wires_another_pipeline(other):
    assert wired(EVERYTHING)[0] != wired(EVERYTHING | other)[0]


def test_stages_with_equal_numbers_are_equal():
    assert Double(3.0) == Double(3.0) and hash(Double(3.0)) == hash(Double(3.0))
    assert Double(3.0) != Double(2.0)


def test_stages_of_different_classes_are_not_equal():
    assert Alignment() != STRICT[Alignment]()


def test_a_stage_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Double(3.0).factor = 2.0


def test_a_stage_prints_its_numbers():
    assert str(Double(3.0)) == "Double(factor=3.0)" and Double(3.0).numbers() == {"factor": 3.0}


def test_a_stage_without_forward_says_so():
    class Idle(Stage):
        pass

    with pytest.raises(NotImplementedError, match="Idle"):
        Idle().forward()


# ---- every stage's declaration ----

STAGES = all_stages()


def test_there_are_stages():
    assert {Alignment, TokenGAE, *STRICT.values()} <= {*STAGES}


@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_a_stage_comes_from_a_key_of_the_config(kind):
    if kind.slot and isinstance(kind.slot, str):  # a wrapper's slot is that of what it wraps
        actor, *path = kind.slot.split(".")
        assert actor == "actor"
        assert path[0] in Spec.model_fields
        assert len(path) == 1 or (path[0] == "advantage" and path[1] in Advantage.model_fields)


@pytest.mark.parametrize("kind", [k for k in STAGES if not k.opaque and k.reads], ids=lambda kind: kind.__name__)
def test_forward_takes_one_argument_for_each_read(kind):
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]
    if kind is BatchStats:  # zips them with its reads, strictly
        return
    if all(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):  # a check passes them on
        parameters = [*inspect.signature(kind.violations).parameters.values()][1:]
    if parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:  # a norm block passes the last of them on
        assert kind.reads[-len(LEVELS) :] == LEVELS
        parameters[-1:] = [*inspect.signature(levels).parameters.values()][1:]
    assert len(parameters) == len(kind.reads)


@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_a_stage_says_what_it_is_for(kind):
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")


def test_the_small_graph_is_what_these_tests_think():
    assert SMALL.nodes == (DOUBLE, SPLIT, WATCH) and isinstance(SPLIT.stage, Split)
