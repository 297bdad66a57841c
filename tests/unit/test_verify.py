"""The legal graph: each property broken on purpose, and found by its own error."""

from dataclasses import replace

import pytest

from compiled_adv.errors import Cycle, DoubleWrite, GraphError, MissingChannel, UnusedStage
from compiled_adv.pipeline import Node
from compiled_adv.verify import LEGAL, verify
from tests.unit.wiring import DOUBLE, EVERYTHING, SMALL, SPLIT, WATCH, Double, Split, Watch, wired


def with_nodes(*nodes, **changes):
    return replace(SMALL, nodes=nodes, **changes)


def test_a_legal_pipeline_comes_back_itself():
    assert verify(SMALL) is SMALL


@pytest.mark.parametrize("rules", ["default", "strict"])
def test_the_default_computation_is_legal(rules):
    verify(wired(EVERYTHING | {"advantage": {"rules": rules}})[0])


# (what is broken, Pipeline, error, words)
BROKEN = {
    "every_read_is_written: a stage": (
        with_nodes(replace(DOUBLE, reads=("x",)), SPLIT, WATCH),
        MissingChannel,
        ["Double", "'x'"],
    ),
    "every_read_is_written: its writer is gone": (with_nodes(SPLIT, WATCH), MissingChannel, ["Split", "'b'"]),
    "every_read_is_written: an output": (
        replace(SMALL, outputs=(*SMALL.outputs, ("z", "z.3"))),
        MissingChannel,
        ["output 'z'", "'z.3'"],
    ),
    "each_version_is_written_once: two stages": (
        with_nodes(DOUBLE, SPLIT, WATCH, Node("Double.1", Double(), ("a",), ("b",))),
        DoubleWrite,
        ["'b'", "Double, Double.1"],
    ),
    "each_version_is_written_once: an input": (
        with_nodes(DOUBLE, SPLIT, WATCH, inputs=("a", "b")),
        DoubleWrite,
        ["'b'"],
    ),
    "each_version_is_written_once: one stage": (
        with_nodes(DOUBLE, replace(SPLIT, writes=("d", "d")), WATCH, outputs=(("d", "d"),)),
        DoubleWrite,
        ["'d'"],
    ),
    "each_version_is_written_once: a flag": (
        with_nodes(DOUBLE, SPLIT, WATCH, Node("Watch.1", Watch(), ("e",), (), ("flag:large",))),
        DoubleWrite,
        ["flag:large"],
    ),
    "names_are_unique": (
        with_nodes(
            DOUBLE, SPLIT, WATCH, Node("Double", Double(), ("e",), ("f",)), outputs=(*SMALL.outputs, ("f", "f"))
        ),
        DoubleWrite,
        ["'Double'"],
    ),
    "nothing_waits_for_itself: two stages": (
        with_nodes(replace(DOUBLE, reads=("e",)), SPLIT, WATCH),
        Cycle,
        ["Double", "Split"],
    ),
    "nothing_waits_for_itself: one stage": (with_nodes(replace(DOUBLE, reads=("b",)), SPLIT, WATCH), Cycle, ["Double"]),
    "every_stage_is_used": (
        with_nodes(DOUBLE, SPLIT, WATCH, Node("Double.1", Double(), ("e",), ("f",))),
        UnusedStage,
        ["Double.1", "writes f"],
    ),
    "every_stage_is_used: only by an unused one": (
        with_nodes(
            DOUBLE, SPLIT, WATCH, Node("Double.1", Double(), ("e",), ("f",)), Node("Double.2", Double(), ("f",), ("g",))
        ),
        UnusedStage,
        ["Double.1"],
    ),
    "arity_fits: reads": (with_nodes(DOUBLE, replace(SPLIT, reads=("b",)), WATCH), GraphError, ["Split", "(1, 2, 0)"]),
    "arity_fits: writes": (
        with_nodes(DOUBLE, replace(SPLIT, writes=("d",)), WATCH, outputs=(("d", "d"),)),
        GraphError,
        ["Split", "(2, 1, 0)"],
    ),
    "arity_fits: flags": (with_nodes(DOUBLE, SPLIT, replace(WATCH, flags=())), GraphError, ["Watch", "(1, 0, 0)"]),
    "arity_fits: a required read is None": (
        with_nodes(replace(DOUBLE, reads=(None,)), SPLIT, WATCH),
        MissingChannel,
        ["Double", "'a'"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_property_is_named(name):
    pipeline, error, words = BROKEN[name]
    with pytest.raises(GraphError) as caught:
        verify(pipeline)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pipeline_breaks_the_property_that_it_is_named_for(name):
    holds = {each.__name__: each for each, _ in LEGAL}[name.split(":")[0]]
    with pytest.raises(GraphError):
        holds(BROKEN[name][0])


def test_every_property_is_broken_somewhere():
    assert {name.split(":")[0] for name in BROKEN} == {holds.__name__ for holds, _ in LEGAL}


def test_every_property_has_its_reason():
    assert all(why for _, why in LEGAL)


def test_an_optional_read_may_be_none():
    assert SPLIT.reads[1] is None and isinstance(SPLIT.stage, Split)
    verify(SMALL)


def test_a_stage_that_only_flags_is_used():
    verify(with_nodes(DOUBLE, SPLIT, WATCH, outputs=(("e", "e"),)))


def test_the_error_says_where_in_the_config_the_stage_comes_from():
    pipeline, _ = wired(EVERYTHING)
    lone = replace(pipeline, outputs=tuple(pair for pair in pipeline.outputs if pair[0] != "logprobs"))
    first = next(node for node in lone.nodes if node.stage.slot == "actor.adv_norm")
    broken = replace(
        lone, nodes=tuple(replace(n, reads=("x",) * len(n.reads)) if n is first else n for n in lone.nodes)
    )
    with pytest.raises(MissingChannel) as caught:
        verify(broken)
    assert caught.value.at == "actor.adv_norm"
