"""The streaming floor: the time a computation takes if it does nothing but move its data.

Takes a batch and its result, gives a callable that reads every [B,T] input once and writes every computed [B,T]
output once, in the same dtypes. A tensor that is only handed on (input_ids) is neither read nor written.
Two ways are built, and the faster one on this machine at this size is kept:
  apart    every input is read, then every output written, with plain stores: best where all of it fits the cache
  overlap  1 KiB of output is written past the cache, its share of the inputs is read, and so on: best beyond it,
           since reads and writes then go on together (measured on one core of an AMD EPYC, Zen 4, at 512 x 8192:
           36 GB/s; one after the other, a plain copy, numpy and torch's own sum and fill all stay near 26)
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = r"""
#include <cstddef>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
typedef long long Line __attribute__((vector_size(64), aligned(1), may_alias));  // one cache line

static inline void stream(char* p, Line v) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif defined(__SSE2__)
  for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i*)p + k, ((__m128i*)&v)[k]);
#else
  *(Line*)p = v;
#endif
}

static inline Line read(const char* p, size_t bytes, Line acc) {
  for (size_t i = 0; i < bytes; i += 64) acc |= *(const Line*)(p + i);
  return acc;
}

// The stretch of a buffer (whole lines) that thread `part` of `parts` moves.
static inline char* stretch(char* p, size_t bytes, int part, int parts, size_t* n) {
  const size_t lines = bytes / 64, first = lines * part / parts;
  *n = (lines * (part + 1) / parts - first) * 64;
  return p + first * 64;
}

static long long move(int part, int parts, int overlap, int n_in, char** in, size_t* in_bytes, int n_out, char** out,
                      size_t* out_bytes) {
  const Line one = (Line){} + 0x3f8000003f800000LL;
  const size_t block = 1024;
  Line acc = {};
  size_t n;
  if (!overlap) {
    for (int k = 0; k < n_in; k++) {
      const char* p = stretch(in[k], in_bytes[k], part, parts, &n);
      acc = read(p, n, acc);
    }
    for (int k = 0; k < n_out; k++) {
      char* p = stretch(out[k], out_bytes[k], part, parts, &n);
      for (size_t i = 0; i < n; i += 64) *(Line*)(p + i) = one;
    }
  } else {
    size_t total_in = 0, total_out = 0, done_in = 0, done_out = 0, left = 0;
    for (int k = 0; k < n_in; k++) stretch(in[k], in_bytes[k], part, parts, &n), total_in += n;
    for (int k = 0; k < n_out; k++) stretch(out[k], out_bytes[k], part, parts, &n), total_out += n;
    const double share = (double)total_in / total_out;
    const char* from = 0;
    int next = 0;
    for (int k = 0; k < n_out; k++) {
      char* p = stretch(out[k], out_bytes[k], part, parts, &n);
      for (size_t i = 0; i < n; i += block) {
        const size_t size = n - i < block ? n - i : block;
        for (size_t j = 0; j < size; j += 64) stream(p + i + j, one);
        done_out += size;
        size_t due = done_out == total_out ? total_in : (size_t)(share * done_out) / 64 * 64;
        while (done_in < due) {
          if (!left) from = stretch(in[next], in_bytes[next], part, parts, &left), next++;
          const size_t m = left < due - done_in ? left : due - done_in;
          acc = read(from, m, acc);
          from += m, left -= m, done_in += m;
        }
      }
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }
  return acc[0] ^ acc[1] ^ acc[2] ^ acc[3] ^ acc[4] ^ acc[5] ^ acc[6] ^ acc[7];
}

extern "C" long long floor_move(int threads, int overlap, int n_in, char** in, size_t* in_bytes, int n_out, char** out,
                                size_t* out_bytes) {
  if (threads == 1) return move(0, 1, overlap, n_in, in, in_bytes, n_out, out, out_bytes);
  long long acc = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(^ : acc)
  for (int p = 0; p < threads; p++) acc ^= move(p, threads, overlap, n_in, in, in_bytes, n_out, out, out_bytes);
  return acc;
}
"""


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "floor.cpp"), Path(folder, "floor.so")
        source.write_text(SOURCE)
        flags = ["-O3", "-march=native", "-fopenmp", "-Wno-psabi", "-shared", "-fPIC"]
        subprocess.run(["g++", *flags, str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
    library.floor_move.restype = ctypes.c_longlong
    return library


def channels(batch: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The [B,T] inputs that a computation reads, and the [B,T] outputs that it computed."""
    shape = batch["input_ids"].shape

    def full(x: object) -> bool:
        return isinstance(x, Tensor) and x.shape == shape

    inputs = [x for name, x in batch.items() if full(x) and name != "input_ids"]
    outputs = [x for name, x in result.items() if full(x) and x is not batch.get(name)]
    return inputs, outputs


class Floor:
    """Call it to move the data once. `moved` is the number of bytes, `way` the faster of the two ways.

    fresh=False writes the same output memory on every call; True asks torch for new memory on every call, as a
    computation does whose outputs are new (page faults included).
    """

    def __init__(
        self, batch: Mapping[str, Tensor], result: Mapping[str, Tensor], *, fresh: bool = False, threads: int = 1
    ) -> None:
        self._inputs, outputs = channels(batch, result)
        self._like = [(x.shape, x.dtype) for x in outputs]
        self._fresh, self._threads = fresh, threads
        # One slab, each output a few lines further than whole pages: at 4 KiB apart, stores alias loads in the core.
        lines = [_lines(x) + 17 for x in outputs]
        self._slab = torch.zeros(sum(lines) * 64 + 64, dtype=torch.uint8)
        first = self._slab.data_ptr() + -self._slab.data_ptr() % 64
        self._reused = _array([first + 64 * sum(lines[:k]) for k in range(len(lines))], ctypes.c_void_p)
        self._out_bytes = _array([64 * _lines(x) for x in outputs], ctypes.c_size_t)
        self._in = _array([x.data_ptr() for x in self._inputs], ctypes.c_void_p)
        self._in_bytes = _array([64 * _lines(x) for x in self._inputs], ctypes.c_size_t)
        self.moved = sum(x.numel() * x.element_size() for x in (*self._inputs, *outputs))
        self.way = min(("apart", "overlap"), key=self._trial)

    def __call__(self) -> list[Tensor]:
        outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in self._like] if self._fresh else []
        pointers = _array([x.data_ptr() for x in outputs], ctypes.c_void_p) if self._fresh else self._reused
        _library().floor_move(
            self._threads, self.way == "overlap", len(self._in), self._in, self._in_bytes,
            len(pointers), pointers, self._out_bytes,
        )  # fmt: skip
        return outputs

    def _trial(self, way: str) -> float:
        self.way = way
        seconds = []
        for _ in range(12):
            start = time.perf_counter()
            self()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[len(seconds) // 2]


def _lines(x: Tensor) -> int:
    """Whole cache lines of a tensor; what is left over (under 64 bytes) is not moved."""
    return x.numel() * x.element_size() // 64


def _array(items: list[int], kind: Any) -> ctypes.Array:
    return (kind * len(items))(*items)
