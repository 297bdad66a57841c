"""The pool of output memory: a block is lent again when the last tensor over it is gone, and never before."""

import gc
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from compiled_adv.memory import LEAST_BYTES, LINE, MOST_SETS, PAGE, POOL, ROOM, Pool, block_size

SHAPE = (4, LEAST_BYTES // 16)  # the smallest that is pooled, as float32


def lend(pool: Pool, value: float = 0.0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return pool.empty(shape, torch.float32).fill_(value)


# Ways in which the memory of a tensor stays in use after the tensor itself is gone.
KEEPERS = {
    "view": lambda x: x[1:, ::2],
    "last element": lambda x: x[-1, -1],
    "transpose": lambda x: x.T,
    "another dtype": lambda x: x.view(torch.int32),
    "detached": lambda x: x.detach(),
    "numpy": lambda x: x.numpy(),
    "numpy view": lambda x: x.numpy()[2:],
    "numpy of a view": lambda x: x[:, 3:9].numpy(),
    "memoryview": lambda x: memoryview(x.numpy()),
    "from numpy and back": lambda x: torch.from_numpy(x.numpy()[:1]),
    "storage": lambda x: x.untyped_storage(),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "through dlpack": lambda x: np.from_dlpack(x),
    "in a graph of autograd": lambda x: (x.requires_grad_() * 2).grad_fn,
    "set on another tensor": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "inside a list inside a dict": lambda x: {"all": [x]},
    "a closure": lambda x: lambda: x,
}


@pytest.mark.parametrize("keep", KEEPERS)
def test_a_block_is_not_lent_again_while_something_uses_it(keep):
    pool = Pool()
    first = lend(pool, 1.0)
    place = first.data_ptr()
    kept = KEEPERS[keep](first)
    del first
    gc.collect()
    others = [lend(pool, 2.0) for _ in range(3)]
    assert place not in {x.data_ptr() for x in others}
    del kept


@pytest.mark.parametrize("keep", KEEPERS)
def test_a_block_is_lent_again_when_its_last_user_is_gone(keep):
    pool = Pool()
    first = lend(pool)
    place = first.data_ptr()
    kept = KEEPERS[keep](first)
    del first, kept
    gc.collect()
    assert lend(pool).data_ptr() == place


def test_numbers_stay_what_they_are_while_others_come_and_go():
    pool, rng = Pool(), random.Random(0)
    live: list[tuple[torch.Tensor, float]] = []
    for value in range(200):
        if len(live) > 4 or (live and rng.random() < 0.5):
            x, was = live.pop(rng.randrange(len(live)))
            assert float(x.min()) == float(x.max()) == was
            if len(x) > 1:  # a part of it stays
                live.append((x[1:], was))
            del x
        else:
            live.append((lend(pool, value), float(value)))


def test_two_live_tensors_share_no_byte():
    pool = Pool()
    live = [lend(pool, i, shape) for i in range(4) for shape in (SHAPE, (SHAPE[0] * 2, SHAPE[1]))]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in live)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_as_many_blocks_are_made_as_are_used_at_once():
    pool = Pool()
    places = set()
    for _ in range(20):
        pair = lend(pool), lend(pool)
        places |= {x.data_ptr() for x in pair}
        del pair
    assert len(places) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool], ids=str)
def test_any_dtype_and_shape_is_contiguous_aligned_and_ours(dtype):
    x = POOL.empty((3, LEAST_BYTES), dtype)
    assert x.shape == (3, LEAST_BYTES) and x.dtype == dtype and x.is_contiguous()
    assert x.data_ptr() % LINE == 0
    assert not x.requires_grad and x.storage_offset() == 0
    assert x.untyped_storage().nbytes() == x.nbytes
    assert torch.equal(x.fill_(1), torch.ones_like(x))


@pytest.mark.parametrize("shape", [(0,), (0, 1 << 20), (1,), (4, 8), ()])
def test_small_tensors_are_ordinary_ones(shape):
    pool = Pool()
    x = pool.empty(shape, torch.float32)
    assert x.shape == shape
    del x
    assert pool.held_bytes() == 0


def test_neighbours_start_at_different_places_of_a_page():
    pool = Pool()
    assert len({lend_.data_ptr() % PAGE for lend_ in [lend(pool) for _ in range(8)]}) == 8


# ---- how much is held ----


def test_held_bytes_are_those_that_nobody_uses():
    pool = Pool()
    live = [lend(pool), lend(pool)]
    assert pool.held_bytes() == 0
    size = live[0].nbytes
    live.pop()
    assert pool.held_bytes() == size


def test_trim_gives_free_blocks_back_and_leaves_lent_ones():
    pool = Pool()
    kept = lend(pool, 3.0)
    lend(pool)
    assert pool.held_bytes() == kept.nbytes
    pool.trim()
    assert pool.held_bytes() == 0 and float(kept.sum()) == 3.0 * kept.numel()


def test_a_block_that_is_free_after_a_trim_is_lent_again():
    pool = Pool()
    first = lend(pool)
    place = first.data_ptr()
    pool.trim()
    del first
    assert lend(pool).data_ptr() == place


@pytest.mark.parametrize("times, shared", [(1, True), (ROOM, True), (ROOM + 1, False)])
def test_a_tensor_takes_a_larger_block_unless_it_is_far_larger(times: int, shared: bool):
    pool = Pool()
    larger = lend(pool, shape=(SHAPE[0] * times, SHAPE[1]))
    place = larger.data_ptr()
    del larger
    assert (lend(pool).data_ptr() == place) == shared


def test_a_tensor_takes_the_smallest_block_that_holds_it():
    pool = Pool()
    live = [lend(pool, shape=(SHAPE[0] * 4, SHAPE[1])), lend(pool, shape=(SHAPE[0] * 3, SHAPE[1]))]
    place = live[1].data_ptr()
    live.clear()
    assert lend(pool, shape=(SHAPE[0] * 2, SHAPE[1])).data_ptr() == place


def test_of_blocks_of_one_size_the_one_last_given_back_is_lent():
    pool = Pool()
    live = [lend(pool) for _ in range(3)]
    places = [x.data_ptr() for x in live]
    for i in (0, 2, 1):
        live[i] = None
    assert [x.data_ptr() for x in (lend(pool), lend(pool), lend(pool))][0] == places[1]


def test_shapes_that_differ_little_share_blocks():
    pool, places = Pool(), set()
    for i in range(10):
        x = lend(pool, shape=(SHAPE[0], SHAPE[1] + 100 * (i + 1)))
        places.add(x.data_ptr())
        del x
    assert len(places) == 1


@pytest.mark.parametrize("size", [LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES, 10**9, 2**31 + 5])
def test_a_block_is_an_eighth_larger_at_most(size: int):
    assert size <= block_size(size) <= size * 9 / 8


def test_batches_of_ever_other_shapes_hold_no_more_than_two_of_the_largest():
    """As in training, where each batch is padded to its own longest row."""
    pool, most = Pool(), 0
    for tokens in (1, 9, 2, 14, 5, 12, 3, 7, 16, 4, 11):
        batch = [pool.empty((SHAPE[0] * tokens, SHAPE[1]), torch.float32) for _ in range(6)]
        most = max(most, sum(block_size(x.nbytes) for x in batch))
        assert pool.held_bytes() <= MOST_SETS * most
        del batch
    assert pool.held_bytes() <= (MOST_SETS + 1) * most


def test_memory_stays_flat_over_many_calls():
    status = "/proc/self/statm"
    if not os.path.exists(status):
        pytest.skip("no /proc here")
    pool = Pool()

    def resident() -> int:
        return int(open(status).read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(3):
        lend(pool, 1.0)
    before = resident()
    for i in range(300):
        lend(pool, float(i), (SHAPE[0], SHAPE[1] + 16 * (i % 40)))
    assert resident() - before < 8 * LEAST_BYTES


# ---- threads and processes ----


def test_threads_get_memory_of_their_own():
    pool, wrong = Pool(), []

    def work(mark: int) -> None:
        rng = random.Random(mark)
        for _ in range(60):
            mine = [lend(pool, mark) for _ in range(rng.randint(1, 3))]
            wrong.extend(1 for x in mine if float(x.min()) != mark or float(x.max()) != mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_tensor_dropped_in_another_thread_is_lent_again():
    pool = Pool()
    box = [lend(pool)]
    place = box[0].data_ptr()
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert lend(pool).data_ptr() == place


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_to_memory_of_its_own():
    script = """
import os, torch
from compiled_adv.memory import LEAST_BYTES, POOL
torch.set_num_threads(1)
kept = POOL.empty((LEAST_BYTES,), torch.bool).fill_(True)
POOL.empty((LEAST_BYTES,), torch.bool).fill_(True)          # on the free list when the child starts
child = os.fork()
if child == 0:
    kept.fill_(False)
    POOL.empty((LEAST_BYTES,), torch.bool).fill_(False)
    os._exit(0)
os.waitpid(child, 0)
assert bool(kept.all()), "the child wrote to its parent's tensor"
print("own", end="")
"""
    assert run(script) == "own"


def test_a_process_ends_in_peace_with_tensors_still_out():
    script = """
import torch
from compiled_adv.memory import LEAST_BYTES, POOL
kept = [POOL.empty((LEAST_BYTES,), torch.bool) for _ in range(3)]
array = kept[0].numpy()
print("end", end="")
"""
    assert run(script) == "end"


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    return done.stdout


def test_a_tensor_can_be_pickled_and_shared():
    import pickle

    x = lend(Pool(), 5.0)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    y = x.clone().share_memory_()
    assert torch.equal(x, y)
