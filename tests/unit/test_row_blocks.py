"""How a Program is cut between stages that take each row by itself and stages that mix rows."""

import pytest

from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.program import StageModule, identifier, lower
from compiled_adv.stage import Stage
from tests.unit.wiring import DOUBLE, EVERYTHING, plugin, wired

CONFIGS = {
    "everything": EVERYTHING,
    "bare": {},
    "turn": {"gae_timestep_unit": "turn", "adv_norm": {"mean_level": "group", "std_level": "batch"}},
    "cut by functions": EVERYTHING
    | {"advantage": plugin("outcome_reward_shaping", "see_outcome") | plugin("process_adv_shaping", "see_process")},
}


def stages(segment) -> list[Stage]:
    if isinstance(segment.module, Node):
        return [segment.module.stage]
    return [child.stage for child in segment.module.children() if isinstance(child, StageModule)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_part_mixes_rows_in_all_of_its_stages_or_in_none(name):
    for segment in lower(wired(CONFIGS[name])[0], by_rows=True).segments:
        assert {stage.mixes_rows for stage in stages(segment)} == {not segment.by_rows}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_stage_is_in_one_part(name):
    pipeline, _ = wired(CONFIGS[name])
    found = [stage for segment in lower(pipeline, by_rows=True).segments for stage in stages(segment)]
    assert sorted(map(str, found)) == sorted(str(node.stage) for node in pipeline.nodes)


@pytest.mark.parametrize("name", CONFIGS)
def test_flags_are_looked_at_after_the_same_stages_as_without_the_cuts(name):
    pipeline, _ = wired(CONFIGS[name])
    together: list[set[str]] = [set()]
    for segment in lower(pipeline, by_rows=True).segments:
        together[-1] |= {*segment.flags}
        if segment.closes:
            together.append(set())
    assert together == [{*segment.flags} for segment in lower(pipeline).segments] + [set()]


def test_of_all_tokens_only_raw_advantages_pass_between_parts():
    pipeline, _ = wired(EVERYTHING)
    program = lower(pipeline, by_rows=True)
    leaving = {version for segment in program.segments for version in segment.outputs}
    between = leaving - {version for _, version in program.outputs}
    assert "advantages" in between
    assert not between & {"actions", "loss_mask.1", "outcome", "kl", "aligned_rewards", "direct"}


def test_a_stage_runs_in_the_part_of_its_readers_and_a_check_in_that_of_its_channel():
    class Mix(Stage):
        mixes_rows = True
        reads = ("x",)
        writes = ("y",)

    class Late(Stage):
        reads = ("b", "y")
        writes = ("z",)

    class Check(Stage):
        reads = ("b",)
        flags = ("bad",)

    late, check = Node("Late", Late(), ("b", "y"), ("z",)), Node("Check", Check(), ("b",), (), ("flag:bad",))
    pipeline = Pipeline((DOUBLE, check, Node("Mix", Mix(), ("x",), ("y",)), late), ("a", "x"), (("z", "z"),))
    parts = [[identifier(type(stage).__name__) for stage in stages(s)] for s in lower(pipeline, by_rows=True).segments]
    assert parts == [["Mix"], ["Double", "Check", "Late"]]
