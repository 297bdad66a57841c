"""Each stage of one pipeline by itself, on what it gets there: token GAE with KL, critic, both norms, GVPO.

As torch runs it, and (not on the small ladder, since every stage is compiled) as torch.compile compiles it alone. Each
answer is compared with what the stage gave within the eager pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch

from compiled_adv.admit import admit, admit_call
from compiled_adv.pipeline import Pipeline, wire
from compiled_adv.program import StageModule, lower
from compiled_adv.resolve import resolve_spec
from compiled_adv.spec import load_config
from perf.measure import record
from perf.shapes import LADDERS, RECIPES

RECIPE = RECIPES["token_gae_gvpo"]
TOLERANCE = 1e-5


class Watch(torch.fx.Interpreter):
    """Runs a segment and keeps what each stage got and gave."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_module(target, args, kwargs)
        self.seen[target] = (args, result)
        return result


def _admitted(rows: int, tokens: int) -> tuple[Pipeline, Mapping[str, Any]]:
    spec = load_config({"actor": dict(RECIPE.actor)})
    resolved = resolve_spec(spec)
    batch, meta = RECIPE.batch(rows, tokens)
    call = admit_call(dict(RECIPE.per_call), spec, resolved)
    admitted = admit(batch, meta, call, spec, resolved)
    pipeline = wire(spec, resolved, frozenset(admitted.channels), call.advantage_shaping_mode, mopd=False)
    return pipeline, admitted.channels


@lru_cache(maxsize=1)
def stages(rows: int, tokens: int) -> dict[str, tuple[torch.nn.Module, tuple[Any, ...], Any]]:
    """Name -> the stage, what it gets and what it gives."""
    pipeline, channels = _admitted(rows, tokens)
    (segment,) = lower(pipeline).segments
    watch = Watch(segment.module)  # type: ignore[arg-type]
    watch.run(*(channels[version] for version in segment.inputs))
    modules = {name: segment.module.get_submodule(name) for name in watch.seen}  # type: ignore[union-attr]
    return {name: (module, *watch.seen[name]) for name, module in modules.items() if isinstance(module, StageModule)}


def _difference(got: Any, expected: Any) -> float:
    pairs = zip(_tensors(got), _tensors(expected), strict=True)
    off = [(a.double() - b.double()).abs() / (1 + b.double().abs()) for a, b in pairs if a.numel()]
    return max((float(x.nan_to_num(posinf=0.0).max()) for x in off), default=0.0)


def _tensors(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else [y for y in x if isinstance(y, torch.Tensor)]


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("name", stages(16, 64))
def test_stage(benchmark: Any, name: str, backend: str, request: pytest.FixtureRequest) -> None:
    ladder = request.config.getoption("--ladder")
    if backend == "compiled" and ladder == "small":
        pytest.skip("stages are compiled one by one on the larger ladders")
    rows, tokens = LADDERS[ladder][-1]
    module, args, expected = stages(rows, tokens)[name]
    call = module if backend == "eager" else torch.compile(module, fullgraph=True, dynamic=False)
    with torch.no_grad():
        off = _difference(call(*args), expected)
        assert off <= TOLERANCE, off
        benchmark.group = f"{name} {rows}x{tokens}"
        facts = {"recipe": "token_gae_gvpo", "rows": rows, "tokens": tokens, "stage": name, "difference": off}
        record(benchmark, lambda: call(*args), suite="stage", contender=backend, **facts)
