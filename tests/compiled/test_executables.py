"""Which executables are made, kept and counted: warm-up, freezing, eviction, overflow. Their numbers are elsewhere."""

import warnings

import pytest
import torch

import compiled_adv
from compiled_adv.channel import OPTIONAL
from compiled_adv.errors import NoBucket, NotWarm
from tests.compiled.shared import CRITIC, GRPO, TURNS, assert_right, case_of, configured, run
from tests.random_cases import Template

TWO_BY_TWO = {"rows": [4, 8], "tokens": [16, 32]}
SHAPED = Template({"kl_ctl": 0.0}, frozenset({"token_rewards"}))

pytestmark = pytest.mark.usefixtures("interpreted")


def build(template: Template = GRPO, **compiled: object) -> compiled_adv.Compute:
    return compiled_adv.build(configured(template.actor, **{"buckets": TWO_BY_TWO} | compiled))


# ---- one executable for a bucket and a kind of batch ----


def test_a_bucket_is_compiled_at_its_first_batch_and_not_again():
    compute = build()
    for rows, tokens, compiles in ((4, 16, 1), (1, 1, 1), (3, 15, 1), (5, 16, 2), (4, 17, 3), (8, 32, 4), (5, 20, 4)):
        assert_right(compute, case_of(GRPO, rows, tokens))
        assert compute.cache.info().compiles == compiles, (rows, tokens)


def test_another_kind_of_batch_is_another_program():
    compute = build(CRITIC)
    run(compute, case_of(CRITIC))
    run(compute, case_of(Template(CRITIC.actor, CRITIC.keys - {"values"})))
    assert compute.cache.info().compiles == 2


def test_keys_that_nothing_reads_are_no_kind():
    compute = build()
    case = case_of(GRPO)
    run(compute, case)
    run(
        compute,
        case.with_batch(case.batch | {"images": [b"png"], "note": torch.zeros(3), "turn_ids": torch.zeros(5, 12)}),
    )
    assert compute.cache.info().compiles == 1


def test_a_mode_is_a_kind_only_where_it_changes_something():
    compute = build()
    for mode in ("additive", "gvpo", "process_weighted"):
        run(compute, case_of(GRPO), advantage_shaping_mode=mode)
    assert compute.cache.info().compiles == 1
    compute = build(SHAPED)
    for mode in ("additive", "gvpo", "additive"):
        run(compute, case_of(SHAPED), advantage_shaping_mode=mode)
    assert compute.cache.info().compiles == 2


def test_two_instances_share_nothing():
    first, second = build(), build()
    run(first, case_of(GRPO))
    assert second.cache.info().compiles == 0
    run(second, case_of(GRPO))
    assert first.cache.info().misses == second.cache.info().misses == 1


# ---- what is kept and counted ----


def test_info_counts_hits_misses_compiles_seconds_and_padding():
    compute = build()
    for rows, tokens in ((4, 16), (2, 8), (8, 32)):
        run(compute, case_of(GRPO, rows, tokens))
    info = compute.cache.info()
    assert (info.hits, info.misses, info.compiles, info.executables, info.evictions, info.fallbacks) == (
        1,
        2,
        2,
        2,
        0,
        0,
    )
    assert info.compile_seconds > 0
    computed = 4 * 16 + 4 * 16 + 8 * 32
    assert info.padding == pytest.approx(1 - (4 * 16 + 2 * 8 + 8 * 32) / computed)


def test_a_refused_batch_counts_no_padding():
    compute = build()
    case = case_of(GRPO)
    with pytest.raises(compiled_adv.CompiledAdvError):
        run(compute, case.with_batch(case.batch | {"rewards": torch.full((5,), torch.nan)}))
    assert compute.cache.info().padding == 0.0


def test_the_least_recently_used_executable_goes():
    compute = build(max_buckets=2)
    small, wide, tall = case_of(GRPO, 4, 16), case_of(GRPO, 4, 32), case_of(GRPO, 8, 16)
    for case in (small, wide, small, tall):  # wide goes
        run(compute, case)
    assert (compute.cache.info().executables, compute.cache.info().evictions) == (2, 1)
    run(compute, small)
    assert compute.cache.info().compiles == 3
    assert_right(compute, wide)
    assert compute.cache.info().compiles == 4


def test_above_every_bucket_the_exact_shape_is_compiled():
    compute = build()
    assert_right(compute, case_of(GRPO, 9, 33))
    info = compute.cache.info()
    assert info.compiles == 1 and info.padding == 0.0


def test_above_every_bucket_is_an_error_where_configured():
    compute = build(overflow="error")
    with pytest.raises(NoBucket, match="9 rows x 33 tokens"):
        run(compute, case_of(GRPO, 9, 33))
    assert_right(compute, case_of(GRPO, 8, 32))


# ---- warm-up ----


def test_warm_up_compiles_every_declared_bucket():
    compute = build()
    compute.warmup(example=case_of(GRPO).batch)
    assert compute.cache.info().compiles == 4
    for rows, tokens in ((1, 1), (8, 32), (4, 20), (7, 3)):
        assert_right(compute, case_of(GRPO, rows, tokens))
    assert compute.cache.info().compiles == 4


def test_warm_up_starts_with_the_largest_bucket():
    compute, seen = build(), []
    compute.warmup(channels=(), progress=lambda jobs: seen.extend(jobs) or jobs)
    sizes = [bucket.rows * bucket.tokens for _, bucket in seen]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 4


def test_warm_up_reports_its_progress_job_by_job():
    compute, done = build(), []

    def bar(jobs):
        for i, job in enumerate(jobs):
            done.append((i, len(jobs), compute.cache.info().compiles))
            yield job

    compute.warmup(channels=(), progress=bar)
    assert done == [(0, 4, 0), (1, 4, 1), (2, 4, 2), (3, 4, 3)]


def test_warm_up_by_channels_is_warm_up_by_example():
    for template in (GRPO, CRITIC, TURNS):
        by_example, by_channels = build(template), build(template)
        case = case_of(template)
        by_example.warmup(example=case.batch)
        by_channels.warmup(channels=[key for key in OPTIONAL if key in case.batch])
        for compute in (by_example, by_channels):
            compiles = compute.cache.info().compiles
            assert compiles > 0
            run(compute, case)
            assert compute.cache.info().compiles == compiles


def test_a_key_that_is_none_in_the_example_is_absent():
    compute = build(CRITIC)
    without = Template(CRITIC.actor, CRITIC.keys - {"values"})
    compute.warmup(example=case_of(without).batch | {"values": None})
    run(compute, case_of(without))
    assert compute.cache.info().compiles == 4


def test_warm_up_without_a_word_is_for_every_channel():
    compute = build(CRITIC)
    compute.warmup()
    every = Template(CRITIC.actor, CRITIC.keys | {"token_rewards", "values", "ref_logp", "turn_ids"}, "gvpo")
    compiles = compute.cache.info().compiles
    run(compute, case_of(every))
    assert compute.cache.info().compiles == compiles


@pytest.mark.parametrize(
    "modes, actor",
    [
        (3, {}),
        (2, {"mask_no_eos_with_zero": True}),
        (1, {"token_rewards_as_adv": False}),
        (1, {"advantage": {"process_adv_shaping": {"implementation": "gvpo"}}}),
    ],
)
def test_warm_up_is_for_every_mode_that_is_legal(modes, actor):
    template = Template({"kl_ctl": 0.0} | actor, frozenset({"token_rewards"}))
    compute = build(template)
    compute.warmup(channels=("token_rewards",))
    assert compute.cache.info().compiles == modes * 4


def test_warm_up_with_mopd_in_the_example_is_for_batches_with_it():
    template = Template(GRPO.actor, GRPO.keys | {"mopd_teacher_logp_sum"})
    compute = build(template)
    compute.warmup(example=case_of(template).batch)
    run(compute, case_of(template))
    assert compute.cache.info().compiles == 4


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_warm_up_works_in_every_grad_mode(mode):
    compute = build()
    with mode():
        compute.warmup(channels=())
    with torch.enable_grad():
        assert_right(compute, case_of(GRPO))
    assert compute.cache.info().compiles == 4


def test_warm_up_with_an_example_needs_no_declared_bucket():
    """An example has a shape: its own bucket is compiled."""
    compute = compiled_adv.build(configured(GRPO.actor, buckets="auto"))
    compute.warmup(example=case_of(GRPO, 5, 12).batch)
    assert compute.cache.info().compiles == 1
    run(compute, case_of(GRPO, 6, 100))
    assert compute.cache.info().compiles == 1


def test_warm_up_with_nothing_to_compile_is_an_error():
    """Without boundaries or an example it would do nothing, and freezing would then refuse every batch."""
    compute = compiled_adv.build(configured(GRPO.actor, buckets="auto"))
    with pytest.raises(compiled_adv.CompiledAdvError, match="max_rows"):
        compute.warmup(channels=(), freeze=True)


def test_warm_up_on_another_backend_compiles_nothing():
    advantage = {"backend": "eager", "compiled": {"buckets": TWO_BY_TWO}}
    compute = compiled_adv.build({"actor": GRPO.actor | {"advantage": advantage}})
    compute.warmup(example=case_of(GRPO).batch, freeze=True)
    assert compute.cache.info().compiles == 0
    run(compute, case_of(GRPO))


# ---- freezing ----


def frozen(**compiled: object) -> compiled_adv.Compute:
    compute = build(CRITIC, **compiled)
    compute.warmup(example=case_of(CRITIC).batch, freeze=True)
    return compute


MISSING = {
    "kind": case_of(Template(CRITIC.actor, CRITIC.keys - {"values"})),
    "shape": case_of(CRITIC, 9, 33),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_executable_is_an_error_after_freezing(what):
    compute = frozen()
    with pytest.raises(NotWarm) as caught:
        run(compute, MISSING[what])
    assert ("9x33" in str(caught.value)) == (what == "shape")
    assert_right(compute, case_of(CRITIC))


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_executable_runs_eager_where_configured(what):
    compute = frozen(on_missing="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            assert_right(compute, MISSING[what])
    assert compute.cache.info().fallbacks == 3 and compute.cache.info().compiles == 4


def test_missing_executables_push_none_out():
    compute = frozen(on_missing="eager", max_buckets=4)
    for rows in range(9, 15):
        run(compute, case_of(CRITIC, rows, 40))
    before = compute.cache.info()
    for rows, tokens in ((4, 16), (4, 32), (8, 16), (8, 32)):
        run(compute, case_of(CRITIC, rows, tokens))
    after = compute.cache.info()
    assert after.fallbacks == before.fallbacks == 6 and after.evictions == 0


def test_what_is_warm_still_runs_after_freezing():
    compute = frozen()
    for rows, tokens in ((1, 1), (8, 32), (4, 20)):
        assert_right(compute, case_of(CRITIC, rows, tokens))
    assert compute.cache.info().compiles == 4 and compute.cache.info().fallbacks == 0


def test_warming_up_again_thaws():
    compute = frozen()
    compute.warmup(example=MISSING["kind"].batch)
    assert_right(compute, MISSING["kind"])


# ---- masks ----


@pytest.mark.parametrize("first", [torch.int32, torch.int64, torch.bool, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("then", [torch.int32, torch.int64, torch.bool, torch.float32, torch.float64], ids=str)
def test_masks_may_come_in_another_dtype_than_the_first(first, then):
    compute = build()
    for dtype in (first, then, first):
        case = case_of(GRPO)
        assert_right(compute, case.with_batch(case.batch | {"loss_mask": case.batch["loss_mask"].to(dtype) * 2}))
    assert compute.cache.info().compiles == 1
