"""AReaL 1.0.4 with our computation behind its PPOActor: its own functions are what the numbers are held to."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

areal = pytest.importorskip("areal", reason="make peers")

import areal_workers  # noqa: E402
from areal.api.cli_args import PPOActorConfig, load_expr_config  # noqa: E402
from areal.infra.rpc.serialization import serialize_value  # noqa: E402
from areal.trainer.ppo.actor import PPOActor  # noqa: E402
from areal_cases import NAMES, actor_of, copied, differences, random_settings, random_trajectories  # noqa: E402

from compiled_adv.errors import ConfigError, ConflictingSettings, InvalidValue, UnknownKey, UnsupportedTrainer  # noqa: E402
from compiled_adv.integrations import areal as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

OWN = {name: vars(PPOActor)[name] for name in ("__init__", "_compute_advantages", "compute_advantages", "ppo_update")}
GROUPED = {"mean_level": "group", "std_level": "group", "group_size": 2}


@pytest.fixture(autouse=True)
def areal_as_installed() -> Iterator[None]:
    yield
    ours.disable()


def own_functions() -> bool:
    return all(vars(PPOActor)[name] is own for name, own in OWN.items())


# ---- the numbers ----


def old_and_new(seed: int, **enabled: Any) -> dict[str, float]:
    settings, rollouts = random_settings(seed), random_trajectories(seed)
    ours.disable()
    expected = actor_of(settings).compute_advantages(copied(rollouts))
    ours.enable(**enabled)
    return differences(actor_of(settings).compute_advantages(copied(rollouts)), expected)


@pytest.mark.parametrize("seed", range(200))
def test_a_random_batch_has_its_numbers_keys_and_shapes(seed: int) -> None:
    worst = old_and_new(seed)
    assert max(worst.values()) <= 1e-5, worst


@pytest.mark.parametrize("seed", [1, 7])
def test_a_random_batch_has_its_numbers_when_compiled(seed: int) -> None:
    assert max(old_and_new(seed).values()) <= 1e-5


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("where", ["reward_norm", "adv_norm"])
def test_the_only_row_of_a_group_keeps_its_value_under_leave_one_out(where: str, unbiased: bool) -> None:
    norm = {"mean_level": "group", "std_level": "group", "mean_leave1out": True, "std_unbiased": unbiased}
    rollouts = random_trajectories(3)
    expected = actor_of({where: norm}).compute_advantages(copied(rollouts))
    ours.enable()
    got = actor_of({where: norm}).compute_advantages(copied(rollouts))
    assert max(differences(got, expected).values()) <= 1e-5
    assert any(t["tot_rewards"].abs().max() > 0.5 for t in got)


def test_whole_number_rewards_stay_whole() -> None:
    rollouts = [t | {"rewards": t["rewards"].round().long()} for t in random_trajectories(4)]
    expected = actor_of({}).compute_advantages(copied(rollouts))
    ours.enable()
    got = actor_of({}).compute_advantages(copied(rollouts))
    assert max(differences(got, expected).values()) <= 1e-5
    assert got[0]["rewards"].dtype == expected[0]["rewards"].dtype == torch.int64


def test_the_batch_itself_gets_the_results_and_its_tensors_are_not_written_to() -> None:
    settings = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 0.5}
    settings |= {"max_new_tokens": 6, "recompute_logprob": True}
    (rollout,) = random_trajectories(11)[:1]
    ours.enable()
    batch, kept = dict(rollout), copied([rollout])[0]
    assert actor_of(settings)._compute_advantages(batch) is batch
    assert {"advantages", "returns", "kl_rewards", "tot_rewards"} <= batch.keys()
    assert not torch.equal(batch["rewards"], kept["rewards"]) and not torch.equal(batch["prox_logp"], kept["prox_logp"])
    assert all(torch.equal(rollout[name], x) for name, x in kept.items() if isinstance(x, torch.Tensor))


def test_what_a_run_changes_on_its_actor_is_followed() -> None:
    rollouts = random_trajectories(0)
    own = actor_of({"kl_ctl": 0.1, "kl_estimator": "k2"})
    own.kl_ctl = 0.7
    expected = own.compute_advantages(copied(rollouts))
    ours.enable()
    actor = actor_of({"kl_ctl": 0.1, "kl_estimator": "k2"})
    first = ours.compute_of(actor)
    assert first is ours.compute_of(actor)
    actor.kl_ctl = 0.7
    assert max(differences(actor.compute_advantages(copied(rollouts)), expected).values()) <= 1e-5
    assert first is not ours.compute_of(actor)


def test_a_stage_may_be_a_users_function_that_sees_the_rollout_and_the_actors_config() -> None:
    rollouts = random_trajectories(5)
    expected = actor_of({}).compute_advantages([t | {"rewards": t["rewards"] / 2} for t in copied(rollouts)])
    ours.enable(outcome_reward_shaping={"implementation": "areal_plugins.halved"})
    got = actor_of({}).compute_advantages(copied(rollouts))
    assert max(differences(got, expected).values()) <= 1e-5


# ---- enabling and disabling ----


def test_disabling_gives_its_own_functions_back_and_both_may_be_repeated() -> None:
    ours.disable()
    ours.enable()
    ours.enable()
    assert vars(PPOActor)["_compute_advantages"] is ours._compute_advantages
    assert all(vars(PPOActor)[name] is OWN[name] for name in ("compute_advantages", "ppo_update"))
    ours.disable()
    ours.disable()
    assert own_functions()


def test_an_actor_from_before_is_served_too() -> None:
    rollouts = random_trajectories(6)
    actor = actor_of({"adv_norm": GROUPED})
    expected = actor.compute_advantages(copied(rollouts))
    ours.enable()
    assert max(differences(actor.compute_advantages(copied(rollouts)), expected).values()) <= 1e-5
    assert ours.compute_of(actor).stats()["calls"] == 1


def test_what_was_built_goes_with_its_actor() -> None:
    ours.enable()
    actor = actor_of({})
    actor.compute_advantages(random_trajectories(0))
    built, actor_gone = weakref.ref(ours.compute_of(actor)), weakref.ref(actor)
    del actor
    gc.collect()
    assert actor_gone() is None and built() is None


def other_normalization(self: Any, x: Any, *more: Any, **named: Any) -> Any:
    return x


@pytest.mark.parametrize("name", ["_compute_advantages", "__init__"])
def test_another_version_is_refused_by_name_and_left_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOActor, name, other_normalization)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9.9")
    before = dict(vars(PPOActor))
    with pytest.raises(UnsupportedTrainer, match=rf"(?s)areal 9.9.9.*PPOActor\.{name}.*areal 1\.0\.4"):
        ours.enable()
    assert dict(vars(PPOActor)) == before


def test_a_missing_function_is_another_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("areal.utils.data.KLEstimator")
    with pytest.raises(UnsupportedTrainer, match="KLEstimator"):
        ours.enable()
    assert own_functions()


def test_what_was_put_over_ours_is_not_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ours.enable()
    with monkeypatch.context() as patched:
        patched.setattr(PPOActor, "_compute_advantages", other_normalization)
        with pytest.raises(UnsupportedTrainer, match="something else"):
            ours.disable()


# ---- what it cannot give ----

NOT_GIVEN = {
    "turn_ids": {"estimator": {"implementation": "turn_gae"}},
    "token_rewards": {"process_adv_shaping": {"implementation": "gvpo"}},
    "is_truncated": {"rules": "strict"},
}


@pytest.mark.parametrize("lacking", NOT_GIVEN)
def test_settings_without_data_fail_at_enable(lacking: str) -> None:
    with pytest.raises(ConflictingSettings, match=lacking):
        ours.enable(**NOT_GIVEN[lacking])
    assert own_functions()


def test_an_unknown_setting_fails_at_enable() -> None:
    with pytest.raises(UnknownKey, match="backend"):
        ours.enable(backnd="eager")
    assert own_functions()


@dataclasses.dataclass
class TurnConfig(PPOActorConfig):
    gae_timestep_unit: str = "turn"


def test_turn_gae_in_the_actors_config_fails_when_the_actor_is_built() -> None:
    ours.enable()
    with pytest.raises(ConflictingSettings, match="turn_ids"):
        PPOActor(TurnConfig(**NAMES), None)


def test_a_wrong_number_fails_when_the_actor_is_built() -> None:
    ours.enable()
    with pytest.raises(InvalidValue, match="reward_clip"):
        actor_of({"reward_clip": -1.0})


# ---- its config, and its workers ----


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The least that AReaL asks for, and a block of ours."""
    names = f"{{experiment_name: test, trial_name: test, fileroot: {tmp_path}}}"
    path = tmp_path / "config.yaml"
    path.write_text(f"""
experiment_name: test
trial_name: test
tokenizer_path: none
cluster: {{fileroot: {tmp_path}, name_resolve: {{type: nfs, nfs_record_root: {tmp_path}/resolve}}}}
stats_logger: {names}
saver: {names}
evaluator: {names}
recover: {names}
train_dataset: {{path: none, type: rl, batch_size: 4}}
rollout: {{backend: 'sglang:d1'}}
actor:
  experiment_name: test
  trial_name: test
  backend: fsdp:d1
  kl_ctl: 0.0
  reward_norm: {{mean_level: group, std_level: group, group_size: 2}}
  advantage:
    backend: eager
    outcome_reward_shaping: {{implementation: areal_plugins.halved}}
""")
    return path


@pytest.fixture
def actor_config(config_file: Path) -> Any:
    from compiled_adv.integrations.areal_config import GRPOConfig

    return load_expr_config(["--config", str(config_file)], GRPOConfig)[0].actor


def test_the_config_keeps_its_block(actor_config: Any) -> None:
    assert isinstance(actor_config, PPOActorConfig) and actor_config.reward_norm.group_size == 2
    shaping = {"implementation": "areal_plugins.halved"}
    assert actor_config.advantage == {"backend": "eager", "outcome_reward_shaping": shaping}


def test_a_wrong_block_fails_where_the_config_is_read(config_file: Path) -> None:
    from compiled_adv.integrations.areal_config import GRPOConfig

    config_file.write_text(config_file.read_text().replace("halved", "quartered"))
    with pytest.raises(ConfigError, match="quartered"):
        load_expr_config(["--config", str(config_file)], GRPOConfig)


def test_a_block_in_the_config_and_one_in_enable_are_refused(actor_config: Any) -> None:
    ours.enable(backend="eager")
    with pytest.raises(ConflictingSettings, match="advantage"):
        PPOActor(actor_config, None)


@pytest.mark.parametrize("way", ["json", "pickle"])
def test_a_spawned_worker_that_gets_the_config_computes_here(way: str, actor_config: Any) -> None:
    """Both ways in which AReaL hands it over: its HTTP workers get JSON, its Ray workers a pickle."""
    rollouts = random_trajectories(8)
    ours.patch()
    expected = PPOActor(actor_config, None).compute_advantages(copied(rollouts))
    sent = json.dumps(serialize_value(actor_config)) if way == "json" else pickle.dumps(actor_config)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got, calls = pool.apply(areal_workers.computed_by_a_worker, (sent, copied(rollouts)))
    assert max(differences(got, expected).values()) == 0 and calls == 1


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=300))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """The port of a worker as AReaL's local scheduler starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"experiment-name": "test", "trial-name": "test", "role": "actor", "worker-index": 0, "port": port}
    names |= {"name-resolve-type": "nfs", "nfs-record-root": tmp_path / "resolve", "fileroot": tmp_path}
    words = [str(word) for name, value in names.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "areal.infra.rpc.rpc_server", *words]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log)
    try:
        while worker.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:
        worker.kill()
        worker.wait()


def test_areals_own_worker_server_computes_here(server: int, actor_config: Any) -> None:
    made = {"engine": "areal_workers.LocalActor", "engine_name": "actor/0", "init_args": []}
    post(server, "/create_engine", made | {"init_kwargs": serialize_value({"config": actor_config})})
    called = {"method": "calls_served", "engine_name": "actor/0", "kwargs": {}}
    answer = post(server, "/call", called | {"args": serialize_value([random_trajectories(8)])})
    assert answer["status"] == "success" and answer["result"] == 1


# ---- ranks ----


def norms_over_ranks(seed: int) -> bool:
    """A batch-level norm, and something generated on either rank: its own function waits forever for one without."""
    norms = [norm for name in ("reward_norm", "adv_norm") if (norm := random_settings(seed)[name])]
    generated = [sum(int(t["loss_mask"].sum()) for t in random_trajectories(2 * seed + rank)) for rank in (0, 1)]
    return any("batch" in (norm["mean_level"], norm["std_level"]) for norm in norms) and min(generated) > 0


OVER_RANKS = [seed for seed in range(80) if norms_over_ranks(seed)][:24]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, float]]]:
    """By rank and seed; the first case is compiled."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")

    def case(n: int, seed: int, rank: int) -> tuple[str, dict[str, Any], Any]:
        return "eager" if n else "compiled", random_settings(seed), random_trajectories(2 * seed + rank)

    given = [(rank, store, [case(n, seed, rank) for n, seed in enumerate(OVER_RANKS)]) for rank in (0, 1)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        seen = pool.starmap_async(areal_workers.on_one_rank, given, chunksize=1).get(timeout=600)
    return [dict(zip(OVER_RANKS, of_rank, strict=True)) for of_rank in seen]


@pytest.mark.parametrize("seed", OVER_RANKS)
def test_batch_level_norms_are_of_all_ranks_as_its_own(seed: int, of_two_ranks: Any) -> None:
    assert max(of_rank[seed]["own"] for of_rank in of_two_ranks) <= 1e-5


def test_what_two_ranks_compute_is_not_what_one_computes_alone(of_two_ranks: Any) -> None:
    apart = [min(of_rank[seed]["alone"] for of_rank in of_two_ranks) > 1e-3 for seed in OVER_RANKS]
    assert sum(apart) > 0.8 * len(apart)
