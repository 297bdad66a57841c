"""The script that will run once on a GPU, seen by nobody: its checks run here on the CPU, small and uncompiled."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from perf import device_check
from perf.device_check import CHECKS, Clock, Sizes, run_checks, table

CPU = torch.device("cpu")
SMALL = Sizes(
    ladder=((16, 64),),
    small=(12, 50),
    bucket=(16, 64),
    long_row=(2, 3000),
    bandwidth_bytes=1 << 16,
    pool_tokens=(64, 128),
    pool_rows=8,
    golden=2,
    repeats=2,
)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ADV_BACKEND", "compiled")
    monkeypatch.setattr(
        "compiled_adv.executable.compile_graph", lambda module, example, **_: lambda *channels: module(*channels)
    )


def clock(seconds: float = 60.0) -> Clock:
    return Clock(time.monotonic() + seconds)


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "golden"])
def test_a_check_finds_nothing_wrong(name):
    found = CHECKS[name][0](CPU, SMALL, clock())
    assert not found.get("wrong"), found
    json.dumps(found)


def test_golden_cases_pass_as_far_as_time_goes():
    found = CHECKS["golden"][0](CPU, SMALL, clock(3.0))
    assert found["ran"] > 0 and not found["wrong"]


@pytest.mark.parametrize("name", ["replay", "buckets", "capture_beside_allocation"])
def test_a_wrong_number_is_seen(name, monkeypatch):
    import compiled_adv

    honest = compiled_adv.Compute.__call__

    def off(self, *args, **kwargs):
        out = honest(self, *args, **kwargs)
        if self.spec.advantage.backend == "compiled":
            out["advantages"] = out["advantages"] + 0.01
        return out

    monkeypatch.setattr(compiled_adv.Compute, "__call__", off)
    assert CHECKS[name][0](CPU, SMALL, clock())["wrong"]


def test_outputs_that_change_later_are_seen(monkeypatch):
    import compiled_adv

    honest, first = compiled_adv.Compute.__call__, []

    def lent(self, *args, **kwargs):
        out = honest(self, *args, **kwargs)
        if self.spec.advantage.backend == "compiled":
            if first:
                first[0].add_(1)
            first[:] = [out["advantages"]]
        return out

    monkeypatch.setattr(compiled_adv.Compute, "__call__", lent)
    assert "an output of an earlier call has changed" in CHECKS["replay"][0](CPU, SMALL, clock())["wrong"]


def test_a_check_that_raises_is_recorded_and_the_next_one_runs(monkeypatch):
    def raises(*_):
        raise RuntimeError("a reason")

    monkeypatch.setattr(device_check, "CHECKS", {"one": (raises, 5), "two": (lambda *_: {"wrong": ["x"]}, 5)})
    written = []
    record = run_checks(CPU, SMALL, 60, (), lambda record: written.append(json.dumps(record)))
    assert [found["status"] for found in record["checks"].values()] == ["raised", "failed"]
    assert len(written) == 2 and "a reason" in written[0]
    assert "a reason" in table(record)


def test_no_check_starts_without_time(monkeypatch):
    monkeypatch.setattr(device_check, "CHECKS", {"one": (lambda *_: {}, 5)})
    assert run_checks(CPU, SMALL, 0, (), lambda _: None)["checks"]["one"]["status"] == "skipped"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_ends_well(tmp_path):
    script = Path(device_check.__file__)
    command = [sys.executable, str(script), "--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and "no CUDA device" in run.stdout
    assert not (tmp_path / "out.json").exists()
