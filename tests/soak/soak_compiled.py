"""A soak of the compiled backend: random shapes, compositions and per-call values over six buckets, for a long time.

    make soak
    python -m tests.soak.soak_compiled [calls, 2000] [seed, 0]

Every call must give what the plain loops give; there may be no more compiles than buckets times programs; memory may
not grow; and a small batch after all of them must give the bits that it gives in a fresh process. Ends with one line of
figures, and exit code 1 where something is wrong.
"""

import ctypes
import gc
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import compiled_adv
from compiled_adv.memory import LEAST_BYTES, POOL
from tests.compiled.shared import GRPO, assert_same, configured, expected, run
from tests.random_cases import EPS, METAS, Template, fixed_case

LONG = LEAST_BYTES // (4 * 4)  # from here on outputs come from the pool
BUCKETS = {"rows": [4, 8], "tokens": [16, 128, LONG]}
NORM = {"adv_norm": {"mean_level": "batch", "std_level": "batch", "eps": EPS}}

# name -> (configuration and optional keys, its shaping modes: each is a program of its own)
PROGRAMS = {
    "group scores": (GRPO, ["additive"]),
    "critic and KL": (
        Template(NORM | {"discount": 0.99, "gae_lambda": 0.9}, frozenset({"values", "ref_logp", "is_truncated"})),
        ["additive"],
    ),
    "turns": (
        Template(
            NORM | {"gae_timestep_unit": "turn", "discount": 0.5},
            frozenset({"values", "ref_logp", "is_truncated", "turn_ids", "token_rewards"}),
        ),
        ["additive", "gvpo"],
    ),
}

MOST_GROWTH = 48 << 20


def resident() -> int:
    """Bytes in use, without what the loops of the oracle left to the allocator."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drawn_shape(rng: random.Random) -> tuple[int, int]:
    """One call in a hundred is long: the plain loops take seconds for it."""
    longest = LONG if rng.random() < 0.01 else rng.choice([16, 128])
    shortest = {16: 1, 128: 17, LONG: LONG - 100}[longest]
    return rng.randint(1, 8), rng.randint(shortest, longest)


def drawn_call(rng: random.Random, modes: list[str]) -> dict[str, Any]:
    return {
        "advantage_shaping_mode": rng.choice(modes),
        "gvpo_negative_scale": rng.uniform(0, 2),
        "gvpo_zero_penalty": rng.uniform(0, 2),
        "gvpo_zero_eps": rng.choice([0.0, 1e-6, 0.1]),
    }


def built() -> dict[str, compiled_adv.Compute]:
    return {
        name: compiled_adv.build(configured(template.actor, buckets=BUCKETS))
        for name, (template, _) in PROGRAMS.items()
    }


def small_results(instances: dict[str, compiled_adv.Compute]) -> dict[str, torch.Tensor]:
    """A small batch of every program and mode."""
    results = {}
    for name, (template, modes) in PROGRAMS.items():
        for mode in modes:
            case = fixed_case(template, random.Random(1), 2, 5, "rollouts")
            got, _ = run(instances[name], case, advantage_shaping_mode=mode)
            results |= {f"{name} {mode} {key}": x for key, x in got.items()}
    return results


def in_a_fresh_process() -> dict[str, torch.Tensor]:
    script = "import sys, tests.soak.soak_compiled as soak; soak.save_small_results(sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.pt"
        subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(file)], check=True, timeout=1200)
        return torch.load(file)


def save_small_results(file: str) -> None:
    torch.set_num_threads(1)
    torch.save(small_results(built()), file)


def compile_all(instances: dict[str, compiled_adv.Compute], rng: random.Random) -> None:
    """One call for every bucket of every program."""
    for name, (template, modes) in PROGRAMS.items():
        for mode, rows, tokens in itertools.product(modes, BUCKETS["rows"], BUCKETS["tokens"]):
            run(instances[name], fixed_case(template, rng, rows, tokens), advantage_shaping_mode=mode)


def compiles_of(instances: dict[str, compiled_adv.Compute]) -> int:
    return sum(compute.cache.info().compiles for compute in instances.values())


def main(calls: int = 2000, seed: int = 0) -> int:
    torch.set_num_threads(1)
    rng, start = random.Random(seed), time.time()
    instances = built()
    compile_all(instances, rng)  # first, since each compile keeps some memory
    at_first = 0
    for i in range(calls):
        name = rng.choice(list(PROGRAMS))
        template, modes = PROGRAMS[name]
        rows, tokens = drawn_shape(rng)
        case, call = fixed_case(template, rng, rows, tokens, rng.choice(METAS)), drawn_call(rng, modes)
        (got, got_warnings), (want, want_warnings) = run(instances[name], case, **call), expected(case, **call)
        try:
            assert_same(got, want, 1e-5)
            assert got_warnings == want_warnings
        except AssertionError as error:
            print(f"call {i}, {name}, {rows}x{tokens}, {call}: {error}")
            return 1
        if i == calls // 2:
            at_first = resident()
        if i % 100 == 99:
            print(
                f"{i + 1} calls, {compiles_of(instances)} compiles, {resident() >> 20} MiB, "
                f"{POOL.held_bytes() >> 20} MiB of them in the pool",
                flush=True,
            )
    grown = resident() - at_first
    assert_same(small_results(instances), in_a_fresh_process())
    compiles, most = compiles_of(instances), 6 * sum(len(modes) for _, modes in PROGRAMS.values())
    print(
        f"{calls} calls in {time.time() - start:.0f} s, seed {seed}: results equal to reference, "
        "and at last to a fresh process; "
        f"{compiles} compiles, {most} allowed; second half grew by {grown / (1 << 20):.1f} MiB"
    )
    return int(compiles > most or grown > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
