"""A rollout of a fleet: batches of both roles at once, as fast as the surge allows, and budgets that fit.

    XPYD_FLEET=96P144D XPYD_FLEET_START_S=60 …      another size, and another time that an engine takes to start
    XPYD_FLEET_RESULTS=FILE …                       what it took, into a file (`python -m lab campaign-fleet`)
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from kube_client import KubeError, Object
from kube_team import Team
from kube_watchdog import Watchdog
from kube_watched import is_ready, label
from node_agent import ROLE, Script, by_image, image_of

PREFILL, DECODE = map(int, re.findall(r"\d+", os.environ.get("XPYD_FLEET", "8P12D")))
START_S = float(os.environ.get("XPYD_FLEET_START_S", "8"))
DRAIN_S = START_S / 8
RESULTS = os.environ.get("XPYD_FLEET_RESULTS", "")
SHAPE = f"{PREFILL}P{DECODE}D"
ROLLOUT = {"maxSurge": "25%" if PREFILL < 50 else "10%"}
SLACK = 1.2
"""Of a campaign alone: beside other tiers the API server itself waits for a processor."""
pytestmark = pytest.mark.timeout(1200 + 100 * START_S)


def surge(count: int) -> int:
    return math.ceil(count * int(ROLLOUT["maxSurge"].removesuffix("%")) / 100)


def note(name: str, figures: dict[str, float]) -> None:
    """Into the file of the campaign, where there is one."""
    if not RESULTS:
        return
    file = Path(RESULTS)
    found = json.loads(file.read_text()) if file.exists() else {}
    same = {"fleet": SHAPE, "start_s": START_S, "drain_s": DRAIN_S, "max_surge": ROLLOUT["maxSurge"]}
    rolls = found.get("rolls", {}) if same.items() <= found.items() else {}
    file.write_text(json.dumps({**same, "rolls": {**rolls, name: figures}}, indent=2) + "\n")


@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.test_all)], ids=["same KV", "other KV"])
async def test_a_fleet_rolls_in_batches_of_both_roles_at_once(team: Team, same: bool) -> None:
    """Within (instances / surge) x (start + canary + drain) x 1.2 in a campaign; a canary takes the time of a start."""
    if not same:
        team.agent.fingerprint = by_image
    team.agent.script = lambda _: Script(start_s=0.2)
    await team.apply(team.document(prefill=PREFILL, decode=DECODE, rollout=ROLLOUT, engine={"image": "engine:1"}))
    await team.wait_settled(SHAPE, deadline_s=240 + PREFILL + DECODE)
    budgets = {name: each["spec"]["minAvailable"] for name, each in team.of("PodDisruptionBudget").items()}
    assert budgets == {"qwen-prefill": PREFILL - 1, "qwen-decode": DECODE - 1}
    team.agent.script = lambda _: Script(start_s=START_S, drain_s=DRAIN_S)
    dog = Watchdog(team, floors={"prefill": PREFILL, "decode": DECODE},
                   most={"prefill": PREFILL + surge(PREFILL), "decode": DECODE + surge(DECODE)})
    starting: set[frozenset[str]] = set()
    at_once: Counter[str] = Counter()

    def look(_was: Object | None, _now: Object | None) -> None:
        new = Counter(label(pod, ROLE) for pod in team.pods() if image_of(pod) == "engine:2" and not is_ready(pod))
        starting.add(frozenset(new))
        at_once.update(new - at_once)  # the most of each

    team.mirrors["Pod"].listeners.append(look)
    most_s = max(math.ceil(count / surge(count)) for count in (PREFILL, DECODE)) * (2 * START_S + DRAIN_S) * SLACK
    began, kept_s = time.monotonic(), team.operator.kept_waiting_s()
    await team.apply(team.document(prefill=PREFILL, decode=DECODE, rollout=ROLLOUT, engine={"image": "engine:2"}))
    await team.wait(lambda: dog.made, "a canary is made")
    await team.wait_settled(SHAPE, deadline_s=10 * most_s)
    took_s = time.monotonic() - began - (team.operator.kept_waiting_s() - kept_s)
    assert {image_of(pod) for pod in team.pods()} == {"engine:2"}
    assert not dog.pairless
    assert frozenset(("prefill", "decode")) in starting, "both roles roll at once"
    for role, count in (("prefill", PREFILL), ("decode", DECODE)):
        assert at_once[role] >= min(2, surge(count)), f"{role} rolls in batches"
    print(f"{SHAPE} rolled in {took_s:.1f} s, at most {most_s:.1f} s")
    note("same KV" if same else "other KV", {
        "seconds": round(took_s, 1), "most_s": round(most_s, 1), "share": round(took_s / most_s, 2),
        "faults": len(dog.faults)})
    assert took_s <= most_s or not RESULTS
    await dog.end()


async def test_budgets_follow_the_rollout_and_the_count(team: Team) -> None:
    rollout = {"maxUnavailable": "40%"}
    await team.apply(team.document(prefill=2, decode=5, rollout=rollout))
    await team.wait_settled("2P5D")

    def least() -> dict[str, int]:
        return {name: each["spec"]["minAvailable"] for name, each in team.of("PodDisruptionBudget").items()}

    assert least() == {"qwen-prefill": 1, "qwen-decode": 3}
    before = {pod["metadata"]["uid"] for pod in team.pods()}
    await team.apply(team.document(prefill=2, decode=5, rollout={"maxUnavailable": 5}))
    await team.wait(lambda: least() == {"qwen-prefill": 0, "qwen-decode": 0}, "the budgets follow")
    assert {pod["metadata"]["uid"] for pod in team.pods()} == before


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"maxSurge": 0, "maxUnavailable": 0}, "must be at least 1 when maxSurge is 0"),
        ({"maxSurge": "0%"}, "must be at least 1 when maxSurge is 0"),
        ({"maxSurge": "0%", "maxUnavailable": "0%"}, "must be at least 1 when maxSurge is 0"),
        ({"maxSurge": "10"}, "spec.rollout.maxSurge"),
        ({"maxUnavailable": "101%"}, "spec.rollout.maxUnavailable"),
        ({"maxUnavailable": 1001}, "spec.rollout.maxUnavailable"),
    ],
    ids=str,
)
async def test_the_api_server_refuses_what_is_no_bound(quiet_team: Team, rollout: dict[str, object], words: str) -> None:
    with pytest.raises(KubeError, match=words):
        await quiet_team.apply(quiet_team.document(rollout=rollout))
    await quiet_team.apply(quiet_team.document(rollout={"maxSurge": "0%", "maxUnavailable": "5%"}))
