"""The fixture itself: it sees the console's errors, requests to the network among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("<script>undefinedName()</script>", "undefinedName"),
        ('<img src="https://example.org/x.png">', "ERR_NAME_NOT_RESOLVED"),
        ("<p>fine</p>", None),
    ],
)
def test_the_console_tells(page: Any, tmp_path: Path, body: str, complaint: str | None) -> None:
    path = tmp_path / "page.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{body}')
    page.open(path)
    errors = page.errors()
    assert (errors == []) if complaint is None else (len(errors) == 1 and complaint in errors[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reader_prefers_a_scheme(page: Any, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "page.html"
    path.write_text('<!doctype html><link rel="icon" href="data:,">')
    page.prefer(scheme)
    page.open(path)
    assert page.js("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
