"""Turns of conversations whose KV is moved from decode to prefill, while engines stop, are killed and clients leave.

    python -m lab campaign-turns        300 conversations: bench/results/campaign_turns.json

Waves of ``AT_ONCE`` conversations on 1P2D of real engines. Each has two turns in peace; in the third one something happens
to one of the engines, or to a client, at a random moment of the first half second; the fourth is in peace again. Every
answer is compared with that of an engine that has nothing of it in its cache. A client that left asks again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from cluster import Cluster  # noqa: E402 (tests/support is not on the path before)
from turns import ARGS, TOLD_S, Conversation, pulled, pulls_for_anything, router_of, wait_pickable  # noqa: E402

from xpyd_sidecar.router.app import RouterProcess  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_turns.json"
AT_ONCE = 5
FAULTS = {"none": 1, "client leaves": 3, "decode stands still": 3, "prefill stands still": 3, "decode killed": 1,
          "prefill killed": 1}
"""What happens in a third turn, and how often."""
STILL_S = (0.2, 6.0)
"""For how long an engine stands still: shorter and longer than a pull may take."""


class Campaign:
    """What it has seen."""

    def __init__(self, router: RouterProcess, cluster: Cluster, seed: int) -> None:
        self.router, self.cluster = router, cluster
        self.draw = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.answers = self.wrong = self.failed = 0

    async def wave(self, number: int) -> None:
        """Some conversations at once."""
        talks = [Conversation(self.router, self.cluster, 1000 * number + at) for at in range(AT_ONCE)]
        for _ in range(2):
            await asyncio.gather(*(one.turn() for one in talks))
        fault = self.draw.choices([*FAULTS], [*FAULTS.values()])[0]
        self.faults[fault] += AT_ONCE
        for one in talks:
            one.say()
        asked = [asyncio.ensure_future(one.go_on()) for one in talks]
        await asyncio.sleep(self.draw.uniform(0.0, 0.5))
        await self.happen(fault, asked)
        for one, found in zip(talks, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(found, asyncio.CancelledError):
                await one.go_on()
            elif isinstance(found, BaseException):
                self.failed += 1
                sys.stdout.write(f"failed: {fault}: {found!r}\n")
                await one.go_on()
        await asyncio.to_thread(self.cluster.repair)
        await wait_pickable(self.router)
        await self.compare(talks)
        await asyncio.sleep(TOLD_S)
        await asyncio.gather(*(one.turn() for one in talks))
        await self.compare(talks)
        for one in talks:
            await one.client.aclose()

    async def compare(self, talks: list[Conversation]) -> None:
        """Their last answers with those of an engine that knows nothing."""
        for one in talks:
            self.answers += 1
            if await one.cold() != one.last:
                self.wrong += 1
                sys.stdout.write(f"wrong: {one.messages}\n")

    async def happen(self, fault: str, asked: list[asyncio.Task[None]]) -> None:
        """To whom it does."""
        instance = self.draw.choice(self.cluster.decode) if "decode" in fault else self.cluster.prefill[0]
        if fault == "client leaves":
            for one in asked[:3]:
                one.cancel()
        elif "killed" in fault:
            instance.engine.kill()
        elif "still" in fault:
            group = os.getpgid(instance.engine.group.pid)
            os.killpg(group, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.draw.uniform(*STILL_S))
            finally:
                os.killpg(group, signal.SIGCONT)

    def told(self) -> dict[str, object]:
        """For the results."""
        return {"conversations": sum(self.faults.values()), "answers": self.answers, "wrong": self.wrong,
                "failed": self.failed, "by fault": dict(self.faults), "pulls": pulled(self.router)}


async def run(count: int, seed: int) -> dict[str, object]:
    """So many conversations."""
    with (tempfile.TemporaryDirectory(prefix="xpyd-turns-") as folder, pulls_for_anything(),
          Cluster(Path(folder), decode=2, engine_args=ARGS) as cluster):
        async with router_of(cluster) as router:
            campaign, began = Campaign(router, cluster, seed), time.monotonic()
            for number in range(-(-count // AT_ONCE)):
                await campaign.wave(number)
                sys.stdout.write(f"{time.monotonic() - began:.0f} s {campaign.told()}\n")
                sys.stdout.flush()
            return {"seed": seed, "load": os.getloadavg(), "seconds": round(time.monotonic() - began), **campaign.told()}


def main(arguments: list[str]) -> int:
    """Run, and write what was found; 1: an answer was wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write bench/results/campaign_turns.json")
    asked = parser.parse_args(arguments)
    found = asyncio.run(run(asked.count, asked.seed))
    if asked.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["wrong"] or found["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
