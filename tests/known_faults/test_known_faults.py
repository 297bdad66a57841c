"""Small inputs behind public bug reports (cases.json), each through every backend that exists.

A case gives its numbers in the aligned layout of one stage; `aligned` lays them out as a rollout, and plugins.py puts
them where that stage reads them. Each test also asserts that what the faulty code gave does not come out.
"""

import copy
import json
import math
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_adv
from compiled_adv.errors import (
    BadMeta,
    NonFinite,
    OutOfRange,
    PluginNotFound,
    PluginResult,
    PluginWroteInput,
    RowsDiffer,
)
from tests.contracts.small import Runner, group, meta_of, rows
from tests.known_faults import plugins

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]}

# Cases of stages that are still to come, and what they wait for.
LATER = {
    "BR-032": "moments across ranks",
    "BR-033": "moments across ranks",
    "BR-036": "CUDA graphs",
}

# Cases that are about compiling have their tests there.
COMPILED = Path(__file__).parents[1] / "compiled" / "test_known_faults.py"

NORM = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "group_size", "eps")
PLUGINS = "tests.known_faults.plugins"


pytestmark = pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")


@pytest.fixture(params=["reference", "eager"])
def run(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


# ---- a case's numbers as a batch ----


def numbers(x: Any) -> Any:
    """Lists of floats from JSON, where 'nan' and 'inf' are strings."""
    return [numbers(item) for item in x] if isinstance(x, list) else float(x)


def tensor(x: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(numbers(x)).to(dtype)


def aligned(mask: Any, *, bootstrap: Any = None, truncated: Any = None, **channels: Any) -> dict[str, Any]:
    """Slot t of a row becomes token t+1, behind a prompt token; a row's last valid token is its last one.

    channels: values, ref_logp (next-token aligned), logprobs, token_rewards, turn_ids (at the token), rewards [B].
    """
    mask_BT = tensor(mask)
    n, width = mask_BT.shape
    batch = rows(*["p" * (width + 1)] * n)
    batch["loss_mask"] = behind_prompt(mask_BT)
    if truncated is not None:
        batch["is_truncated"] = torch.tensor(truncated)
    for key, x in channels.items():
        x = tensor(x)
        if key == "rewards":
            batch[key] = x
        elif key == "turn_ids":
            batch[key] = behind_prompt(x.long(), -1)
        elif key in ("values", "ref_logp"):
            last_B = tensor(bootstrap).to(x.dtype) if key == "values" and bootstrap is not None else x.new_zeros(n)
            batch[key] = torch.cat([x, last_B[:, None]], 1)
        else:
            batch[key] = behind_prompt(x)
    return batch


def behind_prompt(x_BT: Tensor, fill: float = 0) -> Tensor:
    return torch.nn.functional.pad(x_BT, (1, 0), value=fill)


def raw(inputs: dict[str, Any], *, width: int = 0) -> dict[str, Any]:
    """A batch from a case in rollout order, padded to `width`."""
    given = {key: x for key, x in inputs.items() if x is not None}
    batch = rows(*["p" * len(row) for row in given["attention_mask"]])
    if "is_truncated" not in given:
        del batch["is_truncated"]
    for key, x in given.items():
        batch[key] = tensor(x, batch[key].dtype if key in batch else torch.float32)
    if "turn_ids" in batch:
        batch["turn_ids"] = batch["turn_ids"].long()
    return widened(batch, width)


def widened(batch: dict[str, Any], width: int) -> dict[str, Any]:
    extra = max(0, width - batch["loss_mask"].shape[1])
    return {
        key: torch.nn.functional.pad(x, (0, extra), value=-1 if key == "turn_ids" else 0) if x.ndim == 2 else x
        for key, x in batch.items()
    }


def norm_of(config: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {key: config[key] for key in NORM if key in config} | change


def actor_of(config: dict[str, Any], *, rules: str = "default", **change: Any) -> dict[str, Any]:
    """The actor block of a case's config."""
    names = {"gamma": "discount", "lam": "gae_lambda"}
    actor = {names.get(key, key): value for key, value in config.items()} | change
    return actor | {"advantage": {"rules": rules} | actor.get("advantage", {})}


def plugged(slot: str, name: str, **kwargs: Any) -> dict[str, Any]:
    return {slot: {"implementation": f"{PLUGINS}.{name}", "kwargs": kwargs}}


FROM_VALUES = {"advantage": plugged("estimator", "values_as_advantages")}


def adv_norm(run: Runner, norm: dict[str, Any], advantages: Any, mask: Any, meta: Any = None) -> Tensor:
    """Normalised advantages at the case's slots."""
    return run(aligned(mask, values=advantages), {"adv_norm": norm, **FROM_VALUES}, meta)["advantages"][:, :-1]


def token_gae(run: Runner, config: dict[str, Any], inputs: dict[str, Any], **actor: Any) -> dict[str, Tensor]:
    """Advantages and returns at the case's slots; its rewards enter as process rewards of one-token turns."""
    n, width = tensor(inputs["mask"]).shape
    batch = aligned(
        inputs["mask"],
        values=inputs["values"],
        bootstrap=inputs["bootstrap"],
        truncated=inputs["truncated"],
        token_rewards=inputs["rewards"],
        turn_ids=torch.arange(width).expand(n, width),
    )
    out = run(batch, {"discount": config["gamma"], "token_rewards_as_adv": False} | actor)
    return {key: out[key][:, :-1] for key in ("advantages", "returns")}


def scores(
    run: Runner, norm: dict[str, Any], rewards: Any, sizes: Any = None, *, groups: Any = None, **actor: Any
) -> Tensor:
    """Normalised rewards of one-token rows; they are what the total reward shows."""
    rewards_B = tensor(rewards)
    meta = None if sizes is None else meta_of(*sizes, groups=groups)
    batch = rows(*["pg"] * len(rewards_B), rewards=rewards_B)
    return run(batch, {"reward_norm": norm, "reward_clip": math.inf} | actor, meta)["tot_rewards"][:, 0]


def shaped(run: Runner, inputs: dict[str, Any], mode: str, **call: Any) -> dict[str, Any]:
    """The outputs after process shaping of the case's advantages."""
    batch = aligned(inputs["mask"], values=inputs["advantages"], token_rewards=inputs["token_rewards"])
    return run(batch, FROM_VALUES, advantage_shaping_mode=mode, **call)


# ---- comparing ----


def close(got: Tensor, want: Any, atol: float = 1e-5) -> bool:
    """Equal at every slot that `want` names, finite at the others (null)."""
    flat, have = _flat(want), got.double().flatten().tolist()
    assert len(flat) == len(have), (got, want)
    return all(
        math.isfinite(x) if y is None else abs(x - y) <= atol * max(1, abs(y)) for x, y in zip(have, flat, strict=True)
    )


def _flat(x: Any) -> list[float | None]:
    if isinstance(x, list):
        return [number for item in x for number in _flat(item)]
    return [None if x is None else float(x)]


def expect(case: dict[str, Any], **got: Tensor) -> None:
    """Every field as expected, and none as the faulty code gave it."""
    want, wrong = case["expect"], case.get("wrong_if_faulty", {})
    assert got.keys() == want["fields"].keys()
    for name, x in got.items():
        assert close(x, want["fields"][name], want["atol"]), (name, x)
    for name, bad in wrong.items():
        x = got[name] if name in got else next(iter(got.values()))
        assert not close(x, bad, 1e-3), (name, x)


def test_every_case_has_a_test_or_waits_for_its_stage() -> None:
    names = re.findall(r"def test_br_(\d{3})_", Path(__file__).read_text() + COMPILED.read_text())
    assert {f"BR-{name}" for name in names} == CASES.keys()
    assert not CASES.keys() & LATER.keys()


# ---- advantage normalisation ----


@pytest.mark.parametrize("bigger", [False, True])
def test_br_001_a_masked_statistic_sees_the_mask_in_all_its_parts(run: Runner, bigger: bool) -> None:
    case = CASES["BR-001"]
    pad, rest = ((0, 4, 0, 2), 1000.0) if bigger else ((0, 0), 0.0)
    advantages = torch.nn.functional.pad(tensor(case["inputs"]["advantages"]), pad, value=rest)
    mask = torch.nn.functional.pad(tensor(case["inputs"]["mask"]), pad)
    got = adv_norm(run, norm_of(case["config"]), advantages, mask)
    expect(case, advantages=got[:2, :4])
    assert not got[mask == 0].any()


def test_br_002_masked_slots_are_zero_after_an_affine_step(run: Runner) -> None:
    case = CASES["BR-002"]
    expect(case, advantages=adv_norm(run, norm_of(case["config"]), **case["inputs"]))


@pytest.mark.parametrize("sizes", [None, (2,)])
def test_br_003_masked_nan_and_inf_are_never_read(run: Runner, sizes: Any) -> None:
    case = CASES["BR-003"]
    norm, meta = norm_of(case["config"]), None
    if sizes:
        norm, meta = norm | {"mean_level": "group", "std_level": "group"}, meta_of(*sizes)
    expect(case, advantages=adv_norm(run, norm, **case["inputs"], meta=meta))


def test_br_003_leave_one_out_means_do_not_read_masked_slots(run: Runner) -> None:
    case = CASES["BR-003"]
    got = adv_norm(run, norm_of(case["config"], mean_leave1out=True, std_level=None), **case["inputs"])
    assert close(got, [[-2, 0], [2, 0]])


def test_br_022_an_unbiased_spread_of_one_token_is_one(run: Runner) -> None:
    case = CASES["BR-022"]
    expect(case, advantages=adv_norm(run, norm_of(case["config"]), **case["inputs"]))


def test_br_022_without_active_tokens_everything_is_zero(run: Runner) -> None:
    case = CASES["BR-022"]
    batch = aligned([[0, 0]], values=case["inputs"]["advantages"])
    assert not run(batch, {"adv_norm": norm_of(case["config"])})["advantages"].any()


def test_br_066_one_instance_follows_masks_that_change_between_calls(run: Runner) -> None:
    case = CASES["BR-066"]
    compute = run.build({"adv_norm": norm_of(case["config"]), "discount": 0.0, "token_rewards_as_adv": False})
    got = {}
    for name, inputs in case["inputs"].items():  # without discount an advantage is its own reward
        batch = aligned(inputs["mask"], token_rewards=inputs["advantages"], turn_ids=[[0, 1]])
        got[name] = compute(batch)["advantages"][:, :-1]
    expect(case, **got)


@pytest.mark.parametrize("turns", [1, 3])
def test_br_066_one_instance_follows_the_number_of_turns(run: Runner, turns: int) -> None:
    compute = run.build({"gae_timestep_unit": "turn", "gae_lambda": 0.5})
    for ids in ([0, 0, 0], [0, 1, 2][:turns] + [turns - 1] * (3 - turns)):
        batch = aligned([[1, 1, 1]], turn_ids=[ids], rewards=[1.0])
        assert close(compute(batch)["advantages"][:, :-1], [[0.5 ** (ids[-1] - i) for i in ids]])


# ---- the recursion ----


@pytest.mark.parametrize("value", [100.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reward", [0.0, math.nan])
def test_br_004_masked_values_and_rewards_never_enter_the_recursion(run: Runner, value: float, reward: float) -> None:
    case = copy.deepcopy(CASES["BR-004"])
    case["inputs"]["values"][0][2], case["inputs"]["rewards"][0][2] = value, reward
    expect(case, **token_gae(run, case["config"], case["inputs"], gae_lambda=0.5))


def test_br_008_the_bootstrap_enters_once(run: Runner) -> None:
    case = CASES["BR-008"]
    expect(case, **token_gae(run, case["config"], case["inputs"], gae_lambda=1.0))


def test_br_011_a_gap_neither_resets_nor_decays(run: Runner) -> None:
    case = CASES["BR-011"]
    expect(case, advantages=token_gae(run, case["config"], case["inputs"])["advantages"])


def test_br_012_powers_are_relative_to_the_position(run: Runner) -> None:
    case = CASES["BR-012"]
    expect(case, advantages=token_gae(run, case["config"], case["inputs"])["advantages"])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_br_013_a_lambda_per_row_does_not_run_along_time(run: Runner, order: list[int]) -> None:
    case = copy.deepcopy(CASES["BR-013"])
    # One row more, since the prompt token makes one column more: rows and columns are to be equal in number.
    inputs = {key: [x[i] for i in (*order, order[-1])] for key, x in case["inputs"].items()}
    chosen = {"gae_lambda": f"{PLUGINS}.given_lambda", "gae_lambda_kwargs": {"values": inputs["lam"]}}
    got = token_gae(run, case["config"], inputs, **chosen)["advantages"][:3]
    expect(case, advantages=got[order])


def test_br_013_one_row_of_one_token_keeps_its_shape(run: Runner) -> None:
    batch = rows("g", rewards=[1.0])
    out = run(batch, {"gae_lambda": 0.5})
    assert out["advantages"].shape == out["returns"].shape == (1, 1)


@pytest.mark.parametrize("width", [8, 16])
def test_br_014_lambda_by_length_counts_actions(run: Runner, width: int) -> None:
    case = CASES["BR-014"]
    mask = torch.nn.functional.pad(tensor(case["inputs"]["mask"]), (0, width - 8))
    actor = {
        "gae_lambda": "compiled_adv.gae.vapo_length_adaptive_gae",
        "gae_lambda_kwargs": {"alpha": case["config"]["alpha"]},
    }
    as_seen = run(aligned(mask), actor | {"advantage": plugged("estimator", "lambda_as_advantages")})["advantages"]
    expect(case, lam=as_seen[:, 0])
    # and as the token estimator applies it: 1 at the last of four actions
    ends = torch.zeros_like(mask)
    ends[0, 4] = 1
    turn_ids = torch.arange(width).expand(3, width)
    batch = aligned(mask, token_rewards=ends, turn_ids=turn_ids)
    got = run(batch, actor | {"token_rewards_as_adv": False})["advantages"]
    assert close(got[0, 1:5], [0.125, 0.25, 0.5, 1.0])


def test_br_015_turn_kl_stays_out_of_turn_rewards_and_returns(run: Runner) -> None:
    case = CASES["BR-015"]
    inputs, config = case["inputs"], case["config"]
    batch = aligned(
        inputs["mask"],
        values=inputs["values"],
        bootstrap=inputs["bootstrap"],
        truncated=inputs["truncated"],
        turn_ids=inputs["turn_ids"],
        logprobs=-tensor(inputs["kl_rewards"]),
        ref_logp=torch.zeros(1, 5),
        rewards=tensor(inputs["outcome_rewards"])[:, -1],
    )
    out = run(batch, actor_of(config, gae_timestep_unit="turn", kl_ctl=1.0))
    expect(case, **{key: out[key][:, :-1] for key in ("advantages", "returns")})


# ---- the whole computation ----


@pytest.mark.parametrize("width", [6, 8, 16])
def test_br_006_truncation_is_what_the_batch_says_at_any_width(run: Runner, width: int) -> None:
    case = CASES["BR-006"]
    out = run(raw(case["inputs"], width=width), actor_of(case["config"]))
    expect(case, advantages=out["advantages"][:, :6])


def test_br_006_without_flags_the_callers_width_decides(run: Runner) -> None:
    case = CASES["BR-006"]
    batch = raw({key: x for key, x in case["inputs"].items() if key != "is_truncated"})
    out = run(batch, actor_of(case["config"]))
    assert close(out["advantages"], case["wrong_if_faulty"]["advantages"])
    assert run.warnings["truncated_by_width"] == [0]


@pytest.mark.parametrize("width", [6, 8])
@pytest.mark.parametrize("pad", [9.0, math.nan])
def test_br_007_the_bootstrap_is_the_value_of_the_last_valid_token(run: Runner, width: int, pad: float) -> None:
    case = CASES["BR-007"]
    batch = raw(case["inputs"], width=width)
    batch["values"][:, 6:] = pad
    out = run(batch, actor_of(case["config"]))
    expect(case, **{key: out[key][:, :6] for key in ("advantages", "returns")})


def test_br_007_bfloat16_values_bootstrap_alike(run: Runner) -> None:
    case = CASES["BR-007"]
    batch = raw(case["inputs"])
    out = run(batch | {"values": batch["values"].bfloat16()}, actor_of(case["config"]))
    for key in ("advantages", "returns"):
        assert close(out[key], case["expect"]["fields"][key], 1e-2)


@pytest.mark.parametrize("rules", ["default", "strict"])
def test_br_009_a_discarded_row_counts_by_default_and_not_under_strict_rules(run: Runner, rules: str) -> None:
    case = CASES["BR-009"]
    counted, excluded = (policy["advantages"] for policy in case["expect"]["acceptable"])
    actor = actor_of(case["config"], rules=rules, reward_clip=math.inf)
    got = run(raw(case["inputs"]), actor)["advantages"]
    want, other = (counted, excluded) if rules == "default" else (excluded, counted)
    assert close(got, want) and not close(got, other)
    assert run.warnings["discarded_rows_counted"] == [1]


@pytest.mark.parametrize("rules", ["default", "strict"])
def test_br_010_an_outcome_on_a_tool_token_is_lost_by_default_and_moved_under_strict_rules(
    run: Runner, rules: str
) -> None:
    case = CASES["BR-010"]
    got = run(raw(case["inputs"]), actor_of(case["config"], rules=rules))["advantages"]
    default, strict = (case["expect"][f"{name}_rules"]["advantages"] for name in ("default", "strict"))
    want, other = (default, strict) if rules == "default" else (strict, default)
    assert close(got, want) and not close(got, other)
    assert run.warnings["outcome_on_masked_token"] == [0]


@pytest.mark.parametrize("folded", [True, False])
def test_br_016_a_turns_score_counts_once(run: Runner, folded: bool) -> None:
    case = copy.deepcopy(CASES["BR-016"])
    out = run(raw(case["inputs"]), actor_of(case["config"], token_rewards_as_adv=not folded))
    kind = "folded" if folded else "direct"
    case["expect"]["fields"] = {key: x for key, x in case["expect"]["fields"].items() if key.startswith(kind)}
    expect(case, **{f"{kind}_{key}": out[key] for key in ("advantages", "returns")})


def test_br_016_adjacent_turns_stay_two(run: Runner) -> None:
    batch = rows("pgggg", rewards=[1.0], turn_ids=[[-1, 0, 0, 1, 1]], token_rewards=[[0, 0.2, 0.2, -0.4, -0.4]])
    assert close(run(batch, {"token_rewards_as_adv": False})["advantages"], [[0.8, 0.8, 0.6, 0.6, 0]])


def test_br_016_unequal_scores_inside_a_folded_turn_are_refused(run: Runner) -> None:
    batch = rows("pgg", turn_ids=[[-1, 0, 0]], token_rewards=[[0, 0.2, 0.3]])
    assert isinstance(run.refusal(batch, {"token_rewards_as_adv": False}), RowsDiffer)


def test_br_025_a_call_leaves_no_mark_on_its_inputs(run: Runner) -> None:
    case = CASES["BR-025"]
    batch = raw(case["inputs"])
    before = {key: x.clone() for key, x in batch.items()}
    compute = run.build(actor_of(case["config"]))
    out, again = compute(batch), compute(batch)
    expect(case, **{key: out[key] for key in case["expect"]["fields"]})
    assert list(batch) == list(before) and all(torch.equal(batch[key], x) for key, x in before.items())
    made = [key for key in out if out[key] is not batch.get(key)]
    assert all(torch.equal(out[key], again[key]) for key in made)
    given = {x.untyped_storage().data_ptr() for x in batch.values()}
    assert not given & {out[key].untyped_storage().data_ptr() for key in made}


@pytest.mark.parametrize("rules", ["default", "strict"])
def test_br_034_the_mask_wraps_by_default_and_shifts_under_strict_rules(run: Runner, rules: str) -> None:
    case = CASES["BR-034"]
    out = run(raw(case["inputs"]), actor_of(case["config"], rules=rules))
    want, other = (case["expect"][f"{name}_rules"] for name in (rules, {"default": "strict"}.get(rules, "default")))
    for key in ("loss_mask", "advantages"):
        assert close(out[key], want[key]) and not close(out[key], other[key])
    assert run.warnings["first_token_generated"] == [0]


# ---- KL ----


@pytest.mark.parametrize("masked", [-1e10, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_br_005_k3_of_a_pad_sentinel_is_zero(run: Runner, masked: float, dtype: torch.dtype) -> None:
    case = copy.deepcopy(CASES["BR-005"])
    inputs = case["inputs"]
    inputs["logp"][0][1] = masked
    logp, ref_logp = (tensor(inputs[key]).to(dtype) for key in ("logp", "ref_logp"))
    batch = aligned(inputs["mask"], logprobs=logp, ref_logp=ref_logp)
    if dtype != torch.float32:  # -0.7 is rounded: to 0.0003 in k3 for bfloat16
        case["expect"]["atol"] = 1e-3
    expect(case, kl_rewards=run(batch, actor_of(case["config"]))["kl_rewards"][:, :-1])


def test_br_045_a_non_finite_active_log_probability_is_an_error(run: Runner) -> None:
    case = CASES["BR-045"]
    inputs = case["inputs"]
    error = run.refusal(
        aligned(inputs["mask"], logprobs=inputs["logp"], ref_logp=inputs["ref_logp"]), actor_of(case["config"])
    )
    assert isinstance(error, NonFinite) and "logprobs" in str(error) and "rows [0]" in str(error)


# ---- reward normalisation ----


def test_br_018_leave_one_out_has_one_spread_per_group(run: Runner) -> None:
    case = CASES["BR-018"]
    got = scores(run, norm_of(case["config"]), case["inputs"]["rewards"], case["inputs"]["group_sizes"])
    expect(case, rewards=got)


def test_br_019_equal_rewards_have_no_spread(run: Runner) -> None:
    case = CASES["BR-019"]
    got = scores(run, norm_of(case["config"]), case["inputs"]["rewards"], case["inputs"]["group_sizes"])
    expect(case, rewards=got)


@pytest.mark.parametrize(("n", "leave_one_out"), [(5, False), (3, True)])
def test_br_019_no_rounding_residue_is_divided_by_itself(run: Runner, n: int, leave_one_out: bool) -> None:
    norm = norm_of(CASES["BR-019"]["config"], mean_leave1out=leave_one_out)
    assert not scores(run, norm, [0.7] * n, [n]).any()


def test_br_020_uneven_groups_come_from_the_metadata(run: Runner) -> None:
    case = CASES["BR-020"]
    got = scores(run, norm_of(case["config"]), case["inputs"]["rewards"], case["inputs"]["group_sizes"])
    expect(case, rewards=got)


def test_br_020_uneven_groups_in_another_order(run: Runner) -> None:
    got = scores(run, norm_of(CASES["BR-020"]["config"]), [5, 5, 5, 1, 0], [3, 2])
    assert close(got, [0, 0, 0, 0.99998, -0.99998])


def test_br_021_a_group_of_one_is_its_own_mean(run: Runner) -> None:
    case = CASES["BR-021"]
    got = scores(run, norm_of(case["config"]), case["inputs"]["rewards"], case["inputs"]["group_sizes"])
    expect(case, rewards=got)


@pytest.mark.parametrize(("rules", "score"), [("default", 1.0), ("strict", 0.0)])
def test_br_021_a_batch_of_one_keeps_its_score_by_default_and_not_under_strict_rules(
    run: Runner, rules: str, score: float
) -> None:
    norm = norm_of(CASES["BR-021"]["config"], mean_level="batch")
    assert close(scores(run, norm, [1.0], advantage={"rules": rules}), [score])
    assert run.warnings["loo_alone"] == [0]


def test_br_021_a_group_of_one_is_finite_under_an_unbiased_spread(run: Runner) -> None:
    case = CASES["BR-021"]
    norm = norm_of(case["config"], std_level="group", std_unbiased=True)
    assert close(scores(run, norm, case["inputs"]["rewards"], case["inputs"]["group_sizes"]), [0, None, None])


def test_br_023_statistics_of_bfloat16_rewards_are_not_bfloat16(run: Runner) -> None:
    case = CASES["BR-023"]
    rewards_B = tensor(case["inputs"]["rewards"], torch.bfloat16)
    got = scores(run, norm_of(case["config"]), rewards_B, case["inputs"]["group_sizes"])
    assert got.dtype == torch.float32
    expect(case, rewards=got)


def test_br_023_squares_of_float16_rewards_do_not_overflow(run: Runner) -> None:
    got = scores(run, norm_of(CASES["BR-023"]["config"]), tensor([300, 301, 299, 300], torch.float16), [4])
    assert close(got, [0, 1.41421, -1.41421, 0], 1e-3)


def test_br_023_a_bfloat16_mask_counts_beyond_256(run: Runner) -> None:
    advantages = torch.arange(400).reshape(1, 400) % 2
    batch = aligned(torch.ones(1, 400), values=advantages.float())
    batch["loss_mask"] = batch["loss_mask"].bfloat16()
    norm = norm_of(CASES["BR-001"]["config"], std_level=None)
    assert close(run(batch, {"adv_norm": norm} | FROM_VALUES)["advantages"][:, :-1], (advantages - 0.5).tolist())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_br_024_integer_rewards_have_a_real_mean(run: Runner, dtype: torch.dtype) -> None:
    case = CASES["BR-024"]
    got = scores(run, norm_of(case["config"]), tensor(case["inputs"]["rewards"], dtype), case["inputs"]["group_sizes"])
    assert got.dtype == torch.float32
    expect(case, rewards=got)


def test_br_024_a_penalty_on_integer_rewards_is_not_cut_off(run: Runner) -> None:
    rewards_B = torch.tensor([1, 1])
    penalty = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 1.0}
    out = run(rows("pg", "pp", rewards=rewards_B), penalty | {"max_new_tokens": 4})
    assert close(out["rewards"], [0.75, 1.0]) and rewards_B.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_br_024_an_integer_loss_mask_is_a_mask(run: Runner, dtype: torch.dtype) -> None:
    case = CASES["BR-001"]
    batch = aligned(case["inputs"]["mask"], values=case["inputs"]["advantages"])
    batch["loss_mask"] = batch["loss_mask"].to(dtype)
    out = run(batch, {"adv_norm": norm_of(case["config"]), **FROM_VALUES})
    expect(case, advantages=out["advantages"][:, :-1])


def test_br_028_each_moment_has_its_own_level(run: Runner) -> None:
    case = CASES["BR-028"]
    got = scores(run, norm_of(case["config"]), case["inputs"]["rewards"], case["inputs"]["group_sizes"])
    expect(case, rewards=got)


def test_br_028_each_moment_has_its_own_level_the_other_way_round(run: Runner) -> None:
    case = CASES["BR-028"]
    norm = norm_of(case["config"], mean_level="batch", std_level="group")
    got = scores(run, norm, case["inputs"]["rewards"], case["inputs"]["group_sizes"])
    assert close(got, [-1.16275, -0.80498, 0.59805, 1.28154])


@pytest.mark.parametrize(("rules", "score"), [("default", -49.5), ("strict", 0.0)])
def test_br_029_a_row_without_tokens_counts_unless_strict_rules_see_it_discarded(
    run: Runner, rules: str, score: float
) -> None:
    case = CASES["BR-029"]
    batch = rows("ppp", "pgg", rewards=case["inputs"]["rewards"], is_truncated=[True, False])
    actor = {"reward_norm": norm_of(case["config"]), "reward_clip": math.inf, "mask_no_eos_with_zero": True}
    out = run(batch, actor | {"advantage": {"rules": rules}}, meta_of(*case["inputs"]["group_sizes"]))
    assert close(out["tot_rewards"][1, 1:2], [score])


def test_br_029_without_discarding_every_row_counts(run: Runner) -> None:
    case = CASES["BR-029"]
    actor = {"reward_norm": norm_of(case["config"]), "reward_clip": math.inf}
    batch = rows("ppp", "pgg", rewards=case["inputs"]["rewards"])
    got = run(batch, actor, meta_of(*case["inputs"]["group_sizes"]))["tot_rewards"][:, 1]
    assert close(got, case["expect"]["acceptable"][0]["rewards"])


def test_br_030_a_rollout_in_several_rows_counts_once(run: Runner) -> None:
    case = CASES["BR-030"]
    inputs = case["inputs"]
    given = {"sizes": inputs["traj_group_sizes"], "groups": [group(*inputs["rollout_row_counts"])]}
    changes = {"mean": {}, "loo": {"mean_leave1out": True}, "mean_std": {"std_level": "group"}}
    got = {
        name: scores(run, norm_of(case["config"], **change), inputs["rewards"], **given)
        for name, change in changes.items()
    }
    expect(case, **got)


def test_br_031_equal_prompts_are_not_one_group(run: Runner) -> None:
    case = CASES["BR-031"]
    batch = rows(*["pg"] * 4, input_ids=torch.tensor(case["inputs"]["input_ids"]), rewards=case["inputs"]["rewards"])
    out = run(batch, {"reward_norm": norm_of(case["config"])}, meta_of(*case["inputs"]["group_sizes"]))
    expect(case, rewards=out["tot_rewards"][:, 0])


@pytest.mark.parametrize("rules", ["default", "strict"])
def test_br_055_a_tail_without_group_is_divided_by_eps_by_default_and_a_group_under_strict_rules(
    run: Runner, rules: str
) -> None:
    case = CASES["BR-055"]
    got = scores(run, norm_of(case["config"]), case["inputs"]["case_a"]["rewards"], advantage={"rules": rules})
    assert close(got, case["expect"][f"{rules}_rules"]["case_a"])
    assert run.warnings["rows_outside_groups"] == [2]


@pytest.mark.parametrize("name", ["case_b", "case_c"])
@pytest.mark.parametrize("rules", ["default", "strict"])
def test_br_055_group_sizes_that_do_not_fit_are_refused(run: Runner, name: str, rules: str) -> None:
    case = CASES["BR-055"]
    inputs = case["inputs"][name]
    with pytest.raises(ValueError) as caught:
        scores(run, norm_of(case["config"]), inputs["rewards"], inputs["group_sizes"], advantage={"rules": rules})
    assert isinstance(caught.value, BadMeta)


@pytest.mark.parametrize("level", ["group", "batch"])
def test_br_057_a_nan_reward_is_an_error_that_names_its_row(run: Runner, level: str) -> None:
    case = CASES["BR-057"]
    norm = norm_of(case["config"], mean_level=level, std_level=level)
    with pytest.raises(NonFinite, match=r"rows \[1\]"):
        scores(run, norm, case["inputs"]["rewards"], case["inputs"]["group_sizes"])


# ---- the length penalty ----


def penalty(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "overlong_reward_penalty": True,
        "max_new_tokens": config["max_response_length"],
        "overlong_tokens": config["overlong_tokens"],
        "overlong_penalty_factor": config["factor"],
    }


def test_br_027_the_penalty_counts_generated_tokens(run: Runner) -> None:
    case = CASES["BR-027"]
    expect(case, rewards=run(raw(case["inputs"]), penalty(case["config"]))["rewards"])


@pytest.mark.parametrize("rules", ["default", "strict"])
def test_br_059_the_penalty_is_capped_under_strict_rules_alone(run: Runner, rules: str) -> None:
    case = CASES["BR-059"]
    uncapped, capped = (policy["rewards"] for policy in case["expect"]["acceptable"])
    batch = rows(*["p" + "g" * n for n in case["inputs"]["generated_tokens"]], rewards=case["inputs"]["rewards"])
    got = run(batch, penalty(case["config"]) | {"advantage": {"rules": rules}})["rewards"]
    want, other = (uncapped, capped) if rules == "default" else (capped, uncapped)
    assert close(got, want) and not close(got, other)
    assert run.warnings["uncapped_length_penalty"] == [4]


# ---- process shaping ----


def test_br_017_gvpo_never_inverts_the_order(run: Runner) -> None:
    case = CASES["BR-017"]
    out = shaped(run, case["inputs"], "gvpo", **{f"gvpo_{key}": x for key, x in case["config"].items()})
    expect(case, advantages=out["advantages"][:, :-1])
    assert close(out["returns"][:, :-1], case["inputs"]["advantages"])  # out of reach


@pytest.mark.parametrize("edge", [1e-6, -1e-6])
def test_br_017_the_edge_of_zero_counts_as_zero(run: Runner, edge: float) -> None:
    out = shaped(run, {"advantages": [[edge]], "token_rewards": [[-1]], "mask": [[1]]}, "gvpo")
    assert close(out["advantages"][:, :-1], [[-0.4]])


def test_br_026_one_slot_of_an_expanded_view_is_one_slot(run: Runner) -> None:
    case = CASES["BR-026"]
    batch = aligned(case["inputs"]["mask"], token_rewards=case["inputs"]["token_rewards"])
    out = run(batch, {"advantage": plugged("estimator", "expanded_ones")})
    expect(case, advantages=out["advantages"][:, :-1])


def test_br_041_a_process_reward_out_of_range_is_an_error_and_the_next_call_works(run: Runner) -> None:
    case = CASES["BR-041"]
    compute = run.build(FROM_VALUES)
    inputs = case["inputs"]
    bad, good = (
        aligned(inputs["mask"], values=inputs["advantages"], token_rewards=rewards)
        for rewards in (inputs["token_rewards"], [[0.5, 1.0]])
    )
    with pytest.raises(OutOfRange, match=r"\[0, 1\]"):
        compute(bad, advantage_shaping_mode="process_weighted")
    got = compute(good, advantage_shaping_mode="process_weighted")["advantages"]
    assert close(got[:, :-1], [[0.5, 1.0]])


def test_br_041_a_masked_process_reward_has_no_range(run: Runner) -> None:
    out = shaped(run, CASES["BR-041"]["inputs"] | {"mask": [[1, 0]]}, "process_weighted")
    assert close(out["advantages"][:, :-1], [[0.5, None]])


def test_br_041_a_nan_process_reward_is_an_error(run: Runner) -> None:
    with pytest.raises(NonFinite):
        shaped(run, CASES["BR-041"]["inputs"] | {"token_rewards": [[0.5, "nan"]]}, "process_weighted")


def test_br_041_a_fractional_loss_mask_is_a_set_one(run: Runner) -> None:
    # The case would have it refused; the loss mask counts what is not zero (semantics.md, `g`).
    with pytest.raises(OutOfRange):
        shaped(run, CASES["BR-041"]["inputs"] | {"mask": [[0.5, 0.5]]}, "process_weighted")


# ---- users' functions ----


def scaling(run: Runner, name: str = "scale_outcome", **kwargs: Any) -> compiled_adv.Compute:
    return run.build({"advantage": plugged("outcome_reward_shaping", name, **kwargs)})


def outcome(compute: compiled_adv.Compute) -> Tensor:
    return compute(rows("pg", "pg", rewards=CASES["BR-042"]["inputs"]["rewards"]))["rewards"]


def test_br_042_a_function_is_given_by_its_path(run: Runner) -> None:
    expect(CASES["BR-042"], rewards=outcome(scaling(run, factor=0.5)))


def _in_another_process(config: str, answer: Any) -> None:
    rewards = CASES["BR-042"]["inputs"]["rewards"]
    answer.send(compiled_adv.build(json.loads(config))(rows("pg", "pg", rewards=rewards))["rewards"].tolist())


def test_br_042_a_spawned_worker_needs_the_config_alone() -> None:
    config = {"actor": {"kl_ctl": 0.0, "advantage": plugged("outcome_reward_shaping", "scale_outcome", factor=0.5)}}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_in_another_process, args=(json.dumps(config), theirs))
    worker.start()
    got = ours.recv() if ours.poll(60) else None
    worker.join(60)
    assert got == CASES["BR-042"]["expect"]["fields"]["rewards"]


def test_br_042_a_function_is_looked_up_once(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = scaling(run, factor=0.5)
    monkeypatch.delattr(plugins, "scale_outcome")
    expect(CASES["BR-042"], rewards=outcome(compute))


def test_br_042_kwargs_stay_as_the_config_has_them(run: Runner) -> None:
    kwargs = {"factor": 0.5}
    choice = {"implementation": f"{PLUGINS}.scale_outcome", "kwargs": kwargs}
    compute = run.build({"advantage": {"outcome_reward_shaping": choice}})
    outcome(compute)
    assert kwargs == {"factor": 0.5} and choice["kwargs"] is kwargs


def test_br_042_a_wrong_path_fails_at_build_and_is_named(run: Runner) -> None:
    with pytest.raises(PluginNotFound, match=f"{PLUGINS}.scale_outcomes"):
        scaling(run, "scale_outcomes", factor=0.5)


@pytest.mark.parametrize("how", ["shape", "dtype", "nan", "device"])
def test_br_042_a_wrong_result_is_an_error_that_names_the_stage(run: Runner, how: str) -> None:
    with pytest.raises(PluginResult, match="outcome_reward_shaping"):
        outcome(scaling(run, "wrong_outcome", how=how))


def test_br_042_a_function_that_writes_to_its_input_is_named(run: Runner) -> None:
    with pytest.raises(PluginWroteInput, match="writing_outcome"):
        outcome(scaling(run, "writing_outcome"))
