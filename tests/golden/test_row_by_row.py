"""A stage that does not say `mixes_rows` takes each row by itself: the eager backend runs it on a few rows at a time.

Every stage of every golden case runs on the whole batch and on each row alone, and must give the same bits. A new stage
that mixes rows and forgets to say so fails here; one that no golden case takes is named.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_adv.conformance import check_case, through_build
from compiled_adv.executable import WHOLE
from compiled_adv.program import StageModule
from compiled_adv.stage import Stage
from compiled_adv.stages.checks import Check

PATHS = sorted(Path(__file__).parent.glob("*/*.json"))

# Only passes make these, and what passes make runs compiled, where nothing is cut into rows.
BY_PASSES = {"Fused", "OneCheck", "NoKLRewards", "OutcomeEverywhere", "GroupCentred"}


class RowsMatter(AssertionError):
    """A stage gives another result for a row alone."""


def row_by_row(stage: Stage, channels: Sequence[Tensor | None]) -> None:
    names = [name.removesuffix("?") for name in stage.reads]
    cut = [x is not None and x.ndim > 0 and name not in WHOLE for name, x in zip(names, channels, strict=True)]
    rows = max(len(x) for x, is_cut in zip(channels, cut, strict=True) if is_cut and x is not None)
    together = results(stage, channels)
    for b in range(rows):
        one = [x[b : b + 1] if is_cut and x is not None else x for x, is_cut in zip(channels, cut, strict=True)]
        for whole, alone in zip(together, results(stage, one), strict=True):
            if not torch.equal(whole[b : b + 1].nan_to_num(1e30), alone.nan_to_num(1e30)):
                raise RowsMatter(f"{stage} mixes rows: row {b} alone gives {alone}, in its batch {whole[b]}")


def results(stage: Stage, channels: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    result = stage.forward(*channels)
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[type[Stage]]:
    """The stages that ran, each of them row by row as well."""
    ran: set[type[Stage]] = set()

    def forward(self: StageModule, *channels: Tensor | None) -> Any:
        ran.add(type(self.stage))
        if not self.stage.mixes_rows:
            row_by_row(self.stage, channels)
        return self.stage.forward(*channels)

    monkeypatch.setattr(StageModule, "forward", forward)
    return ran


def with_stats(config: dict[str, Any], *call: Any) -> Any:
    """The eager backend, with the stages that measure a batch."""
    advantage = dict(config["actor"].get("advantage") or {}, stats=True)
    return through_build("eager")({"actor": {**config["actor"], "advantage": advantage}}, *call)


def kinds(of: type[Stage]) -> Iterator[type[Stage]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_a_stage_takes_each_row_by_itself_or_says_that_it_mixes_them(seen: set[type[Stage]]) -> None:
    for path in PATHS:
        result = check_case(json.loads(path.read_text()), with_stats)
        assert result.status == "passed", f"{path.stem}: {result.reason}"
    ours = [kind for kind in kinds(Stage) if kind.__module__.startswith("compiled_adv.") and kind is not Check]
    unseen = {kind.__name__ for kind in ours if not kind.mixes_rows and kind not in seen}
    assert unseen == BY_PASSES, "a golden case must take each stage that the eager backend may run on some rows"


def test_a_stage_that_forgets_is_found() -> None:
    class Forgets(Stage):
        reads = ("rewards",)
        writes = ("centred",)

        def forward(self, rewards_B):
            return rewards_B - rewards_B.mean()

    with pytest.raises(RowsMatter, match="Forgets"):
        row_by_row(Forgets(), [torch.tensor([1.0, 2.0])])
