"""The shadow and stats(): a second opinion is counted and compared, and nothing it does reaches the result."""

import math
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compiled_adv
from compiled_adv import AdvantageInputs
from compiled_adv.errors import PluginNotFound, UnknownName
from compiled_adv.shadow import largest
from compiled_adv.status import WARNINGS
from tests.contracts.small import group, meta_of, near, rows

HERE = __name__
ACTOR: dict[str, Any] = {"kl_ctl": 0.0, "advantage": {"backend": "eager"}}
pytestmark = pytest.mark.filterwarnings("ignore::compiled_adv.AdvantageWarning")
BATCH = rows("pgg", "pgp", rewards=[1, -1], token_rewards=[[0, 1, 0], [0, 0, 0]])


def build(against: str, every: int = 1, **advantage: Any) -> compiled_adv.Compute:
    path = against if against in ("eager", "reference", "eagre") else f"{HERE}.{against}"
    block = ACTOR["advantage"] | {"shadow": {"against": path, "every": every}, **advantage}
    return compiled_adv.build(ACTOR | {"advantage": block})


def same(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    """The default computation by another instance."""
    return compiled_adv.build(ACTOR)(inputs.data, inputs.meta)


def off_by_a_half(inputs: AdvantageInputs) -> dict[str, Any]:
    out = same(inputs)
    return {"advantages": out["advantages"] + 0.5, "loss_mask": out["loss_mask"], "not_ours": "anything"}


def garbage_elsewhere(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    out = same(inputs)
    return {"advantages": torch.where(out["loss_mask"] > 0, out["advantages"], math.nan)}


def nan_on_a_token(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    return {"advantages": torch.full(inputs.data["loss_mask"].shape, math.nan)}


def like_a_result(inputs: AdvantageInputs) -> Any:
    out = same(inputs)
    return SimpleNamespace(
        advantages=out["advantages"], returns=out["returns"] - 2, extras={"is_truncated": out["is_truncated"]}
    )


def other_mask(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    return {"loss_mask": torch.ones_like(same(inputs)["loss_mask"])}


def raises(inputs: AdvantageInputs) -> None:
    raise RuntimeError("no such thing")


def leaves(inputs: AdvantageInputs) -> None:
    raise SystemExit(3)


def wrong_shape(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    return {"advantages": torch.zeros(7)}


def no_tensors(inputs: AdvantageInputs) -> dict[str, Any]:
    return {"advantages": [0.0]}


def nothing(inputs: AdvantageInputs) -> None:
    return None


def writes(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    inputs.data["rewards"].fill_(9)
    return {"advantages": torch.zeros(2, 3)}


def draws(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    return {"advantages": torch.rand(2, 3)}


def stats_after(compute: compiled_adv.Compute, calls: int = 1) -> dict[str, float]:
    for _ in range(calls):
        compute(BATCH)
    return compute.stats()


# ---- against ours ----


@pytest.mark.parametrize("against", ["eager", "reference"])
def test_backends_agree_in_every_channel(against: str) -> None:
    stats = stats_after(build(against))
    differences = {name: value for name, value in stats.items() if name.endswith("max_abs")}
    assert {"shadow/advantages/max_abs", "shadow/returns/max_abs", "shadow/rewards/max_abs"} <= differences.keys()
    assert all(value <= 1e-6 for value in differences.values())
    assert stats["shadow/calls"] == 1 and stats["shadow/errors"] == 0


@pytest.mark.parametrize(("every", "looked"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_the_first_batch_and_every_nth_after_it_are_looked_at(every: int, looked: int) -> None:
    assert stats_after(build("eager", every), calls=5)["shadow/calls"] == looked


def test_a_full_override_is_compared_with_the_default_computation() -> None:
    compute = build("eager", compute={"implementation": "tests.footguns.override.as_given"})
    out = compute(BATCH)
    assert not out["advantages"].any()
    assert compute.stats()["shadow/advantages/max_abs"] == 2


# ---- against a function ----


def test_the_largest_difference_of_a_channel_is_reported() -> None:
    stats = stats_after(build("off_by_a_half"))
    assert stats["shadow/advantages/max_abs"] == 0.5 and stats["shadow/loss_mask/max_abs"] == 0


def test_only_channels_that_the_function_has_are_compared() -> None:
    stats = stats_after(build("off_by_a_half"))
    assert {name.split("/")[1] for name in stats if name.endswith("abs")} == {"advantages", "loss_mask"}


def test_fields_and_extras_of_a_result_object_are_compared() -> None:
    stats = stats_after(build("like_a_result"))
    assert stats["shadow/returns/max_abs"] == 2 and stats["shadow/is_truncated/max_abs"] == 0


def test_what_a_function_leaves_off_the_active_tokens_does_not_matter() -> None:
    stats = stats_after(build("garbage_elsewhere"))
    assert stats["shadow/advantages/max_abs"] == 0


def test_a_nan_on_an_active_token_is_an_infinite_difference() -> None:
    assert stats_after(build("nan_on_a_token"))["shadow/advantages/max_abs"] == math.inf


def test_another_loss_mask_shows_wherever_it_is() -> None:
    assert stats_after(build("other_mask"))["shadow/loss_mask/max_abs"] == 1


def test_the_largest_difference_is_kept_and_the_last_one_told_apart() -> None:
    compute = build("eager")
    gaps = [0.25, 3.0]
    compute._shadow._opinion = lambda admitted: {"advantages": same_batch() + gaps.pop()}
    compute(BATCH)
    compute(BATCH)
    stats = compute.stats()
    assert stats["shadow/advantages/max_abs"] == 3 and stats["shadow/advantages/last_abs"] == 0.25


def same_batch() -> torch.Tensor:
    return compiled_adv.build(ACTOR)(BATCH)["advantages"]


def test_the_function_gets_metadata_and_per_call_values() -> None:
    GIVEN.clear()
    compute = build("notes")
    meta = meta_of(2, groups=[group(1, 1)])
    compute(BATCH, meta, advantage_shaping_mode="gvpo", gvpo_zero_penalty=0.75)
    (inputs,) = GIVEN
    assert inputs.meta.traj_group_sizes == [2]
    assert (inputs.advantage_shaping_mode, inputs.gvpo_zero_penalty) == ("gvpo", 0.75)


GIVEN: list[AdvantageInputs] = []


def notes(inputs: AdvantageInputs) -> dict[str, torch.Tensor]:
    GIVEN.append(inputs)
    return same(inputs)


# ---- nothing reaches the result ----

BROKEN = ("raises", "leaves", "wrong_shape", "no_tensors", "nothing", "writes")


@pytest.mark.parametrize("against", BROKEN)
def test_an_error_of_the_shadow_is_counted_and_the_result_is_the_same(against: str) -> None:
    compute = build(against)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        out = [compute(BATCH) for _ in range(3)]
    assert compute.stats()["shadow/errors"] == 3
    assert all(torch.equal(each["advantages"], same_batch()) for each in out)
    assert BATCH["rewards"].tolist() == [1, -1]


def test_an_error_of_the_shadow_is_warned_of_once() -> None:
    compute = build("raises")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compute(BATCH)
        compute(BATCH)
    (one,) = [each for each in caught if issubclass(each.category, RuntimeWarning)]
    assert "no such thing" in str(one.message)


def test_an_error_of_the_shadow_does_not_break_a_call_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert stats_after(build("raises"))["shadow/errors"] == 1


def test_what_the_shadow_draws_does_not_change_later_random_numbers() -> None:
    compute = build("draws")
    torch.manual_seed(random.randrange(1000))
    state = torch.get_rng_state()
    compute(BATCH)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_refused_batch_is_not_looked_at() -> None:
    compute = build("eager")
    with pytest.raises(compiled_adv.CompiledAdvError):
        compute(BATCH | {"rewards": torch.tensor([math.nan, 0])})
    assert compute.stats()["shadow/calls"] == 0 and compute.stats()["calls"] == 0


# ---- what is refused at build ----


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="eager"):
        build("eagre")


def test_a_path_that_leads_nowhere_is_refused_at_build() -> None:
    with pytest.raises(PluginNotFound, match="actor.advantage.shadow.against"):
        build("is_not_there")


# ---- stats ----


def test_stats_have_the_same_names_at_every_step() -> None:
    compute = compiled_adv.build(ACTOR)
    before = compute.stats()
    compute(BATCH)
    assert compute.stats().keys() == before.keys()
    assert before.keys() == {"calls", "seconds", *(f"warnings/{name}" for name in WARNINGS)}


def test_stats_are_floats() -> None:
    assert all(type(value) is float for value in stats_after(build("eager")).values())


def test_stats_count_the_rows_of_each_warning_of_the_last_call() -> None:
    compute = compiled_adv.build(ACTOR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compute(rows("pgp", "pgp", "pgg"))
        assert compute.stats()["warnings/outcome_on_masked_token"] == 2
        compute(rows("pgg"))
    assert compute.stats()["warnings/outcome_on_masked_token"] == 0
    assert compute.stats()["calls"] == 2 and compute.stats()["seconds"] > 0


# ---- the measure ----


@pytest.mark.parametrize(
    ("mine", "theirs", "want"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [1.0], math.inf),
        ([1.0], [math.nan], math.inf),
        ([math.nan], [math.nan], 0.0),
        ([], [], 0.0),
    ],
)
def test_a_difference_is_never_nan(mine: list[float], theirs: list[float], want: float) -> None:
    assert near(torch.tensor(largest(torch.tensor(mine), torch.tensor(theirs))), want) or want == math.inf
    assert largest(torch.tensor(mine), torch.tensor(theirs)) == want


def test_a_difference_is_taken_where_the_mask_is_set() -> None:
    assert largest(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == 0


# ---- the compiled backend ----


def test_a_compiled_result_is_compared_with_the_eager_one() -> None:
    compute = build("eager", backend="compiled", compiled={"buckets": {"rows": [2], "tokens": [3]}})
    stats = stats_after(compute, calls=2)
    assert stats["shadow/calls"] == 2 and stats["shadow/errors"] == 0
    assert stats["shadow/advantages/max_abs"] <= 1e-6
