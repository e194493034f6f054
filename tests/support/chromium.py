"""Headless Chromium, driven by Selenium: what a page shows, clicks, screenshots.

    with browser(tmp_path) as driver: ...

Selenium gets both programs by path, so it downloads nothing, and Chromium calls nobody.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""Programs, and the Debian packages that hold them."""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--force-prefers-reduced-motion", "--lang=en-GB")


def missing() -> list[str]:
    """Debian packages that are not there."""
    return [package for program, package in PROGRAMS.items() if shutil.which(program) is None]


@contextlib.contextmanager
def browser(folder: Path, width: int = 1400, height: int = 900, *, scale: float = 1.0) -> Iterator[Chrome]:
    """A browser with an empty profile in ``folder``."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
                 f"--force-device-scale-factor={scale}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = ChromeService(shutil.which("chromedriver"), log_output=str(folder / "chromedriver.log"))
    driver = Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        yield driver
    finally:
        driver.quit()
