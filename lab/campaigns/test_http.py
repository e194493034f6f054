"""The long HTTP fuzz: many seeds, figures into bench/results/campaign_http.json. XPYD_HTTP_ROUNDS: shapes per seed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from http_fuzz import Fuzz, site

RESULTS = Path(__file__).parents[2] / "bench/results/campaign_http.json"
SEEDS = range(100, 120)
LOOPS = ("router",)


async def test_many_seeds() -> None:
    rounds = int(os.environ.get("XPYD_HTTP_ROUNDS", "1000"))
    statuses: Counter[int] = Counter()
    shapes: Counter[str] = Counter()
    bad: list[str] = []
    began = time.monotonic()
    async with site() as f:
        for seed in SEEDS:
            report = await Fuzz(f.router.port, seed).run(rounds, beside=16)
            statuses += report.statuses
            shapes += report.shapes
            bad += report.bad
            print(f"seed {seed}: {sum(shapes.values())} connections, {len(bad)} bad", flush=True)
        await f.wait_quiet()
    RESULTS.write_text(json.dumps({
        "connections": sum(shapes.values()), "shapes": dict(sorted(shapes.items())),
        "answers": {str(status): count for status, count in sorted(statuses.items())},
        "desync_hang_or_harm": len(bad), "seconds": round(time.monotonic() - began)}, indent=2) + "\n")
    assert bad == []
