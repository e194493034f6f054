"""``campaign-groups``, with real engines: a member of a group is killed, stopped or cut off, idle and in mid-answer;
of a member with ranks also its server alone is stopped.

Two decode groups of two members each, in networks of their own (root), beside one prefill engine: two tensor ranks, or two
data-parallel ranks with shared experts. After each fault: no wrong answer, no stream lost, the router sends nothing to the
group within seconds, no engine of it runs alone for more than 20 s, and another life begins by itself. Figures go into
bench/results/campaign_group_faults.json. Six services of a few minutes each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import complete
from group_service import GroupService, groups, stream
from members_apart import Bridge
from service import wait
from stand_in_ranks import make_rank_stand_in

from xpyd_operator.local import procs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="networks of members are made by root")
RESULTS = Path(__file__).parents[2] / "bench/results/campaign_group_faults.json"
KINDS = {"tensor": {"tensor": 2}, "data": {"data": 2}}
STAND_INS = "stand-ins"
"""For engines with two ranks; agents, launchers and the router are real. They have no workers whose pulse could stop."""
PROMPTS = [[3 + number, 40, 50 + number, 7] * (3 + 9 * number) for number in range(6)]
TOKENS, LONG = 12, 600
SEEN_S = 10.0
"""Until the router takes a group that has lost a member for one that does not serve. A leader that is cut off is seen by
three beats that do not come, and a probe that nobody answers."""
ALONE_S = 20.0
"""That an engine of a round may run on when another member's has ended, is stopped or is cut off."""
BEGUN_S = 30.0
"""Until the next life begins, from the fault or, where a link was cut, from its end; then engines start as ever."""
HANGS_S, HUNG_S = 15.0, 120.0
"""Until a server without an answer is seen (three looks), and until the planner has its engine begun again."""
BACK_S = 300.0
PAUSE_S = 8.0


class Streams:
    """Streams of all prompts at once, each compared with what one engine says."""

    def __init__(self, url: str) -> None:
        self.found: list[list[int]] = [[] for _ in PROMPTS]
        self._clients = [threading.Thread(target=stream, args=(url, prompt, LONG, into))
                         for prompt, into in zip(PROMPTS, self.found, strict=True)]
        for client in self._clients:
            client.start()
        wait(lambda: all(self.found), 60, "all begun")

    def check(self, expected: list[list[int]]) -> None:
        for client in self._clients:
            client.join(BACK_S)
        assert self.found == expected


class Faults:
    """Of one service."""

    def __init__(self, one: GroupService, bridge: Bridge) -> None:
        self._one, self._bridge = one, bridge
        (prefill,) = one.fleet("prefill")
        self.plain = f"http://{prefill.http[0]}"
        self.expected = self.answers(self.plain, TOKENS)
        self.long = self.answers(self.plain, LONG)

    def answers(self, url: str, tokens: int) -> list[list[int]]:
        return [complete(url, prompt, tokens)["token_ids"] for prompt in PROMPTS]

    def ready(self) -> list[str]:
        """Decode groups that requests are sent to, by name."""
        return sorted(each.instance for each in self._one.fleet("decode") if each.state == "ready" and not each.suspended)

    def victim(self, turn: int) -> str:
        """The groups in turn: three ends within ten minutes are another story."""
        return self.ready()[turn % 2]

    def row(self, how: str, index: int, turn: int, *, busy: bool) -> dict[str, Any]:
        """One fault and what follows; times in seconds."""
        one = self._one
        name = self.victim(turn)
        streams = Streams(one.url) if busy else None
        if busy:
            assert next(each for each in one.fleet("decode") if each.instance == name).in_flight, "it answers nothing"
        old = {member: one.engine(name, member) for member in (0, 1)}
        life, launchers = one.life(name), [one.launcher(name, member) for member in (0, 1)]
        self.harm(how, name, index)
        began, at = time.monotonic(), dict[str, float]()
        ends, fault_over = Ends(old, began), began
        while not {"seen", "alone", "gone", "begun", "back"} <= at.keys():
            assert time.monotonic() < began + BACK_S, f"{how} of member {index}, busy {busy}: only {at} within {BACK_S:g} s"
            ready, begun = name in self.ready(), one.life(name) not in ("", life)
            assert not begun or not ends.left(), "engines of two lives run"
            for what, holds in (("seen", not ready), ("begun", begun), ("back", "begun" in at and ready)):
                if holds and what not in at:
                    at[what] = round(time.monotonic() - began, 1)
            if 1 - index in ends.after:
                at["alone"] = ends.after[1 - index]
            if len(ends.after) == len(old):
                at["gone"] = max(ends.after.values())
            if how == "cut" and fault_over == began and "gone" in at:
                self.mend(name, index)
                fault_over = time.monotonic()
            time.sleep(0.25)
        if streams is not None:
            streams.check(self.long)
        assert self.answers(one.url, TOKENS) == self.expected
        if how != "hang":  # the supervisor starts the leader's again, once it was not healthy for two minutes
            assert launchers == [one.launcher(name, member) for member in (0, 1)], "launchers have stayed"
        return {"how": how, "member": index, "busy": busy, **at, "begun_after": round(at["begun"] + began - fault_over, 1)}

    def harm(self, how: str, name: str, index: int) -> None:
        match how:
            case "kill" | "stop":
                self.signal(name, index, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            case "hang":
                os.kill(self._one.server(name, index), signal.SIGSTOP)
            case "cut":
                self._bridge.cut(int(name.rpartition("-e")[2]), index)

    def mend(self, name: str, index: int) -> None:
        self._bridge.mend(int(name.rpartition("-e")[2]), index)

    def signal(self, name: str, index: int, number: int) -> None:
        for each in self._one.engine(name, index):
            procs.send(each.pid, each.start, signal.Signals(number))


class Ends(threading.Thread):
    """When engines have ended: looked at often, since what else is asked takes seconds on a busy machine."""

    def __init__(self, engines: dict[int, list[procs.Stat]], began: float) -> None:
        """``engines``: the processes of each member's."""
        super().__init__(daemon=True)
        self._engines, self._began = engines, began
        self.after: dict[int, float] = {}
        """Seconds from ``began``, by member."""
        self.start()

    def run(self) -> None:
        while len(self.after) < len(self._engines):
            for member in self._engines.keys() - self.after.keys():
                if not any(map(still, self._engines[member])):
                    self.after[member] = round(time.monotonic() - self._began, 1)
            time.sleep(0.1)

    def left(self) -> bool:
        """Whether any of them runs now."""
        return any(still(each) for engine in self._engines.values() for each in engine)


def still(process: procs.Stat) -> bool:
    """The process of then lives."""
    now = procs.read_stat(process.pid)
    return now is not None and now.start == process.start and not now.dead


@pytest.fixture
def bridge(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bridge]:
    python = make_rank_stand_in(tmp_path) if STAND_INS in request.node.name else sys.executable
    with Bridge(tmp_path, python) as made:
        yield made


def write(name: str, rows: Any) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**found, name: rows}, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize(("kind", "how"), [
    (STAND_INS, "kill"), (STAND_INS, "cut"), *((kind, how) for kind in KINDS for how in ("kill", "stop", "cut"))])
def test_a_member_that_is_lost_ends_its_group_which_comes_back_and_loses_no_stream(
        tmp_path: Path, bridge: Bridge, kind: str, how: str) -> None:
    with groups(tmp_path, "decode", KINDS.get(kind, KINDS["data"]), replicas=2, bridge=bridge) as one:
        faults, rows = Faults(one, bridge), []
        plan = [(1, False), (1, True), (0, False), (0, True)] if kind in KINDS else [(1, False), (0, False)]
        for turn, (index, busy) in enumerate(plan):
            rows.append(faults.row(how, index, turn, busy=busy))
            print(kind, rows[-1], flush=True)
            write(f"{kind} {how}", rows)
        for row in rows:
            assert row["seen"] <= SEEN_S, row
            assert row["alone"] <= ALONE_S, row
            assert row["begun_after"] <= BEGUN_S, row


@pytest.mark.parametrize("kind", [STAND_INS, "data"])
def test_a_follower_whose_server_alone_is_stopped_is_seen_and_its_streams_go_on_elsewhere(
        tmp_path: Path, bridge: Bridge, kind: str) -> None:
    with groups(tmp_path, "decode", KINDS["data"], replicas=2, bridge=bridge) as one:
        row = Faults(one, bridge).row("hang", 1, 0, busy=kind != STAND_INS)
        print(kind, row, flush=True)
        write(f"{kind} hang", row)
        assert row["seen"] <= HANGS_S, row
        assert row["begun_after"] <= HUNG_S + BEGUN_S, row


@pytest.mark.parametrize("kind", KINDS)
def test_eight_seconds_of_silence_under_load_end_nothing(tmp_path: Path, bridge: Bridge, kind: str) -> None:
    with groups(tmp_path, "decode", KINDS[kind], replicas=2, bridge=bridge) as one:
        faults = Faults(one, bridge)
        for index in (1, 0):
            name, streams = faults.victim(index), Streams(one.url)
            before = {each.instance: each.incarnation for each in one.fleet("decode")}
            faults.signal(name, index, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            assert not all(len(found) == LONG for found in streams.found), "nothing waited for it"
            faults.signal(name, index, signal.SIGCONT)
            streams.check(faults.long)
            wait(lambda: len(faults.ready()) == 2, 30, "both serve")
            assert before == {each.instance: each.incarnation for each in one.fleet("decode")}
        write(f"{kind} silent for {PAUSE_S:g} s", "nothing ended")
