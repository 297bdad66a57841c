"""The picture of compiled-adv tune in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_adv.tune import Cost, Workload, picture, tune


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_drawn(page: Any, tmp_path: Path, scheme: str) -> None:
    work = Workload({(8, 100): 5, (8, 900): 2, (4, 1500): 1, (6, 300): 3}, "<b>lengths</b>.json")
    tuning = tune(work, Cost(1e-3, 1e-8, 2.0, 100_000), 4)
    path = tmp_path / "picture.html"
    path.write_text(picture(tuning))
    page.prefer(scheme)
    page.open(path)
    assert page.errors() == []
    assert len(page.all("section .chart .main-svg")) >= 3
    assert page.js("document.querySelectorAll('dd b').length") == 0
