"""compiled-adv warmup compiles what a config declares."""

import json
import subprocess
import sys
from pathlib import Path

CONFIG = {"actor": {"kl_ctl": 0.0, "advantage": {"compiled": {"buckets": {"rows": [4], "tokens": [128]}}}}}


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from compiled_adv.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_declared_bucket_is_compiled(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    done = shell("warmup", "--config", str(config), "--channels", "", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["executables"] == 1


def test_an_endless_ladder_is_refused_in_one_message() -> None:
    done = shell("warmup")
    assert done.returncode == 2 and "max_rows" in done.stderr and "Traceback" not in done.stderr


def test_a_mistyped_channel_names_the_nearest() -> None:
    done = shell("warmup", "--channels", "value")
    assert done.returncode == 2 and "values" in done.stderr
