"""Many ranks give what one process gives: same numbers, a fixed number of collectives, and errors on all of them."""

import itertools
import math
import random
import warnings
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import RolloutGroup, TrajBatchMeta
from compiled_adv.batch import widen
from compiled_adv.errors import InvalidValue
from tests.random_cases import Case, make_case
from tests.ranks.world import Call, Scenario, Seen, go

KEYS = {"values", "ref_logp", "is_truncated", "token_rewards"}
FAILING = "tests.ranks.failing."
MIXED = ("interpreted", "eager", "reference")
BATCH = {"mean_level": "batch", "std_level": "batch"}
GROUP = {"mean_level": "group", "std_level": "group"}


# ---- batches, and their parts ----


def a_case(actor: dict[str, Any], seed: int = 0, rows: int = 11, meta: str = "rollouts") -> Case:
    actor = {"discount": 0.99, "gae_lambda": 0.9, "mask_no_eos_with_zero": True} | actor
    case = make_case(random.Random(seed), {"actor": actor}, set(KEYS), "additive", (rows, 12), meta)
    case.batch["loss_mask"][:, 0] = 0  # so that another width is no other batch
    return case


def part(case: Case, rank: int, size: int) -> tuple[slice, tuple[Any, Any, Any] | None]:
    """A rank's rows, and its call; whole prompts. The second rank's batch is wider than the others'."""
    assert case.meta is not None
    sizes = case.meta.traj_group_sizes
    prompts = slice(len(sizes) * rank // size, len(sizes) * (rank + 1) // size)
    rows = slice(sum(sizes[: prompts.start]), sum(sizes[: prompts.stop]))
    if rows.start == rows.stop:
        return rows, None
    own, groups = sizes[prompts], case.meta.rollout_groups
    meta = TrajBatchMeta(len(own), own, [12] * len(own), groups and groups[prompts])
    batch = {key: x[rows] for key, x in case.batch.items()}
    return rows, (widen(batch, 17) if rank == 1 else batch, meta, case.call)


def parts(case: Case, size: int) -> Call:
    return Call(tuple(part(case, rank, size)[1] for rank in range(size)))


def whole(case: Case) -> Seen:
    """What one process computes."""
    compute = compiled_adv.build(case.on("eager"))
    with warnings.catch_warnings(action="ignore"):
        out = compute(case.batch, case.meta, **case.call)
    return Seen({k: x for k, x in out.items() if x is not case.batch.get(k)}, compute.last_warnings, None, ())


def assert_equal(case: Case, seen: list[Seen]) -> None:
    """Each rank's rows are those of the single process, warnings included."""
    want = whole(case)
    assert want.out is not None
    for rank, got in enumerate(seen):
        rows, given = part(case, rank, len(seen))
        assert got.error is None, got.error
        if given is None:
            continue
        assert got.out is not None and got.out.keys() == want.out.keys()
        for name, x in want.out.items():
            expected, found = x[rows].double(), got.out[name].double()
            found = found[:, :12] if found.ndim > 1 else found
            near = (found - expected).abs() <= 1e-5 * (1 + expected.abs())
            assert near.all(), (rank, name, found, expected)
        mine = {name: [b - rows.start for b in bs if rows.start <= b < rows.stop] for name, bs in want.warnings.items()}
        assert got.warnings == {name: bs for name, bs in mine.items() if bs}, rank


# ---- what the worlds go through ----

RULES = ("default", "strict", "strict", "default")  # each beside leave-one-out and without, unbiased and biased
LEVELS = (("batch", "batch"), ("batch", None), (None, "batch"), ("group", "batch"), ("batch", "group"))


def norm_configs() -> dict[str, dict[str, Any]]:
    """Every norm block with a batch level, in either place; the rule sets by turns."""
    found: dict[str, dict[str, Any]] = {}
    choices = itertools.product(("reward_norm", "adv_norm"), LEVELS, (False, True), (False, True))
    for (block, (mean, std), loo, unbiased), rules in zip(choices, itertools.cycle(RULES), strict=False):
        norm = {"mean_level": mean, "std_level": std, "mean_leave1out": loo, "std_unbiased": unbiased, "eps": 0.05}
        name = f"{block} {mean} {std} {'loo ' if loo else ''}{'un' if unbiased else ''}biased {rules}"
        found[name] = {block: norm, "advantage": {"rules": rules}}
    return found


NORMS = {name: a_case(actor, seed) for seed, (name, actor) in enumerate(norm_configs().items())}
BOTH = {"reward_norm": BATCH, "adv_norm": BATCH | {"eps": 0.05}}


def empty_rows(case: Case, *rows: int) -> Case:
    """The same with nothing generated in some rows."""
    for key in ("attention_mask", "loss_mask"):
        case.batch[key][list(rows)] = 0
    return case


def prompts(case: Case, *sizes: int) -> Case:
    """The same with prompts of these sizes, each row a rollout of its own."""
    meta = TrajBatchMeta(len(sizes), [*sizes], [12] * len(sizes), None)
    return Case(case.config, case.batch, meta, case.call)


def lone(rules: str) -> Case:
    """Leave-one-out over a batch in which one row alone counts under strict rules: the last one."""
    loo = BATCH | {"mean_leave1out": True}
    case = prompts(a_case({"reward_norm": loo, "advantage": {"rules": rules}}, 3, 5), 2, 1, 1, 1)
    case.batch["is_truncated"] = torch.tensor([True, True, True, True, False])
    return case


def offset(rewards: list[float], bias: float) -> Case:
    actor = {"reward_norm": BATCH, "reward_bias": bias, "reward_clip": math.inf, "mask_no_eos_with_zero": False}
    case = prompts(a_case(actor, 5, len(rewards)), *[1] * len(rewards))
    case.batch["rewards"] = torch.tensor(rewards)
    case.batch["attention_mask"][:] = 1
    case.batch["loss_mask"][:, 1:] = 1
    return case


EDGES = {
    "several prompts have no token": empty_rows(prompts(a_case(BOTH, 1), 3, 3, 3, 2), 0, 1, 2, 6, 7, 8),
    "no rank has a token": empty_rows(prompts(a_case(BOTH, 2), 3, 3, 3, 2), *range(11)),
    "fewer prompts than ranks": prompts(a_case(BOTH, 4, 5), 5),
    "one row each": prompts(a_case(BOTH, 6, 4), 1, 1, 1, 1),
    "one member, default rules": lone("default"),
    "one member, strict rules": lone("strict"),
    "equal rewards": offset([0.75] * 8, 0.0),
    "far from zero": offset([0.25, 0.5, 1.0, 0.0, 0.75, 1.25, 0.5, 0.25], 1e8),
    "ranks far apart": offset([1e6, 1e6 + 1, -1e6, -1e6 + 2, 0.0, 0.25, 1e6, -1e6], 0.0),
    "groups alone": a_case({"reward_norm": GROUP, "adv_norm": GROUP | {"eps": 0.05}}, 8),
    "no levels": a_case({"adv_norm": {"mean_level": None, "std_level": None}}, 9),
    "turns": a_case(BOTH | {"gae_timestep_unit": "turn"}, 10),
    "a length penalty": a_case(
        BOTH
        | {"overlong_reward_penalty": True, "overlong_tokens": 3, "overlong_penalty_factor": 0.5, "max_new_tokens": 4},
        11,
    ),
}
CASES = NORMS | EDGES


def spoilt(case: Case, size: int, **change: Any) -> Call:
    """The last rank's batch with something wrong: a key without numbers, or with other ones, in turns along a row."""
    *others, (batch, meta, call) = parts(case, size).ranks
    batch = {key: x.clone() for key, x in batch.items()}
    for key, wrong in change.items():
        if wrong is None:
            del batch[key]
            continue
        wrong = wrong if isinstance(wrong, list) else [wrong]
        for i, x in enumerate(wrong):
            batch[key][..., i :: len(wrong)] = x
    return Call((*others, (batch, meta, call)))


ERRORS = {
    "a key is missing": ({"logprobs": None}, "MissingKey"),
    "a logprob is not finite": ({"logprobs": math.nan}, "NonFinite"),
    "a reward is not finite": ({"rewards": math.inf}, "NonFinite"),
    "advantages overflow": ({"values": [3e38, -3e38]}, "NonFinite"),
    "a mask is no prefix": ({"attention_mask": False}, "BadMask"),
}
PLUGINS = {
    "outcome": ({"outcome_reward_shaping": FAILING + "outcome"}, "rewards"),
    "estimator": ({"estimator": FAILING + "estimator"}, "values"),
    "process": ({"process_adv_shaping": FAILING + "process"}, "token_rewards"),
    "compute": ({"compute": FAILING + "compute"}, "rewards"),
}
GOOD = prompts(a_case(BOTH, 20), 3, 3, 3, 2)
GOOD.batch["attention_mask"][:] = 1
GOOD.batch["loss_mask"][:, 1:11] = 1


def with_plugin(choice: dict[str, str]) -> Case:
    block = {slot: {"implementation": path} for slot, path in choice.items()}
    return Case({"actor": GOOD.config["actor"] | {"advantage": block}}, GOOD.batch, GOOD.meta, GOOD.call)


def errors(size: int) -> list[Scenario]:
    """Each kind of error on the last rank, between two good calls."""
    good = parts(GOOD, size)
    found = []
    for name, (change, _) in ERRORS.items():
        calls = (good, spoilt(GOOD, size, **change), good)
        found += [Scenario(f"{name}: {b}", GOOD.config["actor"], calls, (b,)) for b in MIXED]
    for name, (choice, key) in PLUGINS.items():
        case = with_plugin(choice)
        calls = (good, spoilt(case, size, **{key: -2000.0}), good)
        found.append(Scenario(f"plugin {name}", case.config["actor"], calls, ("interpreted", "eager")))
    *others, (batch, meta, _) = good.ranks
    for name, last in {
        "a call's value": (batch, meta, {"advantage_shaping_mode": "nonsense"}),
        "no batch": (None, meta, {}),
        "prompts that do not fit": ([{}],),
    }.items():
        found.append(Scenario(name, GOOD.config["actor"], (good, Call((*others, last)), good), ("interpreted",)))
    return found


def equal(size: int, every: int, backends: tuple[str, ...]) -> list[Scenario]:
    names = [*itertools.islice(NORMS, size % every, None, every), *EDGES]
    return [Scenario(name, CASES[name].config["actor"], (parts(CASES[name], size),), backends) for name in names]


def states() -> list[Scenario]:
    """Two ranks in different states: kinds of channels, buckets, compiled or not, first or later batches."""
    case, other = GOOD, prompts(a_case(BOTH, 21, 4), 2, 2)
    (first, second), (few, many) = parts(case, 2).ranks, parts(other, 2).ranks
    no_values = {key: x for key, x in few[0].items() if key not in ("values", "ref_logp")}
    calls = (Call((first, second)), Call(((no_values, *few[1:]), second)), Call((first, many)), Call((first, second)))
    actor = case.config["actor"]
    plugged = with_plugin(PLUGINS["estimator"][0]).config["actor"]
    shadowed = actor | {"advantage": {"shadow": {"against": "reference", "every": 1}}}
    exact = {"buckets": {"rows": [4, 8, 16], "tokens": [16, 32]}, "verify_steps": 2}
    return [
        Scenario("states", actor, calls, ("interpreted",), exact),
        Scenario("states, a plugin", plugged, calls, ("interpreted",), exact),
        Scenario("states, a shadow", shadowed, calls, ("interpreted", "eager"), exact),
        Scenario("states, one is warm", actor, calls, ("interpreted",), exact, warm=True),
        Scenario("measured", actor | {"advantage": {"stats": True}}, calls[:1], ("interpreted", "eager")),
        Scenario("no group", actor, calls[:1], ("eager",), group="none"),
        Scenario(
            "compiled", actor, calls[:1] * 2, ("compiled", "eager"), exact | {"buckets": {"rows": [8], "tokens": [32]}}
        ),
        Scenario("late", actor, (calls[0], Call((first, "late"))), ("eager",), group="impatient"),
        Scenario("dead", actor, (calls[0], Call((first, "die"))), ("eager",)),  # last: what follows has no second rank
    ]


def halves() -> list[Scenario]:
    one, two = a_case(BOTH, 30), a_case(BOTH, 31)
    (a, b), (c, d) = parts(one, 2).ranks, parts(two, 2).ranks
    return [Scenario("halves", one.config["actor"], (Call((a, b, c, d)),), ("eager",), group="halves")]


World = list[dict[str, list[Seen]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> World:
    return go(2, equal(2, 5, ("eager", "interpreted")) + states(), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> World:
    return go(3, equal(3, 1, ("eager",)) + errors(3), tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> World:
    return go(4, equal(4, 7, MIXED) + halves(), tmp_path_factory.mktemp("four"))


def of(world: World, name: str, call: int = 0) -> list[Seen]:
    """What each rank saw of one call."""
    return [rank[name][call] for rank in world]


# ---- equal to one process ----


@pytest.mark.parametrize("name", CASES)
def test_three_ranks_give_what_one_process_gives(three: World, name: str):
    assert_equal(CASES[name], of(three, name))


@pytest.mark.parametrize("size", [2, 4])
def test_so_do_two_and_four_whatever_backend_each_of_them_has(two: World, four: World, size: int):
    world = {2: two, 4: four}[size]
    for name in [name for name in CASES if name in world[0]]:
        assert_equal(CASES[name], of(world, name))


def test_a_group_of_some_ranks_is_a_world_of_its_own(four: World):
    seen = of(four, "halves")
    assert_equal(a_case(BOTH, 30), seen[:2])
    assert_equal(a_case(BOTH, 31), seen[2:])


def test_a_compiled_rank_beside_an_eager_one(two: World):
    for call in range(2):
        assert_equal(GOOD, of(two, "compiled", call))


def test_statistics_far_from_zero_lose_nothing(three: World):
    near, far = offset([0.25, 0.5, 1.0, 0.0, 0.75, 1.25, 0.5, 0.25], 0.0), of(three, "far from zero")
    expected = whole(near).out
    assert expected is not None
    for rank, seen in enumerate(far):
        assert seen.out is not None
        want, got = expected["tot_rewards"][part(near, rank, 3)[0]], seen.out["tot_rewards"][:, :12]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_each_rank_measures_its_own_rows(two: World):
    for rank, seen in enumerate(of(two, "measured")):
        assert seen.out is not None
        active_BT = seen.out["loss_mask"] != 0
        x, rows = seen.out["advantages"][active_BT].double(), part(GOOD, rank, 2)[0]
        expected = {
            "rows": rows.stop - rows.start,
            "tokens": len(x),
            "reward/mean": GOOD.batch["rewards"][rows].double().mean(),
            "advantage/mean": x.mean(),
            "advantage/std": x.std(correction=0),
            "advantage/max": x.max(),
        }
        found = {name: seen.stats[name] for name in expected}
        assert found == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-6, abs=1e-6), rank


# ---- collectives ----


def points(case: Case) -> int:
    blocks = (case.config["actor"].get(block) or {} for block in ("reward_norm", "adv_norm"))
    return sum("batch" in (norm.get("mean_level", ""), norm.get("std_level", "")) for norm in blocks)


@pytest.mark.parametrize("name", [*itertools.islice(NORMS, 0, None, 3), *EDGES])
def test_one_all_reduce_for_each_block_with_a_batch_level_and_one_status(three: World, name: str):
    for seen in of(three, name):
        assert seen.collectives == ("all_reduce",) * points(CASES[name]) + ("all_gather",)


@pytest.mark.parametrize("name", [s.name for s in states() if s.name.startswith("states")])
def test_states_of_ranks_change_no_collective_and_warming_up_has_none(two: World, name: str):
    for rank in two:
        assert [seen.collectives for seen in rank[name]] == [("all_reduce", "all_reduce", "all_gather")] * 4
        assert all(seen.error is None for seen in rank[name])


def test_without_a_group_there_are_no_collectives(two: World):
    assert all(seen.collectives == () for seen in of(two, "no group"))


# ---- errors ----

BAD = {f"{name}: {b}": error for name, (_, error) in ERRORS.items() for b in MIXED}
BAD |= {f"plugin {name}": "PluginRaised" for name in PLUGINS}
BAD |= {"a call's value": "CallError", "no batch": "WrongType", "prompts that do not fit": "EmptyBatch"}


@pytest.mark.parametrize("name", BAD)
def test_an_error_on_one_rank_is_an_error_on_all(three: World, name: str):
    first, second, bad = of(three, name, 1)
    assert bad.error is not None and bad.error[0] == BAD[name], bad
    for seen in (first, second):
        assert seen.error is not None and seen.error[0] == "RankFailed"
        assert "rank 2" in seen.error[1] and BAD[name] in seen.error[1]
    assert first.collectives == second.collectives == bad.collectives


@pytest.mark.parametrize("name", BAD)
def test_the_next_good_call_works(three: World, name: str):
    for before, after in zip(of(three, name, 0), of(three, name, 2), strict=True):
        assert before.error is None and after.error is None
        torch.testing.assert_close(after.out, before.out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["late", "dead"])
def test_a_rank_that_does_not_come_is_an_error(two: World, name: str):
    good, bad = two[0][name]
    assert good.error is None
    assert bad.error is not None and bad.error[0] == "RanksLost"


# ---- build ----


@pytest.mark.parametrize("group", ["world", "all", 3])
def test_a_group_that_is_none_is_refused_at_build(group: Any):
    with pytest.raises(InvalidValue):
        compiled_adv.build("default", reduce_group=group)


def test_rollout_groups_are_cut_at_prompts():
    case = a_case(BOTH)
    assert case.meta is not None and any(isinstance(group, RolloutGroup) for group in case.meta.rollout_groups or ())
