"""AReaL's plug-in point: the full override that a user names in the config of an AReaL that has it."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import compiled_adv
from compiled_adv import AdvantageInputs, AdvantageResult
from compiled_adv.batch import as_meta
from compiled_adv.errors import (
    BadKwargs,
    CompiledAdvError,
    MissingKey,
    UnknownKey,
    UnsupportedTrainer,
)
from compiled_adv.integrations import areal
from tests.integrations import areal_rank

pytestmark = pytest.mark.filterwarnings("ignore")

README = Path(__file__).resolve().parents[2] / "README.md"

PATH = "compiled_adv.integrations.areal.compute"


def pasted() -> dict[str, Any]:
    """The block that README gives for an AReaL with the plug-in point."""
    blocks = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    (text,) = (block for block in blocks if PATH in block)
    return yaml.safe_load(text)["actor"]


@dataclass
class ActorConfig:
    """A stand-in for AReaL's own: a dataclass whose `advantage` block names the override."""

    advantage: dict[str, Any]
    kl_ctl: float = 0.05
    reward_norm: Any = field(default_factory=lambda: SimpleNamespace(mean_level="group", std_level="group"))
    adv_norm: Any = None
    temperature: float = 1.0


def config_of(kwargs: Mapping[str, Any]) -> ActorConfig:
    return ActorConfig({"compute": {"implementation": PATH, "kwargs": dict(kwargs)}})


def rollout(**more: Any) -> dict[str, Any]:
    generated = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]])
    return {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": generated,
        "logprobs": -0.25 * generated,
        "ref_logp": -0.5 * generated,
        "rewards": torch.tensor([1.0, 0.0]),
        "is_truncated": torch.tensor([False, False]),
        "turn_ids": torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, -1]]),
        "token_rewards": torch.tensor([[0.0, 0.5, 0.5, -1.0], [0.0, 0.25, 0.0, 0.0]]),
    } | more


META = {"n_trajs": 1, "traj_group_sizes": [2], "traj_seqlens": [4]}


def inputs_of(config: Any, data: Mapping[str, Any] | None = None, mode: str = "additive") -> AdvantageInputs:
    """Made as AReaL makes them: the raw rollout, read-only."""
    return AdvantageInputs(data or rollout(), config, as_meta(META), mode, 0.2, 0.4, 1e-6)


def as_stages(config: ActorConfig) -> Any:
    """The same computation by our own entry: the override's kwargs as the block itself."""
    block = config.advantage["compute"]["kwargs"]
    return compiled_adv.build(SimpleNamespace(**vars(config) | {"advantage": block}))


def assert_equal(result: Any, out: Mapping[str, Any]) -> None:
    for name in ("advantages", "returns", "loss_mask", "logprobs", "rewards", "tot_rewards", "kl_rewards"):
        assert torch.equal(getattr(result, name), out[name].float()), name
    for name, x in result.extras.items():
        assert torch.equal(x, out[name]), name


def test_what_a_user_pastes_gives_the_numbers_of_its_stages() -> None:
    actor = pasted()
    kwargs = actor["advantage"]["compute"]["kwargs"]
    data, meta = rollout(), META
    out = compiled_adv.build({"actor": actor})(data, meta)
    want = compiled_adv.build({"actor": actor | {"advantage": kwargs}})(data, meta)
    assert all(torch.equal(out[name], want[name]) for name in want if isinstance(want[name], torch.Tensor))


CHOICES = {
    "nothing": {},
    "stages": {
        "estimator": {"implementation": "turn_gae"},
        "process_adv_shaping": {"implementation": "gvpo", "kwargs": {"negative_scale": 0.5}},
        "backend": "reference",
    },
    "strict": {"rules": "strict", "compiled": {"max_buckets": 2}},
}


@pytest.mark.parametrize("kwargs", CHOICES.values(), ids=CHOICES)
def test_kwargs_are_the_keys_of_the_block(kwargs: dict[str, Any]) -> None:
    config = config_of(kwargs)
    assert_equal(areal.compute(inputs_of(config), **kwargs), as_stages(config)(rollout(), META))


def test_the_calls_shaping_mode_counts() -> None:
    config = config_of({})
    want = as_stages(config)(rollout(), META, advantage_shaping_mode="gvpo")
    assert_equal(areal.compute(inputs_of(config, mode="gvpo")), want)


def test_extras_are_what_the_computation_makes() -> None:
    data = rollout(mopd_teacher_logp_sum=torch.zeros(2), prox_logp=torch.zeros(2, 4))
    made = {"is_truncated", "mopd_behavior_logprobs", "prox_logp", "ref_logp"}
    assert set(areal.compute(inputs_of(config_of({}), data)).extras) == made
    decoupled = config_of({})
    decoupled.use_decoupled_loss = True  # type: ignore[attr-defined]
    assert set(areal.compute(inputs_of(decoupled, rollout(prox_logp=torch.zeros(2, 4)))).extras) == {
        "is_truncated",
        "ref_logp",
    }


def test_whole_number_rewards_come_back_as_floating_point() -> None:
    result = areal.compute(inputs_of(config_of({}), rollout(rewards=torch.tensor([1, 0]))))
    assert result.rewards.dtype == torch.float32 and result.rewards.tolist() == [1.0, 0.0]


# ---- AReaL's own classes ----


@dataclass
class TheirResult:
    advantages: Any
    returns: Any
    loss_mask: Any
    logprobs: Any
    rewards: Any
    tot_rewards: Any
    kl_rewards: Any
    extras: Any = None


@pytest.fixture
def plug_in_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An AReaL that has it."""
    module = ModuleType(areal.PLUG_IN_POINT)
    parts = areal.PLUG_IN_POINT.split(".")
    for n in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(parts[n - 1]))
    monkeypatch.setitem(sys.modules, areal.PLUG_IN_POINT, module)
    areal._result_class.cache_clear()
    yield module
    areal._result_class.cache_clear()


def test_the_result_is_areals_own_where_it_has_one(plug_in_point: ModuleType) -> None:
    plug_in_point.AdvantageResult = TheirResult  # type: ignore[attr-defined]
    assert type(areal.compute(inputs_of(config_of({})))) is TheirResult


def test_the_result_is_ours_elsewhere() -> None:
    assert type(areal.compute(inputs_of(config_of({})))) is AdvantageResult


def test_a_result_class_with_other_fields_is_refused(plug_in_point: ModuleType) -> None:
    plug_in_point.AdvantageResult = type("AdvantageResult", (), {})  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedTrainer, match="other fields"):
        areal.compute(inputs_of(config_of({})))


def their_outcome(inputs: Any) -> Any:
    assert type(inputs.config) is ActorConfig
    return SimpleNamespace(rewards=inputs.data["rewards"] * inputs.config.temperature)


def test_a_stages_function_gets_the_trainers_config_and_may_answer_in_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("their_plugins")
    module.outcome = their_outcome  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_plugins", module)
    kwargs = {"outcome_reward_shaping": {"implementation": "their_plugins.outcome"}}
    config = config_of(kwargs)
    config.temperature = 3.0
    assert areal.compute(inputs_of(config), **kwargs).rewards.tolist() == [3.0, 0.0]


# ---- builds ----


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every Compute that is built."""
    made: list[Any] = []
    build = areal.Compute

    def counted(spec: Any, ranks: Any) -> Any:
        made.append(weakref.ref(built := build(spec, ranks)))
        return built

    monkeypatch.setattr(areal, "Compute", counted)
    return made


def test_one_build_for_a_config_and_kwargs(builds: list[Any]) -> None:
    config, other = config_of({}), config_of({})
    for _ in range(3):
        areal.compute(inputs_of(config))
        areal.compute(inputs_of(config), backend="reference")
    areal.compute(inputs_of(other))
    assert len(builds) == 3


def test_a_changed_config_is_built_anew(builds: list[Any]) -> None:
    config = config_of({})
    areal.compute(inputs_of(config))
    config.kl_ctl = 0.5
    config.reward_norm.std_level = None
    assert_equal(areal.compute(inputs_of(config)), as_stages(config)(rollout(), META))
    assert len(builds) == 2


def test_a_config_that_changes_all_the_time_keeps_few_builds(builds: list[Any]) -> None:
    config = config_of({})
    for step in range(20):
        config.kl_ctl = step / 100
        areal.compute(inputs_of(config))
    gc.collect()
    assert sum(built() is not None for built in builds) <= areal._Builds.MOST


def test_builds_go_with_their_config(builds: list[Any]) -> None:
    config = config_of({})
    areal.compute(inputs_of(config))
    gone, held = weakref.ref(config), len(areal._builds._of)
    del config
    gc.collect()
    assert gone() is None and builds[0]() is None and len(areal._builds._of) == held - 1


# ---- ranks ----


def test_batch_level_norms_are_of_all_ranks_and_only_these_make_ranks_meet(tmp_path: Path) -> None:
    by_batch = areal_rank.ActorConfig(adv_norm=SimpleNamespace(mean_level="batch", std_level="batch"))
    by_group = areal_rank.ActorConfig(adv_norm=SimpleNamespace(mean_level="group", std_level="group"))
    batches = [rollout(), rollout(rewards=torch.tensor([3.0, -7.0]))]
    given = [
        (rank, str(tmp_path / "store"), inputs_of(by_batch, batch), inputs_of(by_group, batch))
        for rank, batch in enumerate(batches)
    ]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        seen = pool.starmap_async(areal_rank.advantages, given, chunksize=1).get(timeout=300)
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    meta = {"n_trajs": 2, "traj_group_sizes": [2, 2], "traj_seqlens": [4, 4]}
    whole = compiled_adv.build(by_batch)(rows, meta)["advantages"].split(2)
    for rank, batch in enumerate(batches):
        torch.testing.assert_close(seen[rank]["together"], whole[rank], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen[rank]["alone"], compiled_adv.build(by_batch)(batch, META)["advantages"])
    assert torch.equal(seen[0]["by_group"], compiled_adv.build(by_group)(batches[0], META)["advantages"])


# ---- refused ----


@pytest.mark.parametrize(
    "kwargs, error",
    [
        ({"estimater": {}}, BadKwargs),
        ({"shadow": {"against": "eager"}}, BadKwargs),
    ],
)
def test_unknown_kwargs_fail_when_the_config_is_built(kwargs: dict[str, Any], error: type[CompiledAdvError]) -> None:
    with pytest.raises(error):
        compiled_adv.build({"actor": {"advantage": {"compute": {"implementation": PATH, "kwargs": kwargs}}}})


def test_a_wrong_block_and_a_missing_tensor_say_where() -> None:
    with pytest.raises(UnknownKey, match=r"actor\.advantage\.compiled\.bucket"):
        areal.compute(inputs_of(config_of({})), compiled={"bucket": "auto"})
    data = rollout()
    del data["turn_ids"]
    with pytest.raises(MissingKey, match="turn_ids"):
        areal.compute(inputs_of(config_of({}), data), estimator={"implementation": "turn_gae"})


def test_kwargs_survive_json_unchanged() -> None:
    """AReaL hands them over so."""
    kwargs = json.loads(json.dumps(CHOICES["stages"]))
    before = copy.deepcopy(kwargs)
    areal.compute(inputs_of(config_of(kwargs)), **kwargs)
    assert kwargs == before
