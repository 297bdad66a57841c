"""Captured graphs, on a fake device: what a GPU would replay, and with what in its buffers."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import compiled_adv
from compiled_adv import cudagraph
from compiled_adv.admit import admit, admit_call
from compiled_adv.bucket import Bucket
from compiled_adv.channel import HOST
from compiled_adv.cudagraph import WARM_UP, Buffer, Cuda, Device, Graph, NotGraphed
from compiled_adv.errors import NotCapturable, UnknownName
from compiled_adv.inductor import settings_of
from tests.compiled.fake_cuda import FakeCuda
from tests.compiled.shared import CRITIC, GRPO, TURNS, assert_right, assert_same, case_of, configured, run, together


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, interpreted: list[str]) -> Iterator[FakeCuda]:
    """Batches on the CPU count as on this device; segments run as they are."""
    fake = FakeCuda()
    device = Device(fake)
    monkeypatch.setattr("compiled_adv.executable.device_of", lambda _: device)
    yield fake


def graphed(actor: dict, **compiled: object) -> compiled_adv.Compute:
    return compiled_adv.build(configured(actor, cuda_graphs="on", **compiled))


def a_graph(cuda: FakeCuda, segment, names, example, **how) -> Graph:
    return Graph(segment, names, example, Bucket(4, 8), Device(cuda), **how)


# ---- one graph ----


def test_warm_up_comes_before_the_capture_and_replay_alone_after_it(cuda):
    calls = []
    graph = a_graph(cuda, lambda x: (calls.append(1), x[0] + 1)[1:], ["values"], [torch.zeros(4, 8)])
    assert cuda.log == ["warm up", "capture"] and len(calls) == WARM_UP + 1
    graph([torch.ones(4, 8)], [None])
    assert cuda.log[2:] == ["wait", "replay", "record"] and len(calls) == WARM_UP + 1


def test_a_call_reads_its_own_batch_and_not_the_one_of_the_capture(cuda):
    graph = a_graph(cuda, lambda x: (x[0] * 2,), ["values"], [torch.zeros(4, 8)])
    for number in (3.0, 5.0, 7.0):
        assert graph([torch.full((4, 8), number)], [None])[0].unique().tolist() == [2 * number]


def test_the_callers_tensors_are_neither_kept_nor_written_to(cuda):
    given = torch.ones(3, 5)
    graph = a_graph(cuda, lambda x: (x[0].add_(1),), ["values"], [torch.zeros(4, 8)])
    graph([given], [(3, 5)])
    assert torch.equal(given, torch.ones(3, 5))
    kept = weakref.ref(given)
    del given
    assert kept() is None


@pytest.mark.parametrize("name, pad", [("values", 0.0), ("turn_ids", -1), ("group_of_row", -1)])
def test_a_smaller_batch_finds_padding_where_a_larger_one_was(cuda, name, pad):
    ndim = 1 if name == "group_of_row" else 2
    dtype = torch.float32 if name == "values" else torch.int64
    graph = a_graph(cuda, lambda x: (x[0].clone(),), [name], [torch.full((4, 8)[:ndim], pad, dtype=dtype)])
    for size in ((4, 8), (2, 3), (3, 7), (1, 8), (4, 1), (2, 2)):
        batch = torch.full(size[:ndim], 5, dtype=dtype)
        (seen,) = graph([batch], [None])
        expected = torch.full((4, 8)[:ndim], pad, dtype=dtype)
        expected[tuple(map(slice, batch.shape))] = 5
        assert torch.equal(seen, expected), size


def test_a_copy_that_failed_leaves_no_stale_tail():
    buffer = Buffer(torch.zeros(4, 8), 0.0, (0, 0))
    buffer.put(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        buffer.put(torch.ones(3, 9))
    buffer.x[2:3] = 1  # as far as it may have come
    buffer.put(torch.ones(1, 1))
    assert buffer.x.sum() == 1


def test_channels_from_the_host_lie_in_one_piece_of_memory(cuda):
    names = ["facts", "values", "gvpo", "group_of_row"]
    example = [torch.zeros(6, dtype=torch.int32), torch.zeros(4, 8), torch.zeros(3), torch.zeros(4, dtype=torch.int64)]
    graph = a_graph(cuda, lambda x: (x[0] + 1, x[2] + 1, x[3] + 1), names, example)
    assert graph._packed is not None and graph._packed.numel() == 3 * cudagraph.ALIGN
    given = [torch.arange(6, dtype=torch.int32), torch.zeros(4, 8), torch.ones(3), torch.arange(4)]
    facts, gvpo, groups = graph(given, [None] * 3)
    assert (facts.tolist(), gvpo.tolist(), groups.tolist()) == ([1, 2, 3, 4, 5, 6], [2.0] * 3, [1, 2, 3, 4])


def test_earlier_outputs_stay(cuda):
    graph = a_graph(cuda, lambda x: (x[0] + 1,), ["values"], [torch.zeros(4, 8)])
    outputs = [graph([torch.full((2, 3), float(i))], [(2, 3)])[0] for i in range(3)]
    assert [x.unique().tolist() for x in outputs] == [[1.0], [2.0], [3.0]]
    assert len({x.untyped_storage().data_ptr() for x in outputs}) == 3


def test_views_hold_until_the_next_call_alone(cuda):
    graph = a_graph(cuda, lambda x: (x[0] + 1,), ["values"], [torch.zeros(4, 8)], views=True)
    (first,) = graph([torch.zeros(2, 3)], [(2, 3)])
    (second,) = graph([torch.ones(2, 3)], [(2, 3)])
    assert first.data_ptr() == second.data_ptr() and first.unique().tolist() == [2.0]


def graphs_on(device: Device, count: int, **how) -> list[Graph]:
    def segment(x):
        return (x[0] + 1,)

    return [Graph(segment, ["values"], [torch.zeros(4, 8)], Bucket(4, 8), device, **how) for _ in range(count)]


def test_graphs_share_a_pool_and_a_view_is_never_in_it(cuda):
    graphs_on_device = graphs_on(Device(cuda), 2), graphs_on(Device(cuda), 2, views=True)
    assert all(graphs_on_device) and cuda.pools[0] is cuda.pools[1]
    assert len({id(pool) for pool in cuda.pools}) == 3


def test_a_pool_that_no_graph_is_left_to_own_is_not_used_again(cuda):
    device = Device(cuda)
    for _ in range(2):
        graphs_on(device, 1)
    assert cuda.pools[0] is not cuda.pools[1]


def test_a_pool_in_which_a_capture_failed_is_not_used_again(cuda):
    device = Device(cuda)
    kept = graphs_on(device, 1)
    cuda.fails = "a reason"
    with pytest.raises(NotGraphed):
        graphs_on(device, 1)
    cuda.fails = None
    graphs_on(device, 1)
    assert kept and cuda.pools[0] is cuda.pools[1] is not cuda.pools[2]


def test_no_memory_for_the_buffers_is_no_graph(cuda, monkeypatch):
    def none(size):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(cuda, "buffer", none)
    with pytest.raises(NotGraphed, match="out of memory"):
        a_graph(cuda, lambda x: (x[0] + 1,), ["facts"], [torch.zeros(6)])


def test_the_next_replay_waits_for_one_whose_outputs_found_no_memory(cuda, monkeypatch):
    (graph,) = graphs_on(Device(cuda), 1)
    monkeypatch.setattr(graph, "_taken", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        graph([torch.zeros(4, 8)], [None])
    assert cuda.log[-2:] == ["replay", "record"]


def test_torch_is_told_of_a_capture_that_cuda_has_spoiled(monkeypatch):
    """Otherwise the process's next torch.cuda.empty_cache() fails."""
    told = []

    @contextmanager
    def spoiled(graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        yield
        raise RuntimeError("capture was invalidated")

    device = Cuda.__new__(Cuda)
    device.device, device.stream = torch.device("cuda", 1), None
    monkeypatch.setattr(torch.cuda, "graph", spoiled)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: told.append(given), raising=False)
    with pytest.raises(RuntimeError, match="invalidated"), device.capture(None, (0, 7)):
        pass
    assert told == [(1, (0, 7))]


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: bool(torch.equal(x, x))])
def test_a_number_read_on_the_host_is_no_graph(cuda, read):
    with pytest.raises(NotGraphed, match="not permitted"):
        a_graph(cuda, lambda x: (read(x[0]), x[0])[1:], ["values"], [torch.ones(4, 8)])


def test_collection_rests_during_a_capture_and_goes_on_after_one_that_failed(cuda):
    seen = []
    a_graph(cuda, lambda x: (seen.append(gc.isenabled()), x[0])[1:], ["values"], [torch.ones(4, 8)])
    assert not any(seen) and gc.isenabled()
    cuda.fails = "out of memory"
    with pytest.raises(NotGraphed, match="out of memory"):
        a_graph(cuda, lambda x: (x[0],), ["values"], [torch.ones(4, 8)])
    assert gc.isenabled()


def test_graphs_of_a_device_take_turns(cuda):
    graphs, running, most = graphs_on(Device(cuda), 2), [], []
    for graph in graphs:
        replay = graph._graph.replay

        def watched(replay=replay):
            running.append(1)
            most.append(len(running))
            threading.Event().wait(0.002)
            replay()
            running.pop()

        graph._graph.replay = watched
    results = together(
        lambda i: [graphs[i % 2]([torch.full((4, 8), float(i))], [None])[0].unique().tolist() for _ in range(5)]
    )
    assert results == [[[i + 1.0]] * 5 for i in range(4)]
    assert max(most) == 1


# ---- the whole backend ----


@pytest.mark.parametrize("template", [GRPO, CRITIC, TURNS], ids=["grpo", "critic", "turns"])
def test_compiled_batches_through_graphs_are_the_plain_loops(cuda, template):
    compute = graphed(template.actor)
    for seed, (rows, tokens) in enumerate([(8, 16), (5, 12), (2, 7), (8, 16)]):
        assert_right(compute, case_of(template, rows, tokens, seed))
    assert cuda.log.count("capture") == compute.cache.info().compiles


PER_CALL = {
    "gvpo_negative_scale": (0.1, 0.5, 2.0),
    "gvpo_zero_penalty": (0.1, 0.5, 2.0),
    "gvpo_zero_eps": (1e-6, 0.3, 1e3),
}


@pytest.mark.parametrize("name", PER_CALL)
def test_compiled_per_call_values_take_effect_in_a_replay(cuda, name):
    case = case_of(TURNS, 8, 16)
    compute, plain = graphed(TURNS.actor), compiled_adv.build(case.on("reference"))
    calls = [{"advantage_shaping_mode": "gvpo", "gvpo_zero_eps": 0.3} | {name: value} for value in PER_CALL[name]]
    found = [run(compute, case, **call)[0] for call in calls]
    for call, got in zip(calls, found, strict=True):
        assert_same(got, run(plain, case, **call)[0], 1e-5)
    assert len({tuple(x["advantages"].flatten().tolist()) for x in found}) == 3
    assert cuda.log.count("capture") == 1


def test_compiled_outputs_of_earlier_calls_stay(cuda):
    compute = graphed(CRITIC.actor)
    first = run(compute, case_of(CRITIC, 8, 16, 1))[0]
    before = {key: x.clone() for key, x in first.items()}
    run(compute, case_of(CRITIC, 8, 16, 2))
    assert_same(first, before)


def test_compiled_views_are_opt_in(cuda):
    compute = graphed(CRITIC.actor, graph_outputs="view")
    first = run(compute, case_of(CRITIC, 8, 16, 1))[0]["advantages"]
    second = run(compute, case_of(CRITIC, 8, 16, 2))[0]["advantages"]
    assert first.data_ptr() == second.data_ptr()


def test_compiled_graphs_go_with_their_bucket(cuda):
    compute = graphed(GRPO.actor, buckets={"rows": [8], "tokens": [16, 32]}, max_buckets=1)
    run(compute, case_of(GRPO, 8, 16))
    held = weakref.ref(cuda.graphs.pop())
    run(compute, case_of(GRPO, 8, 32))
    assert compute.cache.info().evictions == 1 and held() is None


def test_compiled_buckets_are_captured_largest_first(cuda, interpreted):
    compute = graphed(GRPO.actor, buckets={"rows": [4, 8], "tokens": [16]})
    compute.warmup(freeze=True)
    modes = len(interpreted) // 2
    assert interpreted == ["8"] * modes + ["4"] * modes and cuda.log.count("capture") == 2 * modes


def test_compiled_bad_batches_are_named_and_the_next_good_one_works(cuda):
    case = case_of(CRITIC, 8, 16, 1)
    compute = graphed(CRITIC.actor)
    broken = case_of(CRITIC, 8, 16, 1)
    broken.batch["rewards"] = torch.full((8,), float("nan"))
    with pytest.raises(compiled_adv.errors.NonFinite):
        run(compute, broken)
    assert_right(compute, case)


def test_compiled_auto_does_without_and_says_so_once(cuda, monkeypatch):
    cuda.fails = "a reason"
    case = case_of(GRPO)
    compute = compiled_adv.build(configured(GRPO.actor))
    monkeypatch.setattr("compiled_adv.compiler.is_cuda", lambda _: True)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: RuntimeError: a reason") as caught:
        compute.warmup()
        compute(case.batch, case.meta)
    assert sum("CUDA graphs" in str(warning.message) for warning in caught) == 1


def test_compiled_on_is_an_error_where_nothing_can_be_captured(cuda):
    cuda.fails = "a reason"
    case = case_of(GRPO)
    with pytest.raises(NotCapturable, match="a reason") as caught:
        run(graphed(GRPO.actor), case)
    assert "actor.advantage.compiled.cuda_graphs" in caught.value.at


def test_compiled_on_is_an_error_for_a_batch_on_the_cpu(interpreted):
    case = case_of(GRPO)
    with pytest.raises(NotCapturable, match="not on a CUDA device"):
        run(graphed(GRPO.actor), case)


@pytest.mark.parametrize("word, setting", [(True, "on"), (False, "off"), ("auto", "auto")])
def test_yaml_words_are_settings(word, setting):
    compute = compiled_adv.build({"advantage": {"compiled": {"cuda_graphs": word}}})
    assert compute.spec.advantage.compiled.cuda_graphs == setting


def test_another_word_is_no_setting():
    with pytest.raises(UnknownName):
        compiled_adv.build({"advantage": {"compiled": {"cuda_graphs": "always"}}})


# ---- what comes before a graph ----


@pytest.fixture
def numberless(monkeypatch):
    """Tensors on torch's device without numbers count as any other: whoever looks at one raises."""
    monkeypatch.setattr("compiled_adv.admit.check_tensor", lambda *_: None)
    monkeypatch.setattr("compiled_adv.admit.check_memory", lambda *_: None)


def admitted(template, **dtypes):
    case = case_of(template, 8, 16)
    compute = compiled_adv.build(configured(template.actor))
    batch = {
        key: x.to("meta", dtypes.get(key, x.dtype)) for key, x in case.batch.items() if isinstance(x, torch.Tensor)
    }
    spec, resolved = compute.spec, compute._resolved
    return admit(batch, case.meta, admit_call({}, spec, resolved), spec, resolved)


@pytest.mark.parametrize("template", [GRPO, CRITIC, TURNS], ids=["grpo", "critic", "turns"])
def test_a_batch_on_a_gpu_is_admitted_without_a_look_at_its_numbers(template, numberless):
    found = admitted(template, attention_mask=torch.int64, loss_mask=torch.bfloat16, values=torch.bfloat16)
    assert {name for name, x in found.channels.items() if x.device.type == "cpu"} == {*HOST}
    assert len(found.late) == 2  # the attention mask is binary, the loss mask finite


@pytest.mark.parametrize("read", ["with the flags", "by themselves"])
def test_what_was_left_to_check_is_refused_by_name(read, numberless):
    found = admitted(GRPO)
    rows = torch.tensor([False, True, False, True])
    error = compiled_adv.errors.BadMask("what", at="batch['attention_mask']", hint="how")
    found.late[:] = [(error, torch.zeros(4, dtype=torch.bool)), (error, rows)]
    given = torch.stack([x for _, x in found.late]) if read == "with the flags" else None
    with pytest.raises(compiled_adv.errors.BadMask, match=r"(?s)attention_mask.*rows \[1, 3\].*how"):
        found.raise_late(given)
    found.raise_late()  # once


def test_nothing_in_a_program_for_a_gpu_asserts_on_the_device():
    assert settings_of(torch.device("cuda"))["assert_indirect_indexing"] is False
    assert "assert_indirect_indexing" not in settings_of(torch.device("cpu"))


# ---- ranks ----


class Twin:
    """Another rank with the same rows: biased statistics stay what they are."""

    @contextmanager
    def meeting(self):
        yield self

    def merged(self, blocks, own):
        return own * torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64)


def test_ranks_meet_between_two_graphs(cuda, monkeypatch):
    monkeypatch.setattr("compiled_adv.compiler.ranks_of", lambda group, points: Twin() if group else None)
    norm = {"mean_level": "batch", "std_level": "batch", "std_unbiased": False, "eps": 0.05}
    actor = {"reward_norm": norm, "adv_norm": norm}
    compute = compiled_adv.build(configured(actor, cuda_graphs="on"), reduce_group="twin")
    for seed, rows in enumerate((5, 3, 7)):
        assert_right(compute, replace(case_of(CRITIC, rows, seed=seed), config={"actor": actor}))
    assert cuda.log.count("replay") == 9, "three segments"
