"""A headless Chromium for tests of written pages: `make test-browser` runs them, `make test` leaves them out.

`page` opens files and answers questions about them. Every host name fails to resolve, so a page that asks the network
for anything has an error in its console.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NEEDS = "install Debian's chromium and chromium-driver, and selenium: make test-browser"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1280,1000 "
    "--disable-dev-shm-usage --host-resolver-rules=MAP\u00a0*\u00a0~NOTFOUND"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


class Page:
    """One tab."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Load a file, and forget what the console said before."""
        self.driver.get("about:blank")  # nothing of the last page runs on, to complain of its end in this one's console
        self.errors()
        self.driver.get(path.resolve().as_uri())

    def errors(self) -> list[str]:
        """What the console has had to complain of since it was last asked: errors, and requests that failed."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def js(self, expression: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; `arguments[0]` and so on are what is given here."""
        return self.driver.execute_script(f"return {expression}", *arguments)

    def all(self, css: str) -> list[Any]:
        """The elements of a CSS selector."""
        return self.driver.find_elements("css selector", css)

    def prefer(self, scheme: str) -> None:
        """What the reader's system asks for: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path, width: int = 1280) -> None:
        """The whole page as a PNG."""
        self.driver.set_window_size(width, 1000)
        self.driver.set_window_size(width, self.js("document.documentElement.scrollHeight") + 100)
        self.driver.save_screenshot(str(path))
        self.driver.set_window_size(width, 1000)


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.fail(f"no Chromium here: {NEEDS}")
    try:
        from selenium import webdriver
    except ModuleNotFoundError:
        pytest.fail(f"no selenium here: {NEEDS}")
    os.environ["SE_OFFLINE"] = "true"  # the driver is here; selenium need not look for another
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS.split(" "):
        options.add_argument(flag.replace("\u00a0", " "))
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options, webdriver.ChromeService(driver))
    running.set_page_load_timeout(300)  # for a browser that hangs: a busy machine may stop it for a minute
    yield running
    running.quit()


@pytest.fixture
def page(_driver: Any) -> Page:
    """The browser's tab, in light colours."""
    page = Page(_driver)
    page.prefer("light")
    return page
