"""Make docs/pictures/dashboard.png: a router under load before scripted engines, seen in headless Chromium.

    python -m lab dashboard-picture [FILE] [--seconds 130] [--theme light|dark]

Router and page are the real ones; engines are scripted, two prefill and three decode, of which one breaks a few streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path

from chromium import browser
from dashboard_stage import TOKEN, Stage, stage
from scripted_engine import Play
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parents[2]
SIZE = (1440, 1140)
TRIES = 4


async def work(s: Stage, seconds: float) -> None:
    """Load that comes and goes, and some trouble near its end: streams that go on elsewhere, and some that cannot."""
    s.kept.update({"p0": 0.31, "p1": 0.22, "d0": 0.48, "d1": 0.62, "d2": 0.35})
    for share in (0.3, 0.5, 0.4, 0.25):
        await s.load(rate=30 * share, seconds=seconds / 5)
    breaks = [Play(error_after=3, before=0.1), Play(die_after=3, before=0.1)]
    s.fleet.d[2].plays.extend(breaks)
    await s.load(rate=12, seconds=1.0, temperature=1.0)
    s.fleet.d[2].plays.extend(breaks * 3)
    await s.load(rate=14, seconds=seconds / 5)


async def shoot(seconds: float, theme: str) -> bytes:
    """Load the router, and take the picture while it works."""
    async with stage(2, 3) as s:
        working = asyncio.create_task(work(s, seconds))
        await asyncio.sleep(seconds * 0.93)
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder), *SIZE) as driver:
            await asyncio.to_thread(driver.get, s.url)
            store = "sessionStorage.setItem('xpyd.token', arguments[0]); localStorage.setItem('xpyd.theme', arguments[1])"
            await asyncio.to_thread(driver.execute_script, store, TOKEN, theme)
            await asyncio.to_thread(driver.get, s.url)
            await asyncio.sleep(2.5)
            if working.done():
                working.result()
            picture = await asyncio.to_thread(taken, driver)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return picture


def taken(driver: Chrome) -> bytes:
    """A screenshot. The driver waits 10 s for one, which a busy machine may need more than once."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(TimeoutException):
            return driver.get_screenshot_as_png()
    return driver.get_screenshot_as_png()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Make the picture of the dashboard that the documentation shows.")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs/pictures/dashboard.png")
    parser.add_argument("--seconds", type=float, default=130.0, help="how long the router works before")
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    args = parser.parse_args()
    picture = asyncio.run(shoot(args.seconds, args.theme))
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_bytes(picture)


if __name__ == "__main__":
    main()
