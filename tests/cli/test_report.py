"""`run --report` and report.write: one page about what was computed, whatever the batch holds. Seen in a browser by
tests/browser/test_report.py."""

import pytest
import torch
from safetensors.torch import save_file

import compiled_adv
from compiled_adv import report
from compiled_adv.errors import CompiledAdvError, OutputFailed, PluginRaised, PluginResult
from tests.cli.conftest import prompt

EVIL = "<script>alert(1)</script>"


def compute(**advantage):
    actor = {"reward_norm": {"mean_level": "group", "group_size": 2}}
    actor["advantage"] = {"backend": "eager", "stats": True, **advantage}
    return compiled_adv.build({"actor": actor})


def test_run_writes_a_page_with_a_section_for_each_batch(rollouts, shell, tmp_path):
    page = tmp_path / "page.html"
    result = shell("run", "--backend", "eager", "--rollouts", rollouts, "--report", page)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert all(part in text for part in ("mean reward", "group_001", "Advantages by token", "Pipeline"))


def test_a_report_that_is_there_is_kept_unless_it_may_be_overwritten(rollouts, shell, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    words = ("run", "--backend", "eager", "--rollouts", rollouts, "--report", page)
    assert shell(*words).exit_code == 2 and page.read_text() == "mine"
    assert shell(*words, "--overwrite").exit_code == 0 and page.read_text() != "mine"


def test_bad_input_leaves_no_report(rollouts, shell, tmp_path):
    save_file({"input_ids": torch.zeros(1, 2)}, rollouts / "group_002.safetensors")
    page = tmp_path / "page.html"
    assert shell("run", "--backend", "eager", "--rollouts", rollouts, "--report", page).exit_code == 2
    assert not page.exists()


def test_names_and_texts_of_others_stay_text(tmp_path):
    page = tmp_path / "page.html"
    save_file(prompt(2, 6, 0.0), tmp_path / f"{EVIL.replace('/', '')}.safetensors")
    report.write(page, compute(), prompt(2, 6, 0.0), decode=lambda ids: f"{EVIL}\u202e\ud800")
    text = page.read_text()
    assert EVIL not in text and "&lt;script&gt;" in text and "\u202e" not in text


def test_write_gives_what_compute_gives_and_warns_of_nothing_on_the_side(tmp_path, recwarn):
    batch = prompt(2, 6, 0.0)
    out = report.write(tmp_path / "page.html", compute(), batch)
    assert torch.equal(out["advantages"], compute()(batch)["advantages"])


def test_a_page_does_not_grow_with_its_batch(tmp_path):
    sizes = []
    for rows in (64, 512):
        each = prompt(2, 600, 0.0)
        batch = {key: x.repeat(rows // 2, *[1] * (x.ndim - 1)) for key, x in each.items()}
        meta = {"n_trajs": rows // 2, "traj_group_sizes": [2] * (rows // 2), "traj_seqlens": [600] * (rows // 2)}
        report.write(tmp_path / f"{rows}.html", compute(), batch, meta | {"rollout_groups": None})
        sizes.append((tmp_path / f"{rows}.html").stat().st_size)
    assert sizes[1] < sizes[0] + 50_000


@pytest.mark.parametrize("change", [{"loss_mask": torch.zeros(2, 6, dtype=torch.int64)}, {"values": None}])
def test_what_a_batch_lacks_is_left_blank(tmp_path, change):
    report.write(tmp_path / "page.html", compute(), prompt(2, 6, 0.0) | change)
    assert "–" in (tmp_path / "page.html").read_text()


def test_without_measurements_the_page_is_written_all_the_same(tmp_path):
    report.write(tmp_path / "page.html", compute(stats=False), prompt(2, 6, 0.0))
    assert "Advantages by token" in (tmp_path / "page.html").read_text()


def test_a_page_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OutputFailed, CompiledAdvError)):
        report.write(tmp_path / "file" / "page.html", compute(), prompt(2, 6, 0.0))


def test_an_override_measures_nothing_and_the_page_says_so(tmp_path):
    made = compute(compute={"implementation": "tests.footguns.override.as_given"})
    report.write(tmp_path / "page.html", made, prompt(2, 6, 0.0))
    text = (tmp_path / "page.html").read_text()
    assert "tests.footguns.override.as_given, replaces the whole computation" in text
    assert "explained variance" not in text and "Advantages by token" in text


def test_the_compiled_backend_is_reported_like_the_eager_one(tmp_path):
    counts = []
    for backend in ("eager", "compiled"):
        report.write(tmp_path / "page.html", compute(backend=backend), prompt(2, 6, 0.0))
        text = (tmp_path / "page.html").read_text()
        counts.append([text.count(part) for part in ("<figure>", 'class="tile ', "<tr>", "<rect")])
    assert counts[0] == counts[1] and min(counts[0]) > 0


def test_the_picture_is_of_the_graph_that_the_batch_took(tmp_path):
    for batch, there in ((prompt(2, 6, 0.0), False), (prompt(2, 6, 0.0) | {"token_rewards": torch.zeros(2, 6)}, True)):
        report.write(tmp_path / "page.html", compute(), batch)
        assert ("AlignedRewards" in (tmp_path / "page.html").read_text()) == there


def raises(ids):
    raise KeyError(ids[0])


@pytest.mark.parametrize("decode, error", [(raises, PluginRaised), (5, PluginRaised), (lambda ids: None, PluginResult)])
def test_a_decode_that_breaks_is_one_error_and_leaves_no_page(tmp_path, decode, error):
    with pytest.raises(error, match="decode"):
        report.write(tmp_path / "page.html", compute(), prompt(2, 6, 0.0), decode=decode)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["group_000.safetensors", "group_001.safetensors"])
def test_a_report_does_not_take_the_place_of_a_rollout_or_a_result(rollouts, shell, tmp_path, name):
    before, out = (rollouts / name).read_bytes(), tmp_path / "out"
    words = ("run", "--backend", "eager", "--rollouts", rollouts, "--out", out, "--overwrite", "--report")
    for page in (rollouts / name, out / name, "."):
        result = shell(*words, page)
        assert result.exit_code == 2 and "OutputFailed" in result.output, result.output
    assert (rollouts / name).read_bytes() == before and not out.exists()


def test_rewards_that_are_equal_and_huge_have_bars_of_some_width():
    block = report._histogram("Rewards", torch.full((4,), 1e30), "reward", "rollouts", "@blue")
    assert '"width":0.0,' not in block
