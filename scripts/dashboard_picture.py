"""Make docs/pictures/dashboard.png: a router under load before scripted engines, seen in headless Chromium.

    PYTHONPATH=tests/support python scripts/dashboard_picture.py [FILE] [--seconds 130] [--theme light|dark]

Router and page are the real ones; engines are scripted, two prefill and three decode, of which one breaks a few streams.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from chromium import browser
from dashboard_stage import TOKEN, Stage, stage
from scripted_engine import Play

ROOT = Path(__file__).resolve().parents[1]
SIZE = (1440, 1180)


async def work(s: Stage, seconds: float) -> None:
    """Load that comes and goes, and some trouble near its end."""
    s.kept.update({"p0": 0.31, "p1": 0.22, "d0": 0.48, "d1": 0.62, "d2": 0.35})
    waves = (0.3, 0.5, 0.4, 0.25, 0.45)
    for number, share in enumerate(waves):
        if number == len(waves) - 2:
            s.fleet.d[2].plays.extend([Play(chunks=9, error_after=3, before=0.1), Play(chunks=9, die_after=3, before=0.1)])
        await s.load(rate=40 * share, seconds=seconds / len(waves))


async def shoot(file: Path, seconds: float, theme: str) -> None:
    """Load the router, and take the picture while it works."""
    async with stage(2, 3, failover="error", max_in_flight=1000) as s:
        working = asyncio.create_task(work(s, seconds))
        await asyncio.sleep(seconds * 0.93)
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder), *SIZE) as driver:
            await asyncio.to_thread(driver.get, s.url)
            store = "sessionStorage.setItem('xpyd.token', arguments[0]); localStorage.setItem('xpyd.theme', arguments[1])"
            await asyncio.to_thread(driver.execute_script, store, TOKEN, theme)
            await asyncio.to_thread(driver.get, s.url)
            await asyncio.sleep(2.5)
            file.parent.mkdir(parents=True, exist_ok=True)
            if not await asyncio.to_thread(driver.save_screenshot, str(file)):
                raise SystemExit(f"{file} could not be written")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Make the picture of the dashboard that the documentation shows.")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs/pictures/dashboard.png")
    parser.add_argument("--seconds", type=float, default=130.0, help="how long the router works before")
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    args = parser.parse_args()
    asyncio.run(shoot(args.file, args.seconds, args.theme))


if __name__ == "__main__":
    main()
