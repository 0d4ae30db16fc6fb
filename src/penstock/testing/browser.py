"""A real browser for tests: headless Chromium, driven by Selenium, with an empty profile of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.core.errors import Unsupported

_PACKAGE = "Install it (Debian: apt-get install chromium chromium-driver; and pip install selenium)."
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def _programs() -> tuple[str, str]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = next(filter(None, map(shutil.which, ("chromedriver", "chromium.chromedriver"))), None)
    if browser is None or driver is None:
        missing = "Chromium" if browser is None else "Chromium's driver"
        raise Unsupported(f"{missing} was not found. {_PACKAGE}")
    return browser, driver


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A Selenium driver of a new browser, which is closed afterwards.

    Raises:
        Unsupported: There is no browser here.
    """
    browser, program = _programs()
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise Unsupported(f"Selenium is not installed. {_PACKAGE}") from error
    with tempfile.TemporaryDirectory(prefix="penstock-browser-", ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = browser
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(program))
        try:
            resize(driver, width, height)
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Give the page this size in CSS pixels, narrower than a window can be where it must."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
