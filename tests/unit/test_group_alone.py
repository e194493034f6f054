"""How long an engine runs alone once another member was stopped: rounds, pulses and launchers on a clock of our own."""

from __future__ import annotations

from itertools import product

import pytest

from xpyd_sidecar.agent import rounds
from xpyd_sidecar.agent.group import Lead, Seat
from xpyd_sidecar.agent.pulses import Pulses
from xpyd_sidecar.contract.group import GroupRound, MemberAnswer, MemberHeld, MemberHello, MemberState, Pulse
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.engine.worker.pulse import EVERY_S
from xpyd_sidecar.member.__main__ import END_S, LOOK_S

ALONE_S, GOING_S = 20.0, 1.0
"""What is allowed, and what of that is left for processes to go and for a machine that is busy."""
LIFE = "f" * 32
STEP_S = 0.01
AROUND_S = 0.26
"""Of an agent's loop: it rests for ``rounds.LOOK_S`` and works for a little."""
PHASES = (0.01, 0.34, 0.67, 0.99)
EARLY = 400
"""Steps before the stop: pulses and hellos are under way."""


def hello(index: int, seq: int, word: str, held: MemberHeld) -> MemberHello:
    return MemberHello(1, InstanceName("q-e3"), index, "x", "b", seq, held, LIFE, word)


class Member:
    """Its agent, as ``rounds`` runs one, and its launcher."""

    def __init__(self, agent: float, pulse: float) -> None:
        """Phases, as shares of a period."""
        kept = GroupRound(1, LIFE, "10.0.0.1", 31000)
        self.launcher = MemberState("l", 1, turn=1, life=LIFE, running=True)
        self.seat = Seat.restore(0.0, kept).watch(self.launcher)
        self.pulses = Pulses()
        self.looks_at, self.pulse, self.seq, self.said_at = agent * AROUND_S, pulse * EVERY_S, 0, -1.0

    def look(self, now: float, stopped_at: float) -> None:
        beat = int((min(now, stopped_at) - self.pulse) // EVERY_S)
        self.pulses = self.pulses.observe(self.launcher, [Pulse(7, LIFE, beat, 1, False)], now)
        self.seq += 1
        self.looks_at += AROUND_S


def alone_s(stopped: int, phases: tuple[float, float, float, float]) -> float:
    """Seconds from the stop of one of two members until the other's launcher has ended its engine."""
    of_leader, of_follower, pulse, of_launcher = phases
    members = [Member(of_leader, pulse), Member(of_follower, pulse)]
    lead = Lead.restore("c" * 24, 2, 0.0, members[0].seat.round)
    launcher_at, at = of_launcher * LOOK_S, EARLY * STEP_S
    for step in range(EARLY + 3000):
        now = step * STEP_S
        for index, member in enumerate(members):
            if now < member.looks_at:
                continue
            member.look(now, at if index == stopped else float("inf"))
            lead = lead.tick(now) if index == 0 else lead
            if index and now - member.said_at < rounds.HELLO_S:
                continue
            member.said_at = now
            lead = lead.receive(hello(index, member.seq, member.pulses.word, member.seat.member_state), now)
            call, life = lead.answer()
            member.seat = member.seat.receive(MemberAnswer(1, call, life, "10.0.0.1", 31000), now).tick(now)
        if now >= launcher_at:
            launcher_at += LOOK_S
            if not members[1 - stopped].seat.life:
                return now - at + END_S
    raise AssertionError("it runs on")


@pytest.mark.parametrize("stopped", [0, 1])
def test_an_engine_runs_alone_for_20_s_at_most_however_the_looks_of_all_fall(stopped: int) -> None:
    found = [alone_s(stopped, phases) for phases in product(PHASES, repeat=4)]
    assert 15.0 <= max(found) <= ALONE_S - GOING_S, max(found)
