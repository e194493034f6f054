"""Headless Chromium for tests of pages; without it they are left out, but never in CI."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import browser, missing
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By


class Page:
    """A browser's tab. Its calls block, so they run beside the loop that the router runs in."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.driver.get, url)

    async def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script."""
        return await asyncio.to_thread(self.driver.execute_script, script, *arguments)

    async def text(self, css: str) -> str:
        """What an element shows; empty where there is none, or it is hidden."""
        script = "const e = document.querySelector(arguments[0]); return e && e.checkVisibility() ? e.innerText : ''"
        return await self.run(script, css)

    async def texts(self, css: str) -> list[str]:
        return await self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", css)

    async def type(self, css: str, text: str) -> None:
        """Into an emptied field, and Enter."""
        def act() -> None:
            field = self.driver.find_element(By.CSS_SELECTOR, css)
            field.clear()
            field.send_keys(text + "\n")
        await asyncio.to_thread(act)

    async def click(self, css: str) -> None:
        await asyncio.to_thread(lambda: self.driver.find_element(By.CSS_SELECTOR, css).click())

    async def wait(self, css: str, holds: Callable[[str], bool], what: str, timeout_s: float = 30.0) -> str:
        """Wait until the text of an element fulfils a condition; the text."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not holds(seen := await self.text(css)):
            assert loop.time() < end, f"{what}: {css} shows {seen[:400]!r}"
            await asyncio.sleep(0.1)
        return seen

    async def wait_texts(self, css: str, holds: Callable[[list[str]], bool], what: str, timeout_s: float = 30.0) -> None:
        """The same of all that such elements hold."""
        end = asyncio.get_running_loop().time() + timeout_s
        while not holds(seen := await self.texts(css)):
            assert asyncio.get_running_loop().time() < end, f"{what}: {css} shows {seen}"
            await asyncio.sleep(0.1)

    async def faults(self) -> list[str]:
        """What the browser complains of: errors of scripts, violations of the page's policy."""
        entries = await asyncio.to_thread(self.driver.get_log, "browser")
        return [entry["message"] for entry in entries
                if entry["level"] == "SEVERE" and "dashboard/data" not in entry["message"]]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    lacking = missing()
    if lacking:
        words = f"no browser: install {', '.join(lacking)} (python scripts/browser.py)"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    with browser(tmp_path) as driver:
        yield Page(driver)
