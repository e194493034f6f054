"""The router's fault campaign: kills at random points of streams and clients that leave, into a results file.

    python -m lab campaign-router --scripted          960 kills and 9,500 aborts before engines that replay (2 minutes)
    python -m lab campaign-router --real              40 kill -9 of real engines and 500 aborts on real ones (30 minutes)
    … --real --kills 10 --aborts 125 --add               a part of it; figures are added to those in the file

The part that is asked for replaces its figures in the file, with ``--add`` they are summed. Exit code 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from aborts import abort_real, abort_scripted  # noqa: E402 (tests/support is not on the path before)
from cluster import Cluster  # noqa: E402
from kills import kill_streams  # noqa: E402
from real_kills import kill_real  # noqa: E402
from recorded import load  # noqa: E402
from replay import Replay  # noqa: E402
from router_fleet import fleet  # noqa: E402

from xpyd_sidecar.router.serving import waiting  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_router.json"
VICTIMS = 5
"""Decode engines killed before they are started again together."""
ENGINE_ARGS = ("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "96", "--enable-auto-tool-choice",
               "--tool-call-parser", "hermes")
Section = dict[str, Any]


async def scripted(kills: int, aborts: int, seed: int) -> Section:
    """Before scripted engines, with the router in this process."""
    waiting.STALL_S = 0.5  # so that silent engines do not take ten seconds each
    async with fleet(2, 4, replay=Replay(load())) as f:
        killed = await kill_streams(f, kills, seed)
        await f.wait_quiet()
    async with fleet(2, 3, replay=Replay(load())) as f:
        left = await abort_scripted(f, aborts, seed)
        await f.wait_quiet()
    return {"kills_scripted": killed.told(), "aborts_scripted": left.told()}


def real(kills: int, aborts: int, seed: int) -> Iterator[Section]:
    """On real engines: one prefill, one decode engine that lives, and some that are killed in rounds; figures of each."""
    with tempfile.TemporaryDirectory() as folder, Cluster(
            Path(folder), prefill=1, decode=1 + min(VICTIMS, kills), engine_args=ENGINE_ARGS) as cluster:
        cluster.wait_ready()
        if aborts:
            yield {"aborts_real": asyncio.run(abort_real(cluster, aborts, seed)).told()}
        while kills > 0:
            victims = cluster.decode[1:1 + min(VICTIMS, kills)]
            yield {"kills_real": asyncio.run(kill_real(cluster, victims, seed + kills)).told()}
            kills -= len(victims)
            if kills > 0:
                for one in victims:
                    one.engine.kill()  # the server of an engine core that was killed takes a while to end
                cluster.repair()


def _summed(before: Section, more: Section) -> Section:
    """Both together: numbers are added, the longest time is the longest, examples are joined."""
    found = dict(before)
    for name, value in more.items():
        old = found.get(name)
        if old is None:
            found[name] = value
        elif isinstance(value, dict):
            found[name] = _summed(old, value)
        elif isinstance(value, list):
            found[name] = (old + value)[:20]
        else:
            found[name] = max(old, value) if name.startswith("longest") else round(old + value, 4)
    if "finished_share" in found:
        found["finished_share"] = round(found["finished"] / found["killed"], 4) if found["killed"] else 1.0
    return found


def summary(sections: Section) -> Section:
    """The figures that the goals speak of."""
    kills = [sections[name] for name in ("kills_scripted", "kills_real") if name in sections]
    aborts = [sections[name] for name in ("aborts_scripted", "aborts_real") if name in sections]
    killed, finished = sum(one["killed"] for one in kills), sum(one["finished"] for one in kills)
    return {
        "kills_scripted": sections.get("kills_scripted", {}).get("kills", 0),
        "kills_real": sections.get("kills_real", {}).get("kills", 0),
        "aborts_scripted": sections.get("aborts_scripted", {}).get("aborts", 0),
        "aborts_real": sections.get("aborts_real", {}).get("aborts", 0),
        **{name: sum(one[name] for one in kills) for name in ("answers_200", "wrong", "lost_tokens", "duplicated")},
        "finished_share": round(finished / killed, 4) if killed else 1.0,
        "aborts_left_behind": sum(one["left_behind"] for one in aborts),
        "aborts_longest_s": max((one["longest_s"] for one in aborts), default=0.0),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--add", action="store_true", help="add to the figures in the file")
    parser.add_argument("--kills", type=int, help="default 960 scripted, 40 real")
    parser.add_argument("--aborts", type=int, help="default 9500 scripted, 500 real")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # a line for each death
    sections: Section = json.loads(RESULTS.read_text())["sections"] if RESULTS.exists() else {}
    parts: list[Iterator[Section]] = []
    if options.scripted or not options.real:
        parts.append(iter([uvloop.run(scripted(_given(options.kills, 960), _given(options.aborts, 9500), options.seed))]))
    if options.real or not options.scripted:
        parts.append(real(_given(options.kills, 40), _given(options.aborts, 500), options.seed))
    told: Section = {}
    new: set[str] = set()
    for found in itertools.chain(*parts):
        kept = {name: old for name, old in sections.items() if options.add or name in new or name not in found}
        new |= set(found)
        sections = _summed(kept, found)
        told = {**summary(sections), "sections": sections}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    shown = {name: value for name, value in told.items() if name != "sections"}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    bad = told["wrong"] + told["lost_tokens"] + told["duplicated"] + told["aborts_left_behind"]
    return int(bool(bad) or told["finished_share"] < 0.99)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


if __name__ == "__main__":
    sys.exit(main())
