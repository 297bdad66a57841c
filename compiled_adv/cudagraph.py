"""Takes a compiled segment and a bucket's example; gives a Graph: the segment captured once, replayed on every call.

A Graph owns its inputs. A call copies a batch into their corner (what comes from the host in one packed copy), puts
padding back where the batch before it reached further, replays, and copies the outputs out. What reads a number on the
host, and every user's function between two segments, stays outside.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_adv.bucket import Bucket, crop
from compiled_adv.channel import HOST, INPUTS
from compiled_adv.inductor import abandon_capture

WARM_UP = 3  # calls on the capture stream: kernels are loaded and the allocator has seen every size
ALIGN = 256  # bytes, as torch's allocator aligns

Shape = tuple[int, int]


class NotGraphed(Exception):
    """Why a segment cannot be captured."""


class Cuda:
    """All that this file asks of a device. Tests put a fake in its place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Any:
        return torch.cuda.Event()

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """On the capture stream, behind what the current one has been given; that one goes on behind this."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def capture(self, graph: Any, pool: Any) -> Iterator[None]:
        # thread_local: another thread that allocates or copies meanwhile does not spoil the capture
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                yield
        except Exception:
            abandon_capture(self.device, pool)
            raise


@dataclass
class Device:
    """What all graphs of a device share. One pool of memory allows one replay at a time: the next waits on `done`."""

    cuda: Any
    lock: Any = field(default_factory=threading.RLock)
    done: Any = None
    pool: Any = None
    sharing: "weakref.WeakSet[Graph]" = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.done = self.cuda.event()

    def shared_pool(self) -> Any:
        """The pool of the graphs that share one. A new one when the last of them has gone: torch takes no graph into
        a pool that none is left to own, and what a view still holds of it may be there."""
        if not self.sharing:
            self.pool = self.cuda.pool()
        return self.pool


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


_DEVICES: dict[torch.device, Device] = {}
_LOCK = threading.Lock()


def device_of(device: torch.device) -> Device:
    """The shared state of a CUDA device, or NotGraphed."""
    if not is_cuda(device):
        raise NotGraphed(f"the batch is on {device}, not on a CUDA device")
    with _LOCK:
        if device not in _DEVICES:
            with torch.cuda.device(device):
                _DEVICES[device] = Device(Cuda(device))
        return _DEVICES[device]


@dataclass
class Buffer:
    """A tensor of a bucket's shape with a batch in its corner and padding in the rest."""

    x: Tensor
    pad: float
    used: tuple[int, ...]  # beyond it there is nothing but padding

    def put(self, given: Tensor) -> None:
        size, before = tuple(given.shape), self.used
        self.used = tuple(map(max, size, before))  # true as well if what follows fails
        self.x[tuple(map(slice, size))].copy_(given, non_blocking=True)
        for dim, (now, then) in enumerate(zip(size, before, strict=True)):
            if now < then:
                self.x[(*map(slice, size[:dim]), slice(now, then))] = self.pad
        self.used = size


class Graph:
    """One segment, captured for one bucket. Freed with its memory when the last reference goes."""

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
        names: Sequence[str],
        example: Sequence[Tensor],
        bucket: Bucket,
        device: Device,
        *,
        views: bool = False,
    ) -> None:
        """`names`: the versions of the inputs; `example`: empty rows alone. NotGraphed says why a capture failed.

        `views`: outputs are lent until this graph's next call, instead of copied. Its memory is its own then: in a
        shared pool the replay of one graph writes over what another has given."""
        self._bucket, self._device, self._views = bucket, device, views
        cuda = device.cuda
        with device.lock, cuda.here(), _no_collection():
            pool = cuda.pool() if views else device.shared_pool()
            try:
                self._host, self._packed, self._buffers, self._order = self._own(names, example)
                self._sent = cuda.event()
                with cuda.on_stream():
                    for _ in range(WARM_UP):
                        run(self._order)
                self._graph = cuda.graph()
                with cuda.capture(self._graph, pool):
                    # kept: another bucket's capture may take memory of the pool that nobody holds
                    self._outputs = list(run(self._order))
            except Exception as error:
                device.sharing.clear()  # what a failed capture leaves behind is not for others to share
                text = str(error).strip().splitlines()
                raise NotGraphed(f"{type(error).__name__}: {text[0] if text else ''}") from error
            if any(x is not None and x.device != cuda.device for x in self._outputs):
                raise NotGraphed("an output is not on the device")
            if not views:
                device.sharing.add(self)

    def _own(
        self, names: Sequence[str], example: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None, list[Buffer], list[Tensor]]:
        """Buffers to copy into, and the graph's inputs in order. What comes from the host lies in one piece of memory:
        its buffers are on the host, and that memory is copied as a whole."""
        cuda = self._device.cuda
        places: dict[int, int] = {}
        size = 0
        for i, (name, x) in enumerate(zip(names, example, strict=True)):
            if name in HOST:
                places[i] = size
                size += -(-x.numel() * x.element_size() // ALIGN) * ALIGN
        host, packed = (cuda.pinned(size), cuda.buffer(size)) if size else (None, None)
        buffers, order = [], []
        for i, (name, x) in enumerate(zip(names, example, strict=True)):
            pad = INPUTS[name].pad if name in INPUTS else 0
            if i in places:
                assert host is not None and packed is not None
                here = slice(places[i], places[i] + x.numel() * x.element_size())
                mine, own = (memory[here].view(x.dtype).view(x.shape) for memory in (host, packed))
                own.copy_(x)
            else:
                mine = own = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
            mine.copy_(x)
            buffers.append(Buffer(mine, pad, tuple(x.shape)))
            order.append(own)
        return host, packed, buffers, order

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[Shape | None]) -> list[Tensor | None]:
        """`sizes`: rows and tokens to crop each output to; None leaves it at the bucket's shape."""
        device = self._device
        with device.lock, device.cuda.here():
            device.done.wait()
            self._sent.synchronize()  # the host's memory has been read
            for buffer, x in zip(self._buffers, inputs, strict=True):
                buffer.put(x)
            if self._host is not None and self._packed is not None:
                self._packed.copy_(self._host, non_blocking=True)
                self._sent.record()
            try:
                self._graph.replay()
                outputs = zip(self._outputs, sizes, strict=True)
                return [None if x is None else self._taken(x, size) for x, size in outputs]
            finally:  # a copy may find no memory, and the replay runs all the same
                device.done.record()

    def _taken(self, x: Tensor, size: Shape | None) -> Tensor:
        part = x if size is None else crop(x, *size, self._bucket)
        return part if self._views and size is not None else part.clone(memory_format=torch.contiguous_format)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection may free device memory, which a capture forbids."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
