"""Reads that cannot be cancelled: the ticket after them, slots, silence, and what the end of a session leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.reads import (
    DRAIN_S,
    METADATA_MAX,
    READ_BYTES,
    READS,
    BeginRead,
    DropOrder,
    EndAgent,
    HandOver,
    PeerOpened,
    Prove,
    ReadLimits,
    Reads,
    SessionDrained,
    SessionLost,
    Step,
    unusable,
)
from xpyd_sidecar.kv.ring import SHARE, Ring
from xpyd_sidecar.kv.session_bodies import NixlMemory

MEMORY = NixlMemory("xpyd-1", b"metadata", "1.5.1", 4096, 1 << 20, 64, b"\1" * 32)
LIMITS = ReadLimits(open_s=2.0, silence_s=5.0, fence_s=60.0)
SOME = READ_BYTES // 2
OWN = READS // SHARE
"""Reads of one session."""


def opened(*sessions: int, slots: int = READS * READ_BYTES) -> Reads:
    machine = Reads(Ring(slots), LIMITS)
    for session in sessions:
        assert machine.join(session, 0.0) == [Prove(session)]
        assert machine.proven(session, right=True, now=0.0) == [PeerOpened(session)]
    return machine


def begun(machine: Reads, session: int, *numbers: int, now: float = 0.0) -> None:
    for number in numbers:
        assert [type(step) for step in machine.order(session, number, SOME, now)] == [BeginRead]


def slots_of(steps: Sequence[Step]) -> list[int | None]:
    return [step.slot for step in steps if isinstance(step, BeginRead)]


# --- what may be believed ---


def test_what_was_read_counts_when_the_ticket_was_read_after_it() -> None:
    machine = opened(1)
    begun(machine, 1, 5, 6)
    assert machine.on_done(1, 6, 0.1) == [Prove(1)]
    assert machine.on_done(1, 5, 0.2) == []  # the ticket that is being read does not speak for it
    assert machine.proven(1, right=True, now=0.3) == [HandOver(1, (6,)), Prove(1)]
    assert machine.proven(1, right=True, now=0.4) == [HandOver(1, (5,))]
    assert not machine.working


def test_nothing_is_read_before_the_ticket_was_there() -> None:
    machine = Reads(Ring(READS * READ_BYTES), LIMITS)
    machine.join(1, 0.0)
    assert machine.order(1, 1, SOME, 0.0) == []
    assert machine.working
    assert machine.proven(1, right=True, now=0.1) == [PeerOpened(1), BeginRead(1, 1, 0)]


@pytest.mark.parametrize("opening", [True, False])
def test_a_ticket_that_is_another_ends_the_session_with_all_that_was_read(opening: bool) -> None:
    machine = Reads(Ring(READS * READ_BYTES), LIMITS)
    machine.join(1, 0.0)
    if opening:
        assert machine.proven(1, right=False, now=0.1) == [SessionLost(1, "other memory is where its ticket was")]
        return
    machine.proven(1, right=True, now=0.1)
    begun(machine, 1, 1, 2)
    machine.on_done(1, 1, 0.2)
    assert machine.proven(1, right=False, now=0.3) == [SessionLost(1, "has given this session up")]
    assert machine.on_done(1, 2, 0.4) == [DropOrder(1, 2)]
    assert machine.tick(99.0) == []
    assert machine.order(1, 3, SOME, 99.0) == [DropOrder(1, 3)]
    assert machine.leave(1, 99.0) == [DropOrder(1, 1), SessionDrained(1)]


# --- room ---


def test_a_slot_is_used_again_when_what_was_in_it_is_placed_and_no_sooner() -> None:
    machine = opened(1, slots=READ_BYTES)
    begun(machine, 1, 1)
    assert machine.order(1, 2, SOME, 0.0) == []
    machine.on_done(1, 1, 0.1)
    assert machine.proven(1, right=True, now=0.2) == [HandOver(1, (1,))]
    assert machine.on_placed(1, 1, 0.3) == [BeginRead(1, 2, 0)]


def test_an_order_with_memory_of_its_own_needs_no_slot() -> None:
    machine = opened(1, slots=READ_BYTES)
    begun(machine, 1, 1)
    assert machine.order(1, 2, 3 * READ_BYTES, 0.0, slot=False) == [BeginRead(1, 2, None)]


def test_a_session_has_an_eighth_of_the_reads_and_of_the_slots_and_others_the_rest() -> None:
    machine = opened(1, 2)
    begun(machine, 1, *range(OWN))
    assert machine.order(1, OWN, SOME, 0.0) == []
    begun(machine, 2, 0)
    assert machine.on_done(1, 3, 0.1) == [Prove(1)], "its slots are all taken"
    assert machine.proven(1, right=True, now=0.1) == [HandOver(1, (3,))]
    assert machine.on_placed(1, 3, 0.2) == [BeginRead(1, OWN, 3 * READ_BYTES)]


def test_memory_that_is_ordered_for_is_bound_by_the_reads_alone() -> None:
    machine = opened(1)
    for number in range(OWN):
        assert machine.order(1, number, SOME, 0.0, slot=False) == [BeginRead(1, number, None)]
    assert machine.order(1, OWN, SOME, 0.0, slot=False) == []
    assert machine.on_done(1, 3, 0.1) == [Prove(1), BeginRead(1, OWN, None)]


def test_one_order_is_a_sessions_however_many_reads_it_is() -> None:
    machine = opened(1)
    assert len(slots_of(machine.order(1, 1, 2 * OWN * READ_BYTES, 0.0))) == 1
    assert machine.order(1, 2, 1, 0.0) == []


def test_all_sessions_together_have_no_more_reads_than_there_may_be() -> None:
    machine = opened(*range(2 * SHARE))
    for session in range(2 * SHARE):
        for number in range(OWN):
            machine.order(session, number, SOME, 0.0, slot=False)
    flying = sum(one.flying for one in machine._sessions.values())
    assert flying == READS


def test_sessions_take_turns() -> None:
    machine = opened(1, 2, slots=READ_BYTES)
    begun(machine, 1, 1)
    for number in (2, 3):
        assert machine.order(1, number, SOME, 0.0) == []
    assert machine.order(2, 1, SOME, 0.0) == []
    machine.on_done(1, 1, 0.1)
    machine.proven(1, right=True, now=0.1)
    assert machine.on_placed(1, 1, 0.2) == [BeginRead(2, 1, 0)]


def test_what_no_slots_hold_is_dropped() -> None:
    assert opened(1, slots=READ_BYTES).order(1, 7, READ_BYTES + 1, 0.0) == [DropOrder(1, 7)]


# --- silence, and reads that fail ---


def test_silence_counts_from_the_last_read_and_only_while_one_is_under_way() -> None:
    machine = opened(1)
    assert machine.tick(100.0) == []
    begun(machine, 1, 1, now=100.0)
    assert machine.tick(104.9) == []
    begun(machine, 1, 2, now=104.9)
    machine.on_done(1, 1, 104.9)
    assert machine.proven(1, right=True, now=105.0) == [HandOver(1, (1,))]
    assert machine.tick(110.0) == []
    assert machine.tick(110.1) == [SessionLost(1, "nothing of its memory has come for 5.0 s")]
    assert machine.tick(120.0) == []


def test_a_peer_that_does_not_answer_has_so_long_from_the_first_look() -> None:
    machine = Reads(Ring(READS * READ_BYTES), LIMITS)
    machine.join(1, 0.0)
    assert machine.tick(50.0) == []  # an agent was made meanwhile
    assert machine.tick(52.0) == []
    assert machine.tick(52.1) == [SessionLost(1, "no answer within 2.0 s", late=True)]


def test_a_read_that_fails_ends_its_session_and_frees_its_slot() -> None:
    machine = opened(1, 2, slots=READ_BYTES)
    begun(machine, 1, 1)
    machine.order(2, 9, SOME, 0.0)
    assert machine.on_failed(1, 1, "gone", 0.1) == [SessionLost(1, "gone"), DropOrder(1, 1), BeginRead(2, 9, 0)]
    assert machine.leave(1, 0.2) == [SessionDrained(1)]


def test_nothing_is_begun_in_a_session_that_is_lost() -> None:
    machine = opened(1, slots=READ_BYTES)
    begun(machine, 1, 1)
    machine.order(1, 2, SOME, 0.0)
    assert machine.on_failed(1, 1, "gone", 0.1) == [SessionLost(1, "gone"), DropOrder(1, 1)]
    assert machine.tick(0.2) == []
    assert machine.leave(1, 0.3) == [DropOrder(1, 2), SessionDrained(1)]


def test_a_ticket_that_cannot_be_read_ends_its_session() -> None:
    machine = Reads(Ring(READS * READ_BYTES), LIMITS)
    machine.join(1, 0.0)
    assert machine.on_failed(1, None, "gone", 0.1) == [SessionLost(1, "gone")]
    assert machine.leave(1, 0.1) == [SessionDrained(1)]


# --- what the end of a session leaves ---


def test_a_read_of_a_session_that_has_ended_keeps_its_slot_until_it_is_over() -> None:
    machine = opened(1, 2, slots=READ_BYTES)
    begun(machine, 1, 1)
    machine.order(1, 2, SOME, 0.0)
    machine.order(2, 1, SOME, 0.0)
    assert machine.leave(1, 0.1) == [DropOrder(1, 2)]
    assert (machine.stuck_reads, machine.lingers) == (1, True)
    assert machine.on_done(1, 1, 9.0) == [DropOrder(1, 1), SessionDrained(1), BeginRead(2, 1, 0)]
    assert (machine.stuck_reads, machine.lingers) == (0, False)


def test_what_was_handed_over_is_its_sessions_after_its_end() -> None:
    machine = opened(1)
    begun(machine, 1, 1, 2)
    machine.on_done(1, 1, 0.1)
    machine.proven(1, right=True, now=0.1)
    machine.on_done(1, 2, 0.1)
    assert machine.leave(1, 0.2) == [DropOrder(1, 2)]  # the ticket's read is under way
    assert machine.proven(1, right=True, now=0.3) == []
    assert machine.on_placed(1, 1, 0.4) == [SessionDrained(1)]


def test_the_agent_ends_when_a_quarter_is_stuck_and_others_have_had_a_moment() -> None:
    machine = opened(1, 2, 3)
    for session in (1, 2):
        begun(machine, session, *range(OWN))
    begun(machine, 3, 0)
    machine.leave(1, 1.0)
    assert machine.tick(1.0) == []
    machine.leave(2, 1.1)
    assert machine.tick(1.2) == []
    assert machine.order(3, 1, SOME, 1.3) == [], "nothing is begun any more"
    assert machine.on_done(3, 0, 1.4) == [Prove(3)]
    assert machine.tick(1.5) == []
    assert machine.proven(3, right=True, now=1.6) == [HandOver(3, (0,))]
    assert machine.tick(1.6) == [EndAgent()]
    steps = machine.on_agent_ended(1.7)
    dropped = {step for step in steps if isinstance(step, DropOrder)}
    assert dropped == {DropOrder(one, n) for one in (1, 2) for n in range(OWN)}
    assert [step for step in steps if isinstance(step, SessionDrained)] == [SessionDrained(1), SessionDrained(2)]
    assert [step for step in steps if isinstance(step, BeginRead)] == [BeginRead(3, 1, 0)]


def test_the_agent_ends_though_others_are_under_way_and_these_are_read_again() -> None:
    machine = opened(1, 2, 3)
    for session in (1, 2):
        begun(machine, session, *range(OWN))
        machine.leave(session, 1.0)
    begun(machine, 3, 0, 1, 2, now=1.0)
    machine.on_done(3, 1, 1.0)
    machine.tick(1.0)
    assert machine.tick(1.0 + DRAIN_S) == [EndAgent()]
    steps = [step for step in machine.on_agent_ended(2.0) if not isinstance(step, DropOrder | SessionDrained)]
    assert steps[0] == Prove(3)
    assert [(step.number, step.slot) for step in steps[1:] if isinstance(step, BeginRead)] == [(0, 0), (2, READ_BYTES)]
    assert machine.proven(3, right=True, now=2.1) == [HandOver(3, (1,))]


def test_the_agent_ends_when_something_is_stuck_for_too_long() -> None:
    machine = opened(1)
    begun(machine, 1, 1)
    machine.leave(1, 10.0)
    assert machine.tick(10.0 + LIMITS.fence_s) == []
    assert machine.tick(10.1 + LIMITS.fence_s) == [EndAgent()]
    assert machine.on_agent_ended(99.0) == [DropOrder(1, 1), SessionDrained(1)]


def test_what_gets_loose_meanwhile_leaves_the_agent_alone() -> None:
    machine = opened(1, 2)
    begun(machine, 1, 1)
    begun(machine, 2, 1)
    machine.leave(1, 0.0)
    assert machine.tick(1.0 + LIMITS.fence_s) == [SessionLost(2, "nothing of its memory has come for 5.0 s")]
    machine.on_done(1, 1, 1.1 + LIMITS.fence_s)
    assert machine.tick(1.2 + LIMITS.fence_s) == []
    assert machine.join(3, 70.0) == [Prove(3)]
    assert machine.proven(3, right=True, now=70.0) == [PeerOpened(3)]
    begun(machine, 3, 1, now=70.0)


def test_a_session_that_opens_while_the_agent_ends_is_asked_again() -> None:
    machine = opened(1)
    begun(machine, 1, 1)
    machine.leave(1, 0.0)
    machine.join(2, 60.5)
    machine.tick(61.0)
    assert machine.tick(62.0) == [EndAgent()]
    assert [step for step in machine.on_agent_ended(62.0) if isinstance(step, Prove)] == [Prove(2)]
    assert machine.proven(2, right=True, now=62.1) == [PeerOpened(2)]


class Library:
    """What carries the machine's steps out: reads are under way until the test says otherwise."""

    def __init__(self, slots: int) -> None:
        self.machine = Reads(Ring(slots * READ_BYTES), LIMITS)
        self.flying: dict[tuple[int, int], int | None] = {}
        self.tickets: set[int] = set()
        self.here: set[tuple[int, int]] = set()
        self.before_ticket: dict[int, set[tuple[int, int]]] = {}
        self.handed: dict[tuple[int, int], int | None] = {}
        self.slots: dict[tuple[int, int], int | None] = {}
        self.answered: list[tuple[int, int]] = []
        self.gone: set[int] = set()
        self.over: set[int] = set()
        """Sessions that are lost or have ended."""
        self.now = 0.0

    def carry_out(self, steps: Sequence[Step]) -> None:
        todo = deque(steps)
        while todo:
            step = todo.popleft()
            if isinstance(step, SessionLost):
                self.over.add(step.session)
            elif isinstance(step, BeginRead):
                assert step.session not in self.over
                key = step.session, step.number
                assert key not in self.flying
                busy = [slot for one, slot in self.slots.items() if one != key and slot is not None]
                assert step.slot is None or step.slot not in busy, "a slot that something else may still be written into"
                self.flying[key] = self.slots[key] = step.slot
            elif isinstance(step, Prove):
                assert step.session not in self.tickets | self.over
                self.tickets.add(step.session)
                self.before_ticket[step.session] = {key for key in self.here if key[0] == step.session}
            elif isinstance(step, HandOver):
                for number in step.numbers:
                    key = step.session, number
                    assert key in self.before_ticket[step.session], "the ticket was not read after it"
                    self.here.remove(key)
                    self.handed[key] = self.slots[key]
                    self.answered.append(key)
            elif isinstance(step, DropOrder):
                key = step.session, step.number
                assert key not in self.flying, "it is still written"
                self.here.discard(key)
                self.slots.pop(key, None)
                self.answered.append(key)
            elif isinstance(step, SessionDrained):
                assert step.session not in self.tickets
                assert not any(key[0] == step.session for key in self.flying)
                self.gone.add(step.session)
            elif isinstance(step, EndAgent):
                self.flying.clear()
                self.tickets.clear()
                todo.extend(self.machine.on_agent_ended(self.now))


@given(st.data())
def test_every_order_is_answered_once_and_no_slot_is_used_while_it_may_be_written(data: st.DataObject) -> None:
    library = Library(slots=data.draw(st.integers(1, 6)))
    machine, orders, left = library.machine, list[tuple[int, int]](), set[int]()
    for session in range(3):
        library.carry_out(machine.join(session, 0.0))
        if data.draw(st.booleans()):
            library.tickets.remove(session)
            library.carry_out(machine.proven(session, right=True, now=0.0))
    for turn in range(data.draw(st.integers(1, 80))):
        library.now += data.draw(st.sampled_from([0.0, 0.0, 0.1, 3.0, 70.0]))
        now = library.now
        choice = data.draw(st.sampled_from(["order", "done", "done", "ticket", "broke", "placed", "leave", "tick"]))
        if choice == "order":
            session = data.draw(st.integers(0, 2))
            if session not in left:
                orders.append((session, turn))
                size = data.draw(st.sampled_from([1, READ_BYTES, 2 * READ_BYTES]))
                library.carry_out(machine.order(session, turn, size, now, slot=data.draw(st.booleans())))
        elif choice in {"done", "broke"} and library.flying:
            key = data.draw(st.sampled_from(sorted(library.flying)))
            del library.flying[key]
            if choice == "done":
                library.here.add(key)
                library.carry_out(machine.on_done(*key, now))
            else:
                library.carry_out(machine.on_failed(*key, "broken", now))
        elif choice == "ticket" and library.tickets:
            session = data.draw(st.sampled_from(sorted(library.tickets)))
            library.tickets.remove(session)
            library.carry_out(machine.proven(session, right=data.draw(st.integers(0, 9)) > 0, now=now))
        elif choice == "placed" and library.handed:
            key = data.draw(st.sampled_from(sorted(library.handed)))
            del library.handed[key]
            del library.slots[key]
            library.carry_out(machine.on_placed(*key, now))
        elif choice == "leave":
            session = data.draw(st.integers(0, 2))
            left.add(session)
            library.over.add(session)
            library.carry_out(machine.leave(session, now))
        elif choice == "tick":
            library.carry_out(machine.tick(now))
        assert sum(one.flying for one in machine._sessions.values()) <= READS
    for session in range(3):
        library.carry_out(machine.leave(session, library.now))
    for key in list(library.handed):
        del library.handed[key], library.slots[key]
        library.carry_out(machine.on_placed(*key, library.now))
    library.now += LIMITS.fence_s + 1
    for _ in range(2):
        library.carry_out(machine.tick(library.now))
        library.now += DRAIN_S
    assert sorted(library.answered) == sorted(orders)
    assert library.gone == {0, 1, 2}
    assert not machine.lingers
    assert machine._slots.used_bytes == 0


@pytest.mark.parametrize(("changed", "why"), [
    ({}, ""),
    ({"metadata": b""}, "NIXL's description has 0 bytes, not 1 to 32768"),
    ({"metadata": bytes(METADATA_MAX + 1)}, "NIXL's description has 32769 bytes, not 1 to 32768"),
    ({"ticket": b"\1" * 31}, "no agent's name and ticket"),
    ({"ticket": bytes(32)}, "no agent's name and ticket"),  # a wiped one would be one
    ({"agent": ""}, "no agent's name and ticket"),
    ({"agent": "a" * 65}, "no agent's name and ticket"),
    ({"size": 0}, "no memory's place and size"),
    ({"size": -1}, "no memory's place and size"),
    ({"base": 0}, "no memory's place and size"),
    ({"base": (1 << 64) - 1}, "no memory's place and size"),
    ({"ticket_at": 0}, "no memory's place and size"),
    ({"ticket_at": 1 << 64}, "no memory's place and size"),
])
def test_what_of_a_peers_word_is_not_used(changed: dict[str, object], why: str) -> None:
    fields = {name: getattr(MEMORY, name) for name in MEMORY.__struct_fields__}
    assert unusable(NixlMemory(**fields | changed)) == why
