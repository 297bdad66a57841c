"""Cases behind public bug reports (tests/known_faults/cases.json) whose fault lies in compiling.

Each runs on the compiled backend, and asserts that what the faulty code gave does not come out.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_adv
from compiled_adv.errors import OutOfRange
from compiled_adv.inductor import graphs_captured
from tests.compiled.shared import TURNS, assert_right, assert_same, built, case_of, configured, expected, run, together
from tests.contracts.small import rows
from tests.random_cases import FIXED, Template

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "known_faults" / "cases.json").read_text())["cases"]
}
PLAIN = {"kl_ctl": 0.0}
WEIGHTED = FIXED[8]

pytestmark = pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")


def aligned(inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A case's slots as rows behind a prompt token: the reward of its last slot is the outcome."""
    mask = inputs["mask"]
    values = [[*row, last] for row, last in zip(inputs["values"], inputs.get("bootstrap") or [0.0], strict=True)]
    batch = rows(*("p" + "".join("pg"[on] for on in row) for row in mask), values=values, **more)
    return batch | {
        "rewards": torch.tensor([float(row[-1]) for row in inputs["rewards"]]),
        "is_truncated": torch.tensor(inputs.get("truncated") or [False] * len(mask)),
    }


def advantages(compute: compiled_adv.Compute, batch: dict[str, Any], **call: Any) -> Tensor:
    """At the case's slots."""
    return compute(batch, **call)["advantages"][:, :-1]


def near(got: Tensor, want: Any, atol: float = 1e-6) -> bool:
    return torch.allclose(got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=atol)


# ---- BR-035: outputs ----


def test_br_035_a_result_stays_what_it_was_when_others_are_computed() -> None:
    case = CASES["BR-035"]
    first, second = (aligned(case["inputs"][name]) for name in ("call1", "call2"))
    want = case["expect"]["fields"]
    compute = built(configured(PLAIN))
    kept = advantages(compute, first)
    for _ in range(3):
        assert near(advantages(compute, second), want["call2"])
    assert near(kept, want["call1"])


def test_br_035_results_of_different_calls_lie_at_different_places() -> None:
    compute, batch = built(configured(PLAIN)), aligned(CASES["BR-035"]["inputs"]["call1"])
    results = [compute(batch) for _ in range(4)]
    places = [out[key].data_ptr() for out in results for key in out if out[key] is not batch.get(key)]
    assert len(set(places)) == len(places) > 4


# ---- BR-037: numbers that change ----


def scaled_and_filled(x: Tensor, fail: Tensor, p: float) -> Tensor:
    y = x * p
    return y.masked_fill(fail, -2 * p)


def test_br_037_torch_itself_keeps_a_stale_number_which_is_why_none_crosses_into_a_program() -> None:
    case = CASES["BR-037"]
    compiled = torch.compile(scaled_and_filled, fullgraph=True)
    x, fail = torch.tensor(case["inputs"]["x"]).float(), torch.tensor(case["inputs"]["fail"]).bool()
    got = {f"p_{p}".replace(".", "_"): compiled(x, fail, p) for p in case["inputs"]["p_sequence"]}
    if all(near(got[name], want) for name, want in case["expect"]["fields"].items()):
        pytest.skip("this torch gets it right")
    for name, wrong in case["wrong_if_faulty"].items():
        assert near(got[name], wrong), name


def test_br_037_the_numbers_of_a_call_are_the_calls_own() -> None:
    """GVPO: a failed token gets -zero_penalty, or A * (1 + negative_scale), with a band of zero_eps between them."""
    compute = built(case_of(TURNS).on("compiled"))
    batch = case_of(TURNS, 6, 12, seed=4)
    seen = []
    for p in CASES["BR-037"]["inputs"]["p_sequence"] * 2:
        call = {"gvpo_negative_scale": p, "gvpo_zero_penalty": 2 * p, "gvpo_zero_eps": p / 10}
        assert_right(compute, batch, **call)
        seen.append(run(compute, batch, **call)[0]["advantages"])
    distinct = {tuple(x.flatten().tolist()) for x in seen}
    assert len(distinct) == 4, "the numbers must matter for this batch"


def numbers(p: float) -> dict[str, Any]:
    """A configuration in which every number depends on p."""
    norm = {"mean_level": "batch", "std_level": "batch", "std_unbiased": False}
    return {
        "discount": 1 - p / 2,
        "gae_lambda": 1 - p / 3,
        "kl_ctl": p,
        "reward_bias": p / 4,
        "reward_scaling": 1 + p,
        "reward_clip": 0.5 + p,
        "overlong_reward_penalty": True,
        "overlong_tokens": round(10 * p),
        "overlong_penalty_factor": p,
        "max_new_tokens": 3 + round(10 * p),
        "reward_norm": norm | {"eps": p},
        "adv_norm": norm | {"eps": p / 2},
    }


def test_br_037_the_numbers_of_a_configuration_are_the_instances_own() -> None:
    """Instances with other numbers, by turns in one process: neither the first ones stick, nor the second ones."""
    templates = [Template(numbers(p), frozenset({"values", "ref_logp", "is_truncated"})) for p in (0.4, 0.1, 0.9)]
    results = []
    for _ in range(2):
        for template in templates:
            compute, case = built(configured(template.actor)), case_of(template, 6, 12, seed=2)
            assert_right(compute, case)
            results.append(run(compute, case)[0]["advantages"])
    assert len({tuple(x.flatten().tolist()) for x in results}) == 3


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo captures, as always, but its graphs run as they are: the limits and stale numbers are Dynamo's."""
    monkeypatch.setattr("compiled_adv.inductor.compile_fx", lambda graph, inputs, **_: graph.forward)


# name -> the block that holds a number, for each value of it
HOLDERS = {
    **{
        f"{name}({key})": lambda p, name=name, key=key: {
            "gae_lambda": f"compiled_adv.gae.{name}",
            "gae_lambda_kwargs": {key: p},
        }
        for name, key in (
            ("vapo_length_adaptive_gae", "alpha"),
            ("relative_position_gae_lambda", "q"),
            ("constant_gae_lambda", "value"),
        )
    },
    **{
        f"gvpo({key})": lambda p, key=key: {
            "advantage": {"process_adv_shaping": {"implementation": "gvpo", "kwargs": {key: p}}}
        }
        for key in ("negative_scale", "zero_penalty", "zero_eps")
    },
    "a user's function(factor)": lambda p: {
        "advantage": {
            "process_adv_shaping": {"implementation": "tests.contracts.table_plugins.safe", "kwargs": {"factor": p}}
        }
    },
}


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("holder", HOLDERS)
def test_br_037_the_numbers_of_a_stage_are_the_instances_own(holder: str) -> None:
    keys = frozenset({"values", "token_rewards"})
    seen = []
    for p in (0.4, 0.1, 0.9):
        template = Template({"adv_norm": None, "kl_ctl": 0.0} | HOLDERS[holder](p), keys)
        compute, case = compiled_adv.build(configured(template.actor)), case_of(template, 6, 12, seed=2)
        assert_right(compute, case)
        assert_right(compute, case)
        seen.append(run(compute, case)[0]["advantages"])
        assert compute.cache.info().fallbacks == 0
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 3, "the number must matter for this batch"


@pytest.mark.usefixtures("captured")
def test_br_037_the_numbers_of_a_call_reach_a_replacement_in_the_program() -> None:
    chosen = {"compute": {"implementation": "tests.compiled.placed_plugins.gvpo_of_its_own"}}
    template = Template({"advantage": chosen}, frozenset())
    compute, case = compiled_adv.build(configured(template.actor)), case_of(template, 6, 12, seed=2)
    for p in (0.4, 0.1, 0.9, 0.7):
        assert_right(compute, case, advantage_shaping_mode="gvpo", gvpo_zero_penalty=p)
    assert compute.cache.info().compiles == 1


# ---- BR-038: shapes and numbers that change ----


SHAPES = [(rows, tokens) for rows in (1, 2, 3, 4) for tokens in (3, 9, 17)]


@pytest.mark.usefixtures("captured")
def test_br_038_more_shapes_than_torchs_limit_are_each_compiled_once() -> None:
    template = Template(PLAIN, frozenset({"values"}))
    buckets = {"rows": [1, 2, 3, 4], "tokens": [4, 10, 18]}
    before = graphs_captured()
    for instances in (1, 2):  # the second has a budget of its own
        compute = compiled_adv.build(configured(PLAIN, buckets=buckets))
        for _ in range(2):
            for i, shape in enumerate(SHAPES):
                assert_right(compute, case_of(template, *shape, seed=i))
        assert compute.cache.info().compiles == 12
        assert graphs_captured() - before == 12 * instances
    assert torch._dynamo.config.recompile_limit < 12


@pytest.mark.usefixtures("captured")
def test_br_038_more_numbers_than_torchs_limit_add_no_graph() -> None:
    compute = compiled_adv.build(configured(TURNS.actor))
    case = case_of(TURNS, 6, 12, seed=4)
    run(compute, case)
    before = graphs_captured()
    for i in range(10):
        assert_right(compute, case, gvpo_negative_scale=0.1 * i, gvpo_zero_penalty=0.05 * i)
    assert graphs_captured() == before


@pytest.mark.usefixtures("captured")
def test_br_038_more_instances_than_torchs_limit_are_one_graph_each() -> None:
    before = graphs_captured()
    for i in range(10):
        template = Template({"kl_ctl": 0.1 * i}, frozenset({"ref_logp"}))
        assert_right(compiled_adv.build(configured(template.actor)), case_of(template))
    assert graphs_captured() - before == 10


# ---- BR-039: threads ----


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_br_039_each_thread_gets_its_own_result(warm: bool) -> None:
    compute = built(configured(PLAIN)) if warm else compiled_adv.build(configured(PLAIN))
    inputs = CASES["BR-035"]["inputs"]["call1"]
    if warm:
        compute(aligned(inputs))

    def work(i: int) -> Tensor:
        return advantages(compute, aligned(inputs | {"rewards": [[0, i + 1]]}))

    for i, got in enumerate(together(work, CASES["BR-039"]["config"]["threads"])):
        assert isinstance(got, Tensor) and near(got, [[i + 1, i + 1]]), got


# ---- BR-040: the tail of a bucket ----


def test_br_040_a_short_batch_shows_nothing_of_the_long_one_before_it() -> None:
    case = CASES["BR-040"]
    first, second = (aligned(case["inputs"][name]) for name in ("first", "second"))
    compute = built(configured(PLAIN))
    alone = advantages(compute, second)
    assert near(alone, case["expect"]["fields"]["second"])
    for long in (first, first | {"rewards": torch.tensor([1e4])}):
        compute(long)
        assert torch.equal(advantages(compute, second), alone)


def test_br_040_a_short_batch_shows_nothing_of_nans_before_it() -> None:
    case = CASES["BR-040"]
    first, second = (aligned(case["inputs"][name]) for name in ("first", "second"))
    compute = built(configured(PLAIN))
    with pytest.raises(ValueError):
        compute(first | {"values": torch.full((1, 5), torch.nan)})
    assert near(advantages(compute, second), case["expect"]["fields"]["second"])


@pytest.mark.parametrize("meta", ["sizes", "rollouts"])
def test_br_040_fewer_rows_groups_and_turns_show_nothing_of_more(meta: str) -> None:
    compute = built(case_of(TURNS).on("compiled"))
    small = case_of(TURNS, 2, 4, seed=1, meta=meta)
    alone, _ = run(compute, small)
    run(compute, case_of(TURNS, 8, 100, seed=2, meta=meta))
    assert_same(run(compute, small)[0], alone)
    assert_same(alone, expected(small)[0], 1e-5)


# ---- BR-041: validation ----


def test_br_041_a_process_reward_out_of_range_is_an_error_and_the_next_call_works() -> None:
    compute = built(case_of(WEIGHTED).on("compiled"))
    case = case_of(WEIGHTED, 3, 6, seed=1)
    own_BT = case.batch["loss_mask"] != 0
    bad = case.with_batch(case.batch | {"token_rewards": torch.where(own_BT, 1.2, case.batch["token_rewards"])})
    masked = case.with_batch(case.batch | {"token_rewards": torch.where(own_BT, case.batch["token_rewards"], 1.2)})
    for _ in range(2):
        with pytest.raises(OutOfRange, match=r"\[0, 1\]"):
            run(compute, bad)
        assert_right(compute, case)
        assert_right(compute, masked)


# ---- BR-066: what depends on the data ----


def test_br_066_one_graph_follows_masks_that_change_between_calls() -> None:
    case = CASES["BR-066"]
    norm = {key: case["config"][key] for key in ("mean_level", "std_level", "std_unbiased", "eps")}
    compute = built(configured(PLAIN | {"adv_norm": norm, "discount": 0.0, "token_rewards_as_adv": False}))
    for _ in range(2):
        for name, inputs in case["inputs"].items():  # without discount an advantage is its own reward
            rewards = torch.nn.functional.pad(torch.tensor(inputs["advantages"]).float(), (1, 0))
            batch = rows("p" + "".join("pg"[on] for on in inputs["mask"][0]))
            batch |= {"token_rewards": rewards, "turn_ids": torch.tensor([[-1, 0, 1]])}
            assert near(advantages(compute, batch), case["expect"]["fields"][name], 1e-5), name
    assert compute.cache.info().compiles == 1


@pytest.mark.parametrize("turns", [1, 3])
def test_br_066_one_graph_follows_the_number_of_turns(turns: int) -> None:
    compute = built(case_of(TURNS).on("compiled"))
    case = case_of(TURNS, 3, 10, seed=1)
    mask_BT = (case.batch["loss_mask"] != 0).long()
    ids_BT = (mask_BT.cumsum(1) - 1).clamp(0, turns - 1)
    before = compute.cache.info().compiles
    assert_right(compute, case.with_batch(case.batch | {"turn_ids": ids_BT}))
    assert compute.cache.info().compiles == max(before, 1)
