"""`compiled-adv run` and `explain`: what they print and write, and that bad input gets one message and exit code 2."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

import compiled_adv
from compiled_adv import config_file
from compiled_adv.channel import OUTPUTS
from compiled_adv.rollouts import read_groups
from tests.cli.conftest import prompt

Shell = Callable[..., Result]


def facts(result: Result) -> dict[str, Any]:
    """The JSON that was printed, in which no NaN may stand."""
    assert result.exit_code == 0, result.stderr

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def fails(result: Result, *words: str) -> None:
    """Exit code 2, nothing on standard output, and one message with these words."""
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def config(tmp_path: Path, **actor: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"actor": actor}))
    return path


# ---- the table ----


def test_without_rollouts_the_embedded_set_gets_a_table_per_kind(shell: Shell) -> None:
    result = shell("run")
    assert result.exit_code == 0, result.stderr
    for word in ("single_turn", "115", "3,987", "multi_turn", "48", "2,680", "advantages", "returns", "is_truncated"):
        assert word in result.stdout


def test_the_table_counts_the_rows_of_each_warning(shell: Shell) -> None:
    # The even multi-turn groups end in a tool message: six groups of four rows.
    lines = [line.split() for line in shell("run").stdout.splitlines()]
    assert ["outcome_on_masked_token", "24"] in lines


def test_the_configured_stages_decide_the_numbers(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    no_kl = config(tmp_path, kl_ctl=0.0)
    (batch,) = facts(shell("run", "--config", no_kl, "--rollouts", rollouts, "--json"))["batches"]
    assert batch["channels"]["kl_rewards"]["min"] == batch["channels"]["kl_rewards"]["max"] == 0.0


def test_json_counts_rows_active_tokens_and_groups(shell: Shell, rollouts: Path) -> None:
    (batch,) = facts(shell("run", "--rollouts", rollouts, "--json"))["batches"]
    assert (batch["name"], batch["rows"], batch["groups"]) == ("rollouts", 5, 2)
    assert batch["active_tokens"] == (4 + 3) + (6 + 5 + 4)
    assert batch["tokens_per_second"] == batch["active_tokens"] / batch["seconds"]


def test_moments_are_over_active_tokens_or_over_rows(shell: Shell, rollouts: Path) -> None:
    (batch,) = facts(shell("run", "--rollouts", rollouts, "--json"))["batches"]
    compute = compiled_adv.build("default")
    with pytest.warns(compiled_adv.AdvantageWarning) if batch["warnings"] else torch.no_grad():
        outs = compute.compute_advantages(read_groups(sorted(rollouts.iterdir())))
    mask = [out["loss_mask"] != 0 for out in outs]
    for name, over in (("advantages", "tokens"), ("returns", "tokens"), ("rewards", "rows")):
        parts = [out[name][m] if over == "tokens" else out[name] for out, m in zip(outs, mask, strict=True)]
        numbers = torch.cat(parts).double()
        moments = batch["channels"][name]
        assert moments["over"] == over
        wanted = (numbers.mean(), numbers.std(correction=0), numbers.min(), numbers.max())
        assert [moments[key] for key in ("mean", "std", "min", "max")] == pytest.approx([float(x) for x in wanted])


def test_channels_come_in_the_order_of_the_channel_table(shell: Shell, rollouts: Path) -> None:
    (batch,) = facts(shell("run", "--rollouts", rollouts, "--json"))["batches"]
    assert [*batch["channels"]] == [name for name in OUTPUTS if name in batch["channels"]]


def test_what_passes_through_is_no_output_channel(shell: Shell, rollouts: Path) -> None:
    (batch,) = facts(shell("run", "--rollouts", rollouts, "--json"))["batches"]
    assert not {"input_ids", "attention_mask", "values"} & batch["channels"].keys()


def test_a_batch_without_active_tokens_has_no_moments(shell: Shell, tmp_path: Path) -> None:
    tensors = prompt(2, 6, 0.0)
    save_file(tensors | {"loss_mask": torch.zeros_like(tensors["loss_mask"])}, tmp_path / "g.safetensors")
    (batch,) = facts(shell("run", "--rollouts", tmp_path / "g.safetensors", "--json"))["batches"]
    assert batch["active_tokens"] == 0
    assert batch["channels"]["advantages"] == {"over": "tokens", "mean": None, "std": None, "min": None, "max": None}


def test_backends_print_the_same_numbers(shell: Shell, rollouts: Path) -> None:
    runs = [facts(shell("run", "--rollouts", rollouts, "--json", "--backend", b)) for b in ("reference", "eager")]
    assert [run["backend"] for run in runs] == ["reference", "eager"]
    first, second = (run["batches"][0]["channels"] for run in runs)
    assert first.keys() == second.keys()
    for name, moments in first.items():
        assert second[name] == pytest.approx(moments, abs=1e-6)


def test_nothing_but_the_table_is_printed_into_a_pipe(shell: Shell) -> None:
    assert shell("run").stderr == ""


# ---- result files ----


def test_out_gets_one_file_per_group_under_the_same_name(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    assert shell("run", "--rollouts", rollouts, "--out", tmp_path / "out").exit_code == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["group_000.safetensors", "group_001.safetensors"]


def test_a_result_file_holds_the_group_as_the_api_returns_it(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    more = {"row_counts": torch.tensor([1, 2]), "references": torch.tensor([math.nan, 0.5])}
    save_file(load_file(rollouts / "group_001.safetensors") | more, rollouts / "group_001.safetensors")
    shell("run", "--rollouts", rollouts, "--out", tmp_path / "out")
    written = read_groups(sorted((tmp_path / "out").iterdir()))
    outs = compiled_adv.build("default").compute_advantages(read_groups(sorted(rollouts.iterdir())))
    assert [group.get("rollout_group") for group in written] == [out.get("rollout_group") for out in outs]
    for group, out in zip(written, outs, strict=True):
        assert group.keys() == out.keys()
        assert all(torch.equal(group[key], out[key]) for key in out if key != "rollout_group")


def test_results_of_sub_folders_keep_their_folder(shell: Shell, tmp_path: Path) -> None:
    assert shell("run", "--out", tmp_path / "out").exit_code == 0
    counts = [len([*(tmp_path / "out" / kind).iterdir()]) for kind in ("single_turn", "multi_turn")]
    assert counts == [15, 12]


def test_a_pt_group_gives_a_pt_result(shell: Shell, tmp_path: Path) -> None:
    torch.save(prompt(2, 6, 0.0), tmp_path / "g.pt")
    assert shell("run", "--rollouts", tmp_path / "g.pt", "--out", tmp_path / "out").exit_code == 0
    assert "advantages" in torch.load(tmp_path / "out" / "g.pt", weights_only=True)


def test_a_second_run_into_the_same_folder_needs_overwrite(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    words = ("run", "--rollouts", rollouts, "--out", tmp_path / "out")
    assert shell(*words).exit_code == 0
    fails(shell(*words), "OutputExists", "--overwrite")
    assert shell(*words, "--overwrite").exit_code == 0


# ---- bad input ----


def test_a_missing_rollout_folder_is_named(shell: Shell, tmp_path: Path) -> None:
    fails(shell("run", "--rollouts", tmp_path / "nowhere"), "RolloutFile", "nowhere")


def test_a_missing_config_is_named(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / ("deep" * 20) / "nowhere.yaml"
    fails(shell("run", "--config", path), "ConfigNotFound", str(path))


def test_an_unknown_stage_is_answered_with_the_nearest(shell: Shell, tmp_path: Path) -> None:
    bad = config(tmp_path, advantage={"estimator": {"implementation": "turn_gea"}})
    fails(shell("run", "--config", bad), "turn_gae")


def test_an_unknown_backend_is_refused(shell: Shell) -> None:
    fails(shell("run", "--backend", "fast"), "fast")


def test_a_corrupt_file_is_named_and_nothing_is_written(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    content = (rollouts / "group_001.safetensors").read_bytes()
    (rollouts / "group_001.safetensors").write_bytes(content[:-3])
    fails(shell("run", "--rollouts", rollouts, "--out", tmp_path / "out"), "RolloutFile", "group_001.safetensors")
    assert not (tmp_path / "out").exists()


def test_bad_numbers_name_their_folder_and_nothing_is_written(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    tensors = prompt(2, 6, 0.0)
    tensors["rewards"][1] = math.nan
    (rollouts / "zz").mkdir()
    save_file(tensors, rollouts / "zz" / "g.safetensors")
    fails(shell("run", "--rollouts", rollouts, "--out", tmp_path / "out"), "NonFinite", "rewards", "zz")
    assert not (tmp_path / "out").exists()


def test_a_failing_disk_is_one_message(
    shell: Shell, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    fails(shell("run", "--rollouts", rollouts, "--out", tmp_path / "out"), "OutputFailed", "No space left")


def test_the_next_run_after_a_bad_one_works(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    fails(shell("run", "--rollouts", tmp_path / "nowhere"))
    assert shell("run", "--rollouts", rollouts).exit_code == 0


# ---- explain ----


def test_explain_prints_what_the_api_explains(shell: Shell) -> None:
    assert shell("explain").stdout.rstrip("\n") == compiled_adv.build("default").explain().rstrip("\n")


def test_explain_json_is_what_the_api_describes(shell: Shell) -> None:
    printed = json.loads(shell("explain", "--format", "json").stdout)
    assert printed == json.loads(json.dumps(compiled_adv.build("default").explain(format="json")))


def test_explain_of_a_bad_config_is_one_message(shell: Shell, tmp_path: Path) -> None:
    fails(shell("explain", "--config", config(tmp_path, kl_estimator="k9")), "k9", "k1")


# ---- recipes by name ----


def test_help_lists_the_recipes(shell: Shell) -> None:
    listed = shell("--help").stdout
    assert all(name in listed for name in config_file.recipes())


def test_a_recipe_is_run_by_its_name(shell: Shell, rollouts: Path) -> None:
    (batch,) = facts(shell("run", "--config", "rloo", "--rollouts", rollouts, "--json"))["batches"]
    # 1 where the only other row has 0: outcomes less the others' mean, to which the critic adds what it takes
    assert batch["channels"]["returns"]["max"] == pytest.approx(1.0)
