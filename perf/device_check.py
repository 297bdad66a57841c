"""Everything that only a GPU can tell, in one run of under four minutes: a short table, and one JSON.

    python perf/device_check.py [--json FILE] [--wheels FOLDER] [--seconds 225] [--only NAME ...]

Needs a CUDA build of torch with its Triton, networkx, pyyaml and pydantic, and no network and no installation: run it
from a checkout. What the machine lacks travels as wheels in FOLDER, which are unpacked and put on the path. AReaL is
timed where it can be imported; a loop over token columns in torch stands for it elsewhere. Without a CUDA device it
says so and ends well. A check that fails or raises is recorded, and the next one runs; the JSON is written after each.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.abc
import importlib.util
import json
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class _Checkout(importlib.abc.MetaPathFinder):
    """Parts of the package that lie beside it in a checkout."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("compiled_adv.passes", "compiled_adv.configs"):
            return None
        folder = ROOT / name.split(".")[1]
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def use_checkout(wheels: Path | None = None) -> None:
    """Make the checkout, and the wheels of a folder, importable."""
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        folder = tempfile.mkdtemp(prefix="wheel-")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        sys.path.insert(0, folder)
    sys.path.insert(0, str(ROOT))
    sys.meta_path.append(_Checkout())


@dataclass(frozen=True)
class Sizes:
    """Shapes of the checks; the defaults are a GPU's."""

    ladder: tuple[tuple[int, int], ...] = ((64, 1024), (256, 4096), (512, 8192), (1024, 16384))
    small: tuple[int, int] = (48, 1000)  # and the bucket it is padded into
    bucket: tuple[int, int] = (64, 1024)
    long_row: tuple[int, int] = (4, 1 << 20)
    bandwidth_bytes: int = 1 << 30
    pool_tokens: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 6144, 8192)
    pool_rows: int = 256
    golden: int = 40
    repeats: int = 30


@dataclass
class Clock:
    """Seconds that a check may still take."""

    end: float

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end


Found = dict[str, Any]  # facts of a check; `wrong` lists what should not be


# ---- helpers ----


def build(actor: Mapping[str, Any], device: Any, **compiled: Any) -> Any:
    """A compiled instance, with graphs wherever there is a GPU."""
    import compiled_adv

    settings = {"cuda_graphs": "on" if device.type == "cuda" else "off", "cache_dir": None} | compiled
    advantage = {**actor.get("advantage", {}), "backend": "compiled", "compiled": settings}
    return compiled_adv.build({"actor": {**actor, "advantage": advantage}})


def exact(*shapes: tuple[int, int]) -> dict[str, list[int]]:
    return {"rows": sorted({rows for rows, _ in shapes}), "tokens": sorted({tokens for _, tokens in shapes})}


def on(device: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x.to(device) for key, x in batch.items()}


def computed(batch: Mapping[str, Any], out: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in out.items() if x is not batch.get(key)}


def expected(actor: Mapping[str, Any], batch: Mapping[str, Any], meta: Any, **call: Any) -> dict[str, Any]:
    """The eager backend's result on the CPU."""
    import compiled_adv

    plain = compiled_adv.build({"actor": {**actor, "advantage": {"backend": "eager"}}})
    return computed(batch, plain(batch, meta, **call))


def off(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """The largest |got - want| / (1 + |want|), but for one number in a million that fell on the other side of a
    threshold; a NaN counts as infinite."""
    worst = 0.0
    for key, x in want.items():
        far = (got[key].cpu().double() - x.double()).abs() / (1 + x.double().abs())
        far = far.nan_to_num(float("inf")).flatten()
        skip = far.numel() // 1_000_000
        worst = max(worst, float(far.topk(skip + 1).values[-1]) if far.numel() else 0.0)
    return worst


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(bool((a[key] == b[key]).all()) for key in a)


def synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], Any], device: Any, repeats: int, clock: Clock) -> tuple[float, float]:
    """Median time of a call until the device is done, and until the host has gone on."""
    whole, host = [], []
    for _ in range(3):
        run()
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        host.append(time.perf_counter() - start)
        synchronize(device)
        whole.append(time.perf_counter() - start)
        if clock.over:
            break
    return statistics.median(whole) * 1e3, statistics.median(host) * 1e3


# ---- checks: (device, sizes, clock) -> facts ----


def bandwidth(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """Bytes read and written per second by a copy."""
    import torch

    x = torch.zeros(sizes.bandwidth_bytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    ms, _ = milliseconds(lambda: y.copy_(x), device, 10, clock)
    return {"copy_gb_per_s": 2 * x.numel() / ms / 1e6}


def kernels(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """The device's operators against the torch forms on the CPU; the same bits however rows are padded or split."""
    import torch

    import compiled_adv.kernels as ours
    from compiled_adv.kernels import blocked

    native = {plain._qualified_op_name.split("::")[1]: op for plain, op in ours.native(device).items()}
    g = torch.Generator().manual_seed(0)
    found: Found = {"wrong": [], "worst": {}}

    def inputs(rows: int, tokens: int) -> dict[str, tuple[Any, ...]]:
        x, v = torch.randn(rows, tokens, generator=g), torch.randn(rows, tokens, generator=g)
        mask = (torch.rand(rows, tokens, generator=g) < 0.7).float()
        mask[: rows // 4] = 0
        ids = (torch.arange(tokens) * 8 // tokens).expand(rows, tokens).contiguous()
        nan = torch.where(mask > 0, x, float("nan"))
        boot, lam = torch.randn(rows, generator=g), torch.full((rows,), 0.95, dtype=torch.float64)
        moments = blocked.row_moments(x, mask)
        return {
            "backward_recurrence": (nan, v, mask, boot, 0.99, lam, torch.tensor(tokens - 1), True),
            "row_moments": (nan, mask),
            "merge_moments": (*moments, torch.arange(rows) % 5 - 1),
            "turn_totals": (nan, v, ids, mask),
            "turn_counts": (ids, mask),
            "discounted_sum": (x, v.clamp(-1, 1) * mask),
        }

    def there(args: Sequence[Any]) -> list[Any]:
        return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]

    for shape in (sizes.small, sizes.bucket, (1, 1), sizes.long_row):
        for name, args in inputs(*shape).items():
            if name not in native:  # on a CPU the turns are one operator
                continue
            if clock.over:
                return found | {"stopped": f"at {shape} {name}"}
            got, want = native[name](*there(args)), getattr(blocked, name)(*args)
            pair = (got, want) if isinstance(got, tuple) else ((got,), (want,))
            far = off(dict(enumerate(pair[0])), dict(enumerate(pair[1])))
            found["worst"][f"{name} {shape[0]}x{shape[1]}"] = far
            if far > 1e-5:
                found["wrong"].append(f"{name} at {shape} is off by {far:.2g}")

    rows, tokens = sizes.small
    args = inputs(rows, tokens)["backward_recurrence"]
    base = native["backward_recurrence"](*there(args))[0]
    wider = [torch.nn.functional.pad(a, (0, 777)) if getattr(a, "ndim", 0) == 2 else a for a in args]
    if not torch.equal(native["backward_recurrence"](*there(wider))[0][:, :tokens], base):
        found["wrong"].append("backward_recurrence: other bits in a wider bucket")
    if device.type == "cuda":
        from compiled_adv.kernels import triton as on_gpu

        long = inputs(8, 5000)["backward_recurrence"]
        bits = []
        for few in (0, 1 << 30):
            with patched(on_gpu, FEW_ROWS=few):
                bits.append(native["backward_recurrence"](*there(long))[0])
        if not torch.equal(*bits):
            found["wrong"].append("backward_recurrence: other bits where rows are split")
    return found


@contextlib.contextmanager
def patched(module: Any, **values: Any) -> Any:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def replay(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """What a replay must keep to: right numbers, reset tails, outputs that stay, per-call values, threads, one wait."""
    replays = Replays(device, sizes.bucket)
    for check in (replays.of_other_shapes, replays.with_other_values, replays.in_threads, replays.without_waiting):
        if clock.over:
            return replays.found | {"stopped": f"before {check.__name__}"}
        check()
    return replays.found


class Replays:
    """Calls of one program, each held to the CPU's answer; `found` says what was wrong."""

    def __init__(self, device: Any, bucket: tuple[int, int]) -> None:
        from perf.shapes import RECIPES

        self.device, self.recipe, self.bucket = device, RECIPES["turn_gae_gvpo"], bucket
        self.compute = build(self.recipe.actor, device, buckets=exact(bucket))
        self.found: Found = {"wrong": [], "worst": 0.0}

    def want(self, batch: Mapping[str, Any], meta: Any, call: Mapping[str, Any]) -> Mapping[str, Any]:
        return expected(self.recipe.actor, batch, meta, **call)

    def right(
        self, what: str, there: Mapping[str, Any], meta: Any, call: Mapping[str, Any], want: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The answer of a call for a batch on the device, which is compared."""
        got = computed(there, self.compute(there, meta, **call))
        far = off(got, want)
        self.found["worst"] = max(self.found["worst"], far)
        if far > 1e-5:
            self.found["wrong"].append(f"{what} is off by {far:.2g}")
        return got

    def of_other_shapes(self) -> None:
        rows, tokens = self.bucket
        kept, call = [], self.recipe.per_call
        for shape in ((rows, tokens), (rows - 8, tokens - 24), (8, tokens // 2), (rows, tokens)):
            batch, meta = self.recipe.batch(*shape)
            what, want = f"a batch of {shape} after a larger one", self.want(batch, meta, call)
            got = self.right(what, on(self.device, batch), meta, call, want)
            kept.append((got, {key: x.clone() for key, x in got.items()}))
        if not all(same(got, before) for got, before in kept):
            self.found["wrong"].append("an output of an earlier call has changed")

    def with_other_values(self) -> None:
        values = {
            "gvpo_negative_scale": (0.1, 0.5, 2.0),
            "gvpo_zero_penalty": (0.1, 0.5, 2.0),
            "gvpo_zero_eps": (1e-6, 0.1, 10.0),
        }
        usual = {**self.recipe.per_call, "gvpo_zero_eps": 0.1}
        calls = [usual | {name: x} for name, xs in values.items() for x in xs]
        calls += [{"advantage_shaping_mode": mode} for mode in ("additive", "gvpo")]
        batch, meta = self.recipe.batch(*self.bucket)
        there = on(self.device, batch)
        for call in calls:
            self.right(f"call {call}", there, meta, call, self.want(batch, meta, call))

    def in_threads(self) -> None:
        """Two, each with a batch of its own."""
        (rows, tokens), call = self.bucket, self.recipe.per_call
        work = [self.recipe.batch(rows - 8 * i, tokens - 16 * i) for i in range(2)]
        wanted = [self.want(batch, meta, call) for batch, meta in work]

        def go(i: int) -> None:
            batch, meta = work[i]
            try:
                mine = on(self.device, batch)
                for _ in range(10):
                    self.right(f"thread {i}", mine, meta, call, wanted[i])
            except Exception as error:
                self.found["wrong"].append(f"thread {i}: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=go, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def without_waiting(self) -> None:
        """On a GPU a call is a graph's replay, and the host waits once."""
        if self.device.type != "cuda":
            return
        import torch

        batch, meta = self.recipe.batch(*self.bucket)
        there = on(self.device, batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.compute(there, meta, **self.recipe.per_call)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        syncs = [str(w.message).splitlines()[0] for w in caught if "synchroniz" in str(w.message).lower()]
        self.found |= {"syncs_per_call": len(syncs), "graphs": graphs_of(self.compute)}
        if len(syncs) > 1:
            self.found["wrong"].append(f"{len(syncs)} host syncs in a call")
        if not self.found["graphs"]:
            self.found["wrong"].append("no CUDA graph was captured")


def graphs_of(compute: Any) -> int:
    return sum(executable.graphed for executable in compute.cache._executables.values())


def capture_beside_allocation(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """A capture while another thread allocates, copies and frees on the same device."""
    import torch

    from perf.shapes import RECIPES

    stop, made = threading.Event(), [0]

    def allocate() -> None:
        while not stop.is_set():
            x = torch.empty(1 << 20 + made[0] % 4, device=device).fill_(1.0)
            made[0] += 1 + 0 * int(x.numel())
            del x

    other = threading.Thread(target=allocate)
    other.start()
    try:
        recipe = RECIPES["grpo"]
        compute = build(recipe.actor, device, buckets=exact(sizes.bucket))
        batch, meta = recipe.batch(*sizes.bucket)
        got = computed(batch, compute(on(device, batch), meta))
    finally:
        stop.set()
        other.join(30)
    want = expected(recipe.actor, batch, meta)
    far = off(got, want)
    return {"allocations": made[0], "worst": far, "wrong": [f"off by {far:.2g}"] if far > 1e-5 else []}


def buckets(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """One batch, in its own shape and in larger buckets: the same bits."""
    from perf.shapes import RECIPES

    recipe = RECIPES["token_gae"]
    batch, meta = recipe.batch(*sizes.small)
    there, results, found = on(device, batch), [], {"wrong": []}
    rows, tokens = sizes.bucket
    for shape in (sizes.small, sizes.bucket, (rows, 2 * tokens)):
        if clock.over:
            return found | {"stopped": f"before {shape}"}
        compute = build(recipe.actor, device, buckets=exact(shape))
        results.append(computed(there, compute(there, meta)))
        changed = [key for key, x in results[0].items() if not bool((results[-1][key] == x).all())]
        if changed:
            found["wrong"].append(f"other bits in bucket {shape}: {', '.join(changed)}")
    found["worst"] = off(results[0], expected(recipe.actor, batch, meta))
    if found["worst"] > 1e-6:
        found["wrong"].append(f"off from the CPU by {found['worst']:.2g}, more than 1e-6")
    return found


def speed(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """Times over the ladder, against the copy bandwidth over the bytes of the floor, and a trainer's loop."""
    import torch

    from perf.floor import channels
    from perf.shapes import RECIPES

    gb_per_s = bandwidth(device, sizes, clock)["copy_gb_per_s"]
    found: Found = {"copy_gb_per_s": gb_per_s, "rows": []}
    for name in ("token_gae", "turn_gae_gvpo"):
        recipe = RECIPES[name]
        for shape in sizes.ladder:
            if clock.over:
                return found | {"stopped": f"before {name} {shape}"}
            batch, meta = recipe.batch(*shape)
            there = on(device, batch)
            row: Found = {"recipe": name, "shape": list(shape)}
            found["rows"].append(row)
            for label, how in {
                "graph": {},
                "graph, views": {"graph_outputs": "view"},
                "no graph": {"cuda_graphs": "off"},
            }.items():
                if clock.over:
                    break
                start = time.perf_counter()
                compute = build(recipe.actor, device, buckets=exact(shape), verify_steps=0, **how)
                out = compute(there, meta, **recipe.per_call)
                row[f"{label}: first call s"] = time.perf_counter() - start
                inputs, outputs = channels(there, out)
                moved = sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
                del out, outputs
                whole, _ = milliseconds(partial(compute, there, meta, **recipe.per_call), device, sizes.repeats, clock)
                row[f"{label}: ms"] = whole
                row[f"{label}: share of copy bandwidth"] = moved / whole / 1e6 / gb_per_s
            if device.type == "cuda":
                row["memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
            row["floor_bytes"] = moved
            try:
                row |= trainers_loop(recipe, there, batch, meta, device, clock)
                row["loop over graph"] = row["loop: ms"] / row["graph: ms"]
            except Exception as error:
                row["loop"] = f"{type(error).__name__}: {error}"[:300]
    return found


def trainers_loop(
    recipe: Any, there: Mapping[str, Any], batch: Mapping[str, Any], meta: Any, device: Any, clock: Clock
) -> Found:
    """AReaL's own computation of the same batch on the device, or a loop over token columns where it is missing."""
    import importlib

    from perf.peers import Unsupported

    ours = {**there, **on(device, expected(recipe.actor, batch, meta, **recipe.per_call))}
    for name in ("areal", "column_loop", "turn_scatter"):
        try:
            peer = importlib.import_module(f"perf.peers.{name}").prepare(recipe, there, ours)
            ms, _ = milliseconds(peer.run, device, 2, clock)
        except Unsupported:
            continue
        return {"loop": name, "loop: ms": ms}
    return {}


def host_overhead(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """What a call costs beside the device's own work: at a shape where that is next to nothing."""
    from perf.shapes import RECIPES

    recipe = RECIPES["token_gae"]
    batch, meta = recipe.batch(16, 256)
    there = on(device, batch)
    compute = build(recipe.actor, device, buckets=exact((16, 256)), verify_steps=0)
    whole, host = milliseconds(lambda: compute(there, meta), device, 10 * sizes.repeats, clock)
    found: Found = {"call_ms": whole, "host_ms": host, "wrong": []}
    if device.type == "cuda" and graphs_of(compute):
        graph = next(iter(compute.cache._executables.values()))._steps[0]
        alone, _ = milliseconds(graph._graph.replay, device, 10 * sizes.repeats, clock)
        found |= {"replay_ms": alone, "overhead_ms": whole - alone}
        if whole - alone > 0.15:
            found["wrong"].append(f"a call takes {whole - alone:.3f} ms beside its replay, more than 0.15")
    return found


def scans(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """The recurrence's kernel against torch's associative_scan, and in its own variants."""
    import torch

    import compiled_adv.kernels as ours

    native = {plain._qualified_op_name.split("::")[1]: op for plain, op in ours.native(device).items()}
    found: Found = {"rows": []}

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[1] + b[0] * a[1]

    def scanned(factor: Any, delta: Any) -> Any:
        from torch._higher_order_ops.associative_scan import associative_scan

        return associative_scan(combine, (factor, delta), dim=1, reverse=True, combine_mode="pointwise")[1]

    for shape in (*sizes.ladder, sizes.long_row):
        if clock.over:
            return found | {"stopped": f"before {shape}"}
        x = torch.randn(shape, device=device)
        mask = (torch.rand(shape, device=device) < 0.9).float()
        boot, lam = torch.zeros(shape[0], device=device), torch.full((shape[0],), 0.95, dtype=torch.float64).to(device)
        moved = 4 * x.numel() * 4
        row: Found = {"shape": list(shape)}
        found["rows"].append(row)

        def run(x: Any = x, mask: Any = mask, boot: Any = boot, lam: Any = lam) -> Any:
            return native["backward_recurrence"](x, x, mask, boot, 0.99, lam, None, False)

        variants: dict[str, dict[str, Any]] = {"as shipped": {}}
        if device.type == "cuda":
            from compiled_adv.kernels import triton as on_gpu

            variants |= {"rows": {"FEW_ROWS": 0}, "split": {"FEW_ROWS": 1 << 30}, "8 warps": {"WARPS": 8}}
            if shape == sizes.long_row:
                del variants["rows"]
        for label, values in variants.items():
            with patched(on_gpu, **values) if values else contextlib.nullcontext():
                ms, _ = milliseconds(run, device, sizes.repeats, clock)
            row[f"{label}: ms"], row[f"{label}: gb/s"] = ms, moved / ms / 1e6
        if device.type == "cuda" and not clock.over:
            try:
                compiled = torch.compile(scanned, fullgraph=True, dynamic=False)
                factor = torch.where(mask > 0, 0.9405, 1.0)
                row["associative_scan: ms"], _ = milliseconds(
                    partial(compiled, factor, x), device, sizes.repeats, clock
                )
            except Exception as error:
                row["associative_scan"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found


def golden(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """Golden cases compiled on the device, as many as there is time for; one bucket holds them all."""
    from compiled_adv.conformance import check_case

    paths = sorted((ROOT / "tests" / "golden").glob("*/*.json"))
    step = max(1, len(paths) // sizes.golden)
    found: Found = {"ran": 0, "of": len(paths), "wrong": []}
    known: dict[str, Any] = {}

    def call(config: Any, batch: Any, meta: Any, per_call: Any) -> Any:
        key = json.dumps(config, sort_keys=True)
        if key not in known:
            known[key] = build(config["actor"], device, buckets={"rows": [12], "tokens": [128]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = known[key](on(device, batch), meta, **per_call)
        return {name: x.cpu() if hasattr(x, "cpu") else x for name, x in out.items()}, known[key].last_warnings

    for path in (*paths[::step], *(p for i, p in enumerate(paths) if i % step)):
        if clock.over:
            break
        result = check_case(json.loads(path.read_text()), call)
        found["ran"] += 1
        if result.status == "failed":
            found["wrong"].append(f"{path.stem}: {result.reason[:300]}")
    return found


def pool(device: Any, sizes: Sizes, clock: Clock) -> Found:
    """Device memory over eight buckets of one program, largest first, and what is left when they are gone."""
    import gc

    import torch

    from perf.shapes import RECIPES

    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    recipe = RECIPES["grpo"]
    wanted = {"rows": [sizes.pool_rows], "tokens": list(sizes.pool_tokens)}
    compute = build(recipe.actor, device, buckets=wanted, verify_steps=0)
    held: Found = {}
    before = allocated(device)
    for tokens in reversed(sizes.pool_tokens):
        if clock.over:
            break
        batch, meta = recipe.batch(sizes.pool_rows, tokens)
        compute(on(device, batch), meta)
        held[str(tokens)] = (allocated(device) - before) / 1e6
    largest = max(sizes.pool_tokens) * sizes.pool_rows
    compute.cache.forget(lambda key: True)
    del compute
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "reserved_mb_after_each": held,
        "of_the_largest_channel_mb": largest * 4 / 1e6,
        "left_mb": (allocated(device) - before) / 1e6,
    }


def allocated(device: Any) -> int:
    import torch

    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


# in order of what is worth most; seconds that each may take
CHECKS: dict[str, tuple[Callable[[Any, Sizes, Clock], Found], float]] = {
    "bandwidth": (bandwidth, 10),
    "kernels": (kernels, 35),
    "replay": (replay, 45),
    "capture_beside_allocation": (capture_beside_allocation, 20),
    "host_overhead": (host_overhead, 20),
    "speed": (speed, 75),
    "buckets": (buckets, 40),
    "scans": (scans, 30),
    "pool": (pool, 40),
    "golden": (golden, 60),
}


def run_checks(device: Any, sizes: Sizes, seconds: float, only: Sequence[str], write: Callable[[Found], None]) -> Found:
    """Every check in turn, each with its share of the time; `write` gets the record after each."""
    end = time.monotonic() + seconds
    record: Found = {"facts": facts(device), "checks": {}}
    for name, (check, budget) in CHECKS.items():
        if only and name not in only:
            continue
        start = time.monotonic()
        left = end - start
        if left < 2:
            record["checks"][name] = {"status": "skipped", "why": "no time left"}
            write(record)
            continue
        try:
            found = check(device, sizes, Clock(start + min(budget, left)))
            found["status"] = "failed" if found.get("wrong") else "stopped" if "stopped" in found else "passed"
        except Exception as error:
            text = traceback.format_exc()
            found = {"status": "raised", "error": f"{type(error).__name__}: {error}"[:2000], "trace": text[-4000:]}
        found["seconds"] = time.monotonic() - start
        record["checks"][name] = found
        write(record)
    return record


def facts(device: Any) -> Found:
    import torch

    found: Found = {"torch": torch.__version__, "python": sys.version.split()[0], "device": str(device)}
    with contextlib.suppress(Exception):
        import triton

        found["triton"] = triton.__version__
    with contextlib.suppress(Exception):
        from perf.cases import stamp

        found |= stamp(torch.get_num_threads())
    return found


def table(record: Mapping[str, Any]) -> str:
    """One line for each check, and one for each timed shape."""
    lines = []
    for name, found in record["checks"].items():
        more = "; ".join(map(str, found.get("wrong", [])))[:200] or found.get("error", found.get("stopped", ""))[:200]
        lines.append(f"{name:<26} {found['status']:<8} {found.get('seconds', 0):6.1f} s  {more}".rstrip())
    for row in record["checks"].get("speed", {}).get("rows", []):
        shape = "x".join(map(str, row["shape"]))
        shown = {
            key: f"{row[key]:.3g}"
            for key in ("graph: ms", "graph, views: ms", "no graph: ms", "graph: share of copy bandwidth", "loop: ms")
            if key in row
        }
        lines.append(f"  {row['recipe']} {shape}: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "perf" / "results" / "device_check.json")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--only", nargs="*", default=(), choices=tuple(CHECKS))
    args = parser.parse_args()
    use_checkout(args.wheels)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 0
    # A check that hangs must not take the record with it: it is on disk by then.
    faulthandler.dump_traceback_later(args.seconds + 12, exit=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)

    def write(record: Found) -> None:
        args.json.write_text(json.dumps(record, indent=1, default=str))

    device = torch.device("cuda", torch.cuda.current_device())
    record = run_checks(device, Sizes(), args.seconds, args.only, write)
    print(table(record))
    print(f"written to {args.json}")
    return 1 if any(found["status"] in ("failed", "raised") for found in record["checks"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
