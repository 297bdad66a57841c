"""The runner of passes: patterns, verification, fuel, settling, the log; and the configuration that chooses passes."""

import json
from dataclasses import replace

import pytest
from compiled_adv.passes import DEFAULT
from hypothesis import given

import compiled_adv
from compiled_adv import passes as our_passes
from compiled_adv.errors import DoubleWrite, GraphError, MissingChannel, PluginNotFound, UnknownName
from compiled_adv.pipeline import Node, Pipeline
from compiled_adv.rewrite import P, Pass, Rewrite, fuse, rewrite
from compiled_adv.stages.estimator import TokenGAE
from compiled_adv.stages.kl_rewards import KLInAdvantage, KLRewards
from tests.passes import users
from tests.passes.rewriting import SETTINGS, assert_same_numbers, of_case, ran, run_on
from tests.random_cases import Case, cases
from tests.unit.wiring import DOUBLE, EVERYTHING, SMALL, SPLIT, WATCH, Double, Split, Watch, a_batch, kinds, wired

USERS = "tests.passes.users."
GRPO = {"kl_ctl": 0.0, "reward_norm": {"mean_level": "group", "std_level": "group", "group_size": 2}}


def on(**compiled: object) -> dict:
    """The GRPO configuration with these settings of the compiled backend."""
    return {"actor": GRPO | {"advantage": {"compiled": compiled}}}


# ---- patterns ----


def places(pattern, pipeline: Pipeline = SMALL) -> list[str]:
    return [" ".join(node.name for node in nodes) for nodes in pattern.matches(pipeline)]


def test_a_pattern_is_a_chain_of_classes_each_reading_what_the_one_before_writes():
    assert places(P(Double) >> P(Split) >> P(Watch)) == ["Double Split Watch"]


def test_a_pattern_does_not_match_against_the_direction():
    assert places(P(Split) >> P(Double)) == []


def test_a_pattern_does_not_match_what_only_comes_later():
    assert places(P(Double) >> P(Watch)) == []


def test_a_pattern_matches_every_place():
    other = Node("Other", Watch(), ("e",), (), ("flag:other",))
    assert places(P(Split) >> P(Watch), replace(SMALL, nodes=(*SMALL.nodes, other))) == ["Split Watch", "Split Other"]


def test_a_pattern_of_a_class_matches_its_subclasses():
    from compiled_adv.stage import Stage

    assert places(P(Stage)) == ["Double", "Split", "Watch"]


def test_two_channels_between_two_stages_are_one_match():
    both = Node("Split.1", Split(), ("d", "e"), ("f", "g"))
    pipeline = Pipeline((DOUBLE, SPLIT, both), ("a",), (("f", "f"), ("g", "g")))
    assert places(P(Split) >> P(Split), pipeline) == ["Split Split.1"]


def test_a_pattern_prints_its_chain():
    assert str(P(Double) >> P(Split)) == "Double >> Split"


# ---- what a rewrite does to a Pipeline ----


def test_a_rename_reaches_readers_and_outputs():
    changed = Rewrite((), (), (("d", "e"),)).applied(SMALL)
    assert changed.node("Watch").reads == ("e",)
    assert changed.outputs == (("d", "e"), ("e", "e"))


def test_a_version_renamed_to_none_is_absent_for_its_readers():
    pipeline = Pipeline((DOUBLE, replace(SPLIT, reads=("b", "c")), WATCH), ("a", "c"), (("d", "d"), ("e", "e")))
    assert Rewrite((), (), (("c", None),)).applied(pipeline).node("Split").reads == ("b", None)


def test_what_nothing_needs_any_longer_goes_too():
    lone = Node("Lone", Double(), ("a",), ("unread",))
    assert Rewrite().applied(replace(SMALL, nodes=(*SMALL.nodes, lone))).nodes == SMALL.nodes


def test_a_fused_node_keeps_inside_what_nobody_else_reads():
    (node,) = fuse(SMALL, DOUBLE, SPLIT).add
    assert node.reads == ("a",) and node.writes == ("d", "e")


def test_a_fused_node_gives_what_others_read_and_every_flag():
    (node,) = fuse(SMALL, SPLIT, WATCH).add
    assert node.reads == ("b",) and node.writes == ("d", "e") and node.flags == ("flag:large",)


# ---- the runner ----


@pytest.mark.parametrize("each", DEFAULT, ids=lambda each: each.name)
def test_every_pass_of_ours_is_exact_and_says_what_it_is_for(each: Pass):
    assert each.numerics == "exact" and each.why and each.rules


def test_the_order_of_our_passes_stands_in_one_place():
    assert [each.name for each in DEFAULT] == [
        "drop_idle",
        "share",
        "broadcast_outcome",
        "fuse_reward_norm",
        "fuse_advantages",
        "one_check",
    ]
    assert our_passes.DEFAULT is DEFAULT


@SETTINGS
@given(cases())
def test_all_passes_together_keep_every_number(case: Case):
    pipeline, admitted = of_case(case)
    found = ran(pipeline, *DEFAULT)
    assert found.fired
    assert_same_numbers(found, admitted)


@SETTINGS
@given(cases())
def test_all_passes_together_settle(case: Case):
    pipeline, _ = of_case(case)
    after = ran(pipeline, *DEFAULT).after
    again = ran(after, *DEFAULT)
    assert again.after == after


@pytest.mark.parametrize(
    "each, error, words",
    [
        (users.breaks, MissingChannel, ("after pass 'breaks'", "'lengths', which nothing writes")),
        (users.doubles, DoubleWrite, ("after pass 'doubles'", "scores")),
        (users.loses_a_flag, GraphError, ("pass 'loses_a_flag' lost", "outcome_on_masked_token")),
        (users.loses_an_output, GraphError, ("pass 'loses_an_output' lost", "tot_rewards")),
        (users.never_settles, GraphError, ("pass 'never_settles' does not settle", "undo each other")),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_pass_that_breaks_the_graph_is_named(each: Pass, error, words):
    with pytest.raises(GraphError) as caught:
        run_on({}, each)
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_pipeline_that_is_broken_before_the_first_pass_is_refused():
    pipeline, _ = wired({})
    with pytest.raises(MissingChannel):
        rewrite(replace(pipeline, inputs=pipeline.inputs[1:]), DEFAULT)


@pytest.mark.parametrize("fuel", [0, 1, 2, 3])
def test_fuel_stops_after_so_many_rewrites(fuel: int):
    pipeline, _ = wired(EVERYTHING, a_batch())
    _, log = rewrite(pipeline, DEFAULT, fuel=fuel)
    assert log.rewrites == fuel
    assert any(entry.what == f"out of fuel after {fuel} rewrites" for entry in log.entries)


def test_fuel_finds_the_rewrites_one_by_one():
    pipeline, _ = wired(GRPO, a_batch("values"))
    whole = rewrite(pipeline, DEFAULT)[1]
    steps = [rewrite(pipeline, DEFAULT, fuel=n)[1].entries for n in range(1, whole.rewrites + 1)]
    done = [[entry for entry in entries if entry.done] for entries in steps]
    assert done[-1] == [entry for entry in whole.entries if entry.done]
    assert all(later[:-1] == earlier for earlier, later in zip(done, done[1:], strict=False))


def test_no_fuel_leaves_the_graph_as_wired():
    pipeline, _ = wired(EVERYTHING)
    assert rewrite(pipeline, DEFAULT, fuel=0)[0] == pipeline


def test_enough_fuel_changes_nothing():
    pipeline, _ = wired(EVERYTHING)
    assert rewrite(pipeline, DEFAULT, fuel=1000)[0] == rewrite(pipeline, DEFAULT)[0]


def test_a_pass_that_may_round_differently_is_off_unless_asked_for():
    pipeline, _ = wired({})
    after, log = rewrite(pipeline, [users.rounds])
    assert after == pipeline
    assert [entry.what for entry in log.entries] == ["numerics: close is not asked for"]
    assert users.SameScore in kinds(rewrite(pipeline, [users.rounds], numerics="close")[0])


# ---- the log ----


def test_the_log_says_what_was_done_where_and_by_which_rule():
    log = run_on({"kl_ctl": 0.0}, *DEFAULT).log
    entry = next(entry for entry in log.entries if entry.done)
    assert (entry.name, entry.place) == ("drop_idle", "KLRewards")
    assert entry.what == "-> NoKLRewards()"
    file, line = entry.source.split(":")
    source = open(our_passes.__path__[0] + "/" + file).read().splitlines()
    assert source[int(line) - 1].startswith("def no_kl(")


def test_the_log_says_what_held_back_and_why():
    log = run_on({"kl_ctl": 0.5}, *DEFAULT).log
    held = [entry for entry in log.entries if not entry.done]
    assert ("broadcast_outcome", "KL is in the recurrence") in [(entry.name, entry.what) for entry in held]
    assert all(entry.place and entry.what and entry.source.endswith(tuple("0123456789")) for entry in held)


def test_a_reason_is_given_once_however_often_a_pass_ran():
    held = [entry for entry in run_on(EVERYTHING, *DEFAULT).log.entries if not entry.done]
    assert len(held) == len(set(held))


def test_the_log_keeps_the_pipeline_as_wired_and_after_each_pass_that_changed_it():
    found = run_on(GRPO, *DEFAULT)
    titles = [title for title, _ in found.log.snapshots]
    assert titles[0] == "wired" and found.log.snapshots[0][1] == found.before
    assert found.log.snapshots[-1][1] == found.after
    changed = {entry.name for entry in found.log.entries if entry.done}
    assert set(titles[1:]) == changed


def test_the_log_has_the_seconds_of_every_pass():
    assert list(run_on({}, *DEFAULT).log.seconds) == [each.name for each in DEFAULT]


# ---- the configuration ----


def names(config: dict) -> list[str]:
    return [each.name for each in compiled_adv.build(config)._passes]


def test_without_a_word_all_our_passes_run():
    assert names(on()) == [each.name for each in DEFAULT]


def test_named_passes_run_in_the_order_given():
    assert names(on(passes=["one_check", "drop_idle"])) == ["one_check", "drop_idle"]


def test_no_passes_leave_the_graph_as_wired():
    text = compiled_adv.build(on(passes=[])).explain()
    assert "rewritten" not in text and "wired:" in text


def test_a_users_pass_joins_by_its_path():
    compute = compiled_adv.build(on(passes=["drop_idle", USERS + "honest"]))
    facts = compute.explain(format="json")
    assert [pipeline["after"] for pipeline in facts["pipelines"]] == ["wired", "drop_idle", "honest"]
    assert "SameScore" in compute.explain()


def test_a_mistyped_pass_is_an_error_with_the_nearest_name():
    with pytest.raises(UnknownName) as caught:
        compiled_adv.build(on(passes=["drop_idel"]))
    assert caught.value.hint is not None and caught.value.hint.startswith("drop_idle")
    assert caught.value.at == "actor.advantage.compiled.passes"


@pytest.mark.parametrize(
    "path, words",
    [
        (USERS + "honset", ("no 'honset'", "honest")),
        ("tests.passes.nowhere.honest", ("tests.passes.nowhere",)),
        (USERS + "not_a_pass", ("no Pass",)),
    ],
)
def test_a_wrong_path_to_a_pass_is_an_error_that_names_it(path, words):
    with pytest.raises(PluginNotFound) as caught:
        compiled_adv.build(on(passes=[path]))
    assert all(word in str(caught.value) for word in (*words, path)), str(caught.value)


def test_fuel_and_numerics_are_settings():
    compute = compiled_adv.build(on(passes=[USERS + "rounds"], numerics="close"))
    assert "SameScore" in compute.explain()
    facts = compiled_adv.build(on(fuel=1)).explain(format="json")
    assert sum(entry["done"] for entry in facts["rewrites"]) == 1


# ---- explain ----


def test_explain_shows_the_graph_before_after_and_what_held_back():
    text = compiled_adv.build(on()).explain(channels=("values",))
    titles = [line for line in text.splitlines() if line.endswith("stages")]
    assert titles[0].startswith("wired: ") and titles[1].startswith("drop_idle: ")
    rewritten, held = text.split("\nrewritten\n")[1].split("\nheld back\n")
    assert "  drop_idle: KLRewards -> NoKLRewards()  drop_idle.py:" in rewritten
    assert "a critic is in the recurrence  broadcast_outcome.py:" in held


def test_explain_shows_the_program_as_python_that_runs():
    text = compiled_adv.build(on()).explain()
    source = text.split("\nprogram\n")[1]
    scope: dict = {}
    exec(compile("import torch\n" + source.replace("# segment 0: ", "", 1), "program", "exec"), scope)
    assert callable(scope["forward"])


def test_explain_as_facts_is_json_with_the_same_content():
    facts = json.loads(json.dumps(compiled_adv.build(on()).explain(format="json")))
    assert facts.keys() == {"pipelines", "rewrites", "functions", "program"}
    wired_, last = facts["pipelines"][0], facts["pipelines"][-1]
    stages = [stage["stage"] for stage in wired_["stages"]]
    assert str(KLRewards(0.0, "k1")) in stages and str(KLInAdvantage()) in stages and str(TokenGAE(1.0)) in stages
    assert len(last["stages"]) < len(wired_["stages"])
    assert wired_["outputs"].keys() == last["outputs"].keys()
    assert all({"name", "place", "what", "source", "done"} == entry.keys() for entry in facts["rewrites"])


def test_explain_shows_what_held_back_in_the_facts():
    facts = compiled_adv.build({"actor": {"kl_ctl": 1.0}}).explain(format="json")
    held = {entry["name"]: entry["what"] for entry in facts["rewrites"] if not entry["done"]}
    assert held["broadcast_outcome"] == "KL is in the recurrence"


def test_explain_of_a_call_mode_shows_its_shaping():
    compute = compiled_adv.build({"actor": {}})
    assert "GVPO(" in compute.explain(mode="gvpo") and "Additive(" in compute.explain(mode="additive")


def test_explain_shows_a_users_function_between_two_segments():
    stage = {"implementation": "tests.contracts.plugins_under_test.see_process"}
    text = compiled_adv.build({"actor": {"advantage": {"process_adv_shaping": stage}}}).explain()
    assert "# segment 0: " in text and "# segment 2: " in text
    assert "see_process" in text.split("# segment 1: ")[1].splitlines()[0]


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_command_prints_the_same(format: str, tmp_path):
    from typer.testing import CliRunner

    from compiled_adv.cli import app

    config = tmp_path / "grpo.json"
    config.write_text(json.dumps(on()))
    result = CliRunner().invoke(app, ["explain", "--config", str(config), "--format", format])
    assert result.exit_code == 0
    expected = compiled_adv.build(str(config)).explain(format=format)
    assert (json.loads(result.output) if format == "json" else result.output.removesuffix("\n")) == expected
