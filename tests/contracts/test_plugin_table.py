"""What a user's function may do and what becomes of it: one outcome for each, the same on every backend.

A row says where the function runs under the compiled backend (placing.py), or the error that it ends in. Every row is
called twice on each backend, so that what only a second call shows (another graph, a counter) is seen too.
"""

import multiprocessing
import random
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import compiled_adv
from compiled_adv import errors
from compiled_adv.show import describe_functions
from tests.contracts import table_plugins

PROCESS, OUTCOME, COMPUTE = "process_adv_shaping", "outcome_reward_shaping", "compute"
BACKENDS = ("reference", "eager", "compiled")
BUCKET = {"rows": [4], "tokens": [128]}


@dataclass(frozen=True)
class Row:
    """A function, and what becomes of it: its place in the compiled backend, or the class of its error."""

    name: str
    outcome: str
    slot: str = PROCESS
    kwargs: tuple[tuple[str, Any], ...] = ()


ROWS = (
    # traced, and declared pad-safe: a part of the Program
    Row("safe", "program", kwargs=(("factor", 3.0),)),
    Row("by_config", "program"),
    Row("by_global", "program"),
    Row("closure", "program"),
    Row("decorated", "program"),
    Row("one_row", "program"),
    Row("reads_tokens", "program", OUTCOME, (("weight", 0.5),)),
    Row("best_of_prompt", "program", OUTCOME),
    Row("everything_safe", "program", COMPUTE),
    # traced, but not declared pad-safe: compiled between two segments
    Row("pure", "compiled", kwargs=(("factor", 3.0),)),
    Row("batch_mean", "compiled"),
    Row("by_mask_on_a_copy", "compiled"),
    Row("in_numpy", "compiled"),
    Row("in_float64", "compiled"),
    Row("its_input", "compiled"),
    Row("Scaled.method", "compiled"),
    Row("instance", "compiled"),
    Row("remembered", "compiled"),
    Row("everything", "compiled", COMPUTE),
    # not traced: as it is, between two segments
    Row("token_loop", "eager"),
    Row("python_lists", "eager"),
    Row("item", "eager"),
    Row("branch", "eager"),
    Row("compressed", "eager"),
    Row("torch_random", "eager"),
    Row("python_random", "eager"),
    Row("numpy_random", "eager"),
    Row("counter", "eager"),
    Row("appends", "eager"),
    Row("prints", "eager"),
    Row("logs", "eager"),
    Row("slow", "eager"),
    Row("empties_its_kwargs", "eager", kwargs=(("steps", [2.0, 3.0]),)),
    Row("raises_on_nan", "eager"),
    Row("reads_lists", "eager", OUTCOME),
    Row("reads_strings", "eager", OUTCOME),
    Row("everything_and_prints", "eager", COMPUTE),
    # refused
    Row("writes", "PluginWroteInput"),
    Row("writes_through_a_view", "PluginWroteInput"),
    Row("writes_through_numpy", "PluginWroteInput"),
    Row("raises", "PluginRaised"),
    Row("wrong_shape", "PluginResult"),
    Row("wrong_dtype", "PluginResult"),
    Row("wrong_device", "PluginResult"),
    Row("no_tensor", "PluginResult"),
    Row("nothing", "PluginResult"),
    Row("not_finite", "PluginResult"),
    Row("not_finite_where_zero", "PluginResult"),
    Row("coroutine", "PluginResult"),
    Row("generator", "PluginResult"),
    Row("Scaled", "PluginNotFound"),
    Row("no_such_function", "PluginNotFound"),
)


def a_batch() -> dict[str, Any]:
    """Three rows of seven tokens, in a bucket of 4 x 128."""
    generator = torch.Generator().manual_seed(3)
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]])
    return {
        "input_ids": torch.ones(3, 7, dtype=torch.int64),
        "attention_mask": torch.tensor([[1] * 6 + [0], [1] * 4 + [0] * 3, [1] * 7]),
        "loss_mask": loss_mask,
        "rewards": torch.tensor([1.0, -0.5, 0.25]),
        "logprobs": -torch.rand(3, 7, generator=generator),
        "values": torch.randn(3, 7, generator=generator),
        "is_truncated": torch.tensor([False, True, False]),
        "scores": torch.randn(3, 7, generator=generator),
        "tasks": ["a", "bc", "def"],
    }


META = {"n_trajs": 2, "traj_group_sizes": [2, 1], "traj_seqlens": [7, 7], "rollout_groups": None}


def built(row: Row, backend: str, **compiled: Any) -> compiled_adv.Compute:
    choice = {"implementation": f"tests.contracts.table_plugins.{row.name}", "kwargs": dict(row.kwargs)}
    advantage = {"backend": backend, row.slot: choice, "compiled": {"buckets": BUCKET, **compiled}}
    return compiled_adv.build({"actor": {"discount": 0.9, "gae_lambda": 0.8, "advantage": advantage}})


def outcome(row: Row, backend: str) -> tuple[list[dict[str, Any]] | str, str]:
    """Two results, or the class of the error; and the function's place, for compiled."""
    table_plugins.STEPS[0] = 0
    table_plugins.CALLS.clear()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compute = built(row, backend)
            results = [compute(a_batch(), META) for _ in range(2)]
        except errors.CompiledAdvError as error:
            assert row.name in str(error)
            return type(error).__name__, ""
    if backend != "compiled":
        return results, ""
    (kind,) = compute._known
    (found,) = describe_functions(compute._placed(kind))
    return results, found["where"]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, Any]] | str]:
    """By the plain loops, each row once; an override has none but itself."""
    return {}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_function_ends_as_stated(row: Row, backend: str, reference: dict[str, Any]) -> None:
    got, where = outcome(row, backend)
    if row.outcome[0].isupper():
        assert got == row.outcome
        return
    assert isinstance(got, list), got
    assert where in ("", row.outcome)
    want = reference.setdefault(row.name, got)  # reference comes first
    for have, expected in zip(got, want, strict=True):
        assert have.keys() == expected.keys()
        for key, x in expected.items():
            if isinstance(x, torch.Tensor):
                assert have[key].dtype == x.dtype, key
                torch.testing.assert_close(have[key], x, rtol=1e-5, atol=1e-5, msg=key)


def test_a_function_is_called_once_for_each_call_of_a_compiled_instance() -> None:
    outcome(Row("appends", "eager"), "compiled")
    assert len(table_plugins.CALLS) == 2


def test_a_false_claim_of_pad_safety_is_named_by_the_compiled_backend() -> None:
    row = Row("false_claim", "PadUnsafe")
    assert isinstance(outcome(row, "eager")[0], list)
    assert outcome(row, "compiled")[0] == "PadUnsafe"


def test_a_result_that_is_not_finite_on_a_later_batch_is_named_by_a_compiled_program() -> None:
    compute = built(Row("not_finite_where_zero", "program"), "compiled")
    batch = a_batch() | {"rewards": torch.full((3,), 0.5), "values": torch.full((3, 7), 0.25)}
    batch["is_truncated"], batch["loss_mask"] = torch.tensor([True] * 3), torch.tensor([[0] + [1] * 6] * 3)
    batch["attention_mask"] = torch.ones(3, 7, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(errors.PluginResult, match="non-finite"):
            compute(batch, META)


# ---- a worker that cannot import what its driver can ----


def _build_in_a_worker(path: str, queue: Any) -> None:
    for backend in BACKENDS:
        advantage = {"backend": backend, PROCESS: {"implementation": path, "kwargs": {}}}
        try:
            compiled_adv.build({"actor": {"advantage": advantage}})
            queue.put("built")
        except errors.CompiledAdvError as error:
            queue.put(f"{type(error).__name__} {error}")


def test_a_module_missing_in_a_spawned_worker_is_named_there_when_it_builds() -> None:
    module = types.ModuleType("only_in_the_driver")
    module.shaping = table_plugins.pure  # type: ignore[attr-defined]
    sys.modules["only_in_the_driver"] = module
    path = "only_in_the_driver.shaping"
    try:
        compiled_adv.build({"actor": {"advantage": {PROCESS: {"implementation": path, "kwargs": {}}}}})
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        worker = context.Process(target=_build_in_a_worker, args=(path, queue))
        worker.start()
        worker.join(120)
        assert worker.exitcode == 0
    finally:
        del sys.modules["only_in_the_driver"]
    for _ in BACKENDS:
        assert queue.get().startswith("PluginNotFound") and path.startswith("only_in_the_driver")
