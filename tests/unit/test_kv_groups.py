"""NCCL groups of one process: the machine's laws, and that many processes with it never wait for each other in a circle."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.kv import groups
from xpyd_sidecar.kv.groups import (
    EndGroup,
    GroupLost,
    GroupOpened,
    GroupOver,
    Groups,
    LaunchPiece,
    MakeGroup,
    PieceMoved,
    Way,
)


def machine(most: int = 2, flight: int = 4, depth: int = 2) -> Groups[str]:
    return Groups(most=most, flight=flight, depth=depth, open_s=10, move_s=5, idle_s=60)


def opened(m: Groups[str], *numbers: int, way: Way = Way.SEND, now: float = 0.0) -> None:
    for number in numbers:
        assert m.open(number, way, now) == [MakeGroup(number)]
        assert m.on_opened(number, now) == [GroupOpened(number)]


def connected(m: Groups[str], *numbers: int, way: Way = Way.SEND, now: float = 0.0) -> None:
    """Groups that have carried a piece."""
    for number in numbers:
        opened(m, number, way=way, now=now)
        assert m.move(number, "first", now) == [LaunchPiece(number, "first")]
        assert m.on_launched(number, now) == []
        assert m.on_piece_done(number, now) == [PieceMoved(number, "first")]


def test_pieces_go_in_order_one_launch_at_a_time_and_two_at_once() -> None:
    m = machine()
    assert m.open(1, Way.SEND, 0) == [MakeGroup(1)]
    assert m.move(1, "first", 0) == []
    assert m.on_opened(1, 1) == [GroupOpened(1), LaunchPiece(1, "first")]
    assert m.move(1, "a", 1) == [] == m.on_launched(1, 1), "the first one goes alone"
    assert m.on_piece_done(1, 1) == [PieceMoved(1, "first"), LaunchPiece(1, "a")]
    assert m.move(1, "b", 1) == [] == m.move(1, "c", 1)
    assert m.on_launched(1, 1) == [LaunchPiece(1, "b")]
    assert m.on_launched(1, 1) == [], "two are under way"
    assert m.on_piece_done(1, 2) == [PieceMoved(1, "a"), LaunchPiece(1, "c")]
    assert list(m.running()) == [(1, "b")]
    assert list(m.launching()) == [1]


def test_slots_go_round_and_each_direction_has_its_own() -> None:
    m = machine(most=4, flight=2, depth=2)
    connected(m, 1, 2)
    connected(m, 3, way=Way.RECEIVE)
    assert m.move(1, "a", 0) == [LaunchPiece(1, "a")]
    m.on_launched(1, 0)
    m.move(1, "b", 0)
    assert m.move(2, "x", 0) == [], "two sends are under way"
    assert m.move(3, "r", 0) == [LaunchPiece(3, "r")]
    m.on_launched(1, 0)
    m.move(1, "c", 0)
    assert m.on_piece_done(1, 0) == [PieceMoved(1, "a"), LaunchPiece(2, "x")], "who has waited goes first"


def test_the_longest_idle_group_makes_room_and_the_new_one_waits_for_its_end() -> None:
    m = machine(most=2)
    opened(m, 1, now=0)
    opened(m, 2, now=1)
    assert m.open(3, Way.SEND, 2) == [GroupLost(1, "another group needs its place"), EndGroup(1)]
    assert m.count == 2
    assert m.on_ended(1, 3) == [GroupOver(1, ()), MakeGroup(3)]


def test_a_group_that_waits_for_its_turn_is_not_idle() -> None:
    m = machine(most=1)
    opened(m, 1)
    assert m.move(1, "a", 0) == [LaunchPiece(1, "a")]
    assert m.open(2, Way.SEND, 1) == [GroupLost(2, "1 groups are in use"), GroupOver(2, ())]
    m.on_launched(1, 1)
    m.on_piece_done(1, 1)
    assert m.open(3, Way.SEND, 2) == [GroupLost(1, "another group needs its place"), EndGroup(1)]


def test_decode_which_says_what_is_fetched_ends_an_idle_group_and_prefill_is_the_more_patient_one() -> None:
    m = machine()
    opened(m, 1, way=Way.RECEIVE)
    opened(m, 2, way=Way.SEND)
    assert m.tick(60) == []
    assert m.tick(61) == [GroupLost(1, "idle"), EndGroup(1)]
    assert m.tick(120) == []
    assert m.tick(121) == [GroupLost(2, "idle"), EndGroup(2)]


@pytest.mark.parametrize("state", ["opening", "launching", "running"])
def test_deadlines(state: str) -> None:
    m = machine()
    m.open(1, Way.SEND, 0)
    if state != "opening":
        m.on_opened(1, 1)
        m.move(1, "a", 2)
    if state == "running":
        m.on_launched(1, 3)
    late = 10.1 if state == "opening" else 7.1
    assert m.tick(late - 0.2) == []
    lost, end = m.tick(late)
    assert isinstance(lost, GroupLost)
    assert end == EndGroup(1)
    assert m.tick(100) == []
    assert m.on_ended(1, 100) == [GroupOver(1, () if state == "opening" else ("a",))]


def test_what_waits_behind_a_slow_piece_is_not_blamed_for_it() -> None:
    m = machine()
    opened(m, 1)
    m.move(1, "a", 0)
    m.on_launched(1, 0)
    m.move(1, "b", 0)
    m.on_launched(1, 0)
    m.on_piece_done(1, 4.9)
    assert m.tick(9) == []


def test_pieces_come_back_only_when_the_end_is_complete() -> None:
    m = machine()
    opened(m, 1)
    for piece in "abc":
        m.move(1, piece, 0)
    m.on_launched(1, 0)
    assert m.on_broken(1, "remote error") == [GroupLost(1, "remote error"), EndGroup(1)]
    assert m.on_broken(1, "again") == []
    assert m.on_piece_done(1, 1) == [] == m.move(1, "d", 1)
    assert m.count == 1
    assert m.on_ended(1, 2) == [GroupOver(1, ("a", "b", "c", "d"))]
    assert m.move(1, "e", 3) == [GroupOver(1, ("e",))]


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="depth 0 must be at least 1"):
        machine(depth=0)
    m = machine()
    m.open(1, Way.SEND, 0)
    with pytest.raises(ValueError, match="group 1 is there"):
        m.open(1, Way.SEND, 0)


def test_memory_of_a_group() -> None:
    assert pytest.approx(9.19 * (1 << 20), rel=0.001) == groups.BUFFER_BYTES
    assert groups.group_bytes(4) == 4 * groups.BUFFER_BYTES + groups.FIXED_BYTES
    assert groups.group_bytes(8) > 52e6, "the document of P2P-NCCL measured 52 MB with 8 channels"
    assert groups.group_bytes(16) > 100e6, "and 100 MB with 16"


# --- nothing takes memory of the GPU while a receive runs ---


def receiving(m: Groups[str], number: int = 9) -> None:
    connected(m, number, way=Way.RECEIVE)
    assert m.move(number, "r", 0) == [LaunchPiece(number, "r")]
    assert m.on_launched(number, 0) == []


def test_a_group_is_begun_when_no_receive_runs_and_none_begins_before() -> None:
    m = machine(most=4)
    receiving(m)
    assert m.open(1, Way.SEND, 0) == []
    assert m.move(9, "s", 0) == [], "it would never end"
    assert m.on_piece_done(9, 0) == [PieceMoved(9, "r"), MakeGroup(1)]
    assert m.on_opened(1, 0) == [GroupOpened(1), LaunchPiece(9, "s")]


def test_sends_go_on_while_groups_are_made() -> None:
    m = machine(most=4)
    connected(m, 1)
    assert m.open(2, Way.RECEIVE, 0) == [MakeGroup(2)]
    assert m.move(1, "a", 0) == [LaunchPiece(1, "a")]


def test_a_first_send_waits_for_receives_and_new_receives_for_it() -> None:
    m = machine(most=4)
    opened(m, 1)
    receiving(m)
    assert m.move(1, "a", 0) == [] == m.move(9, "s", 0)
    assert m.on_piece_done(9, 0) == [PieceMoved(9, "r"), LaunchPiece(1, "a")]
    assert m.on_launched(1, 0) == []
    assert m.on_piece_done(1, 0) == [PieceMoved(1, "a"), LaunchPiece(9, "s")]


def test_a_first_receive_goes_alone_but_beside_first_sends() -> None:
    m = machine(most=4)
    opened(m, 1)
    opened(m, 2, 3, way=Way.RECEIVE)
    assert m.move(2, "r", 0) == [LaunchPiece(2, "r")]
    assert m.move(3, "s", 0) == []
    assert m.open(4, Way.SEND, 0) == []
    assert m.move(1, "a", 0) == [LaunchPiece(1, "a")], "else two that cross would wait for each other"
    m.on_launched(2, 0)
    m.on_launched(1, 0)
    assert m.on_piece_done(2, 0) == [PieceMoved(2, "r"), MakeGroup(4)]
    assert m.on_piece_done(1, 0) == [PieceMoved(1, "a")]
    assert m.on_opened(4, 0) == [GroupOpened(4), LaunchPiece(3, "s")]


def test_a_group_that_is_not_open_soon_is_given_up_where_others_wait_to_receive() -> None:
    m = Groups[str](most=4, flight=4, depth=2, open_s=10, move_s=5, idle_s=60, hold_s=3)
    connected(m, 9, way=Way.RECEIVE)
    assert m.open(1, Way.RECEIVE, 0) == [MakeGroup(1)]
    assert m.tick(4) == [], "nobody waits"
    assert m.move(9, "r", 4) == []
    assert m.tick(4) == [GroupLost(1, "the group was not open within 3 s, and others wait to receive"), EndGroup(1),
                         LaunchPiece(9, "r")]


# --- any order of events: the laws hold ---


@dataclass
class Judge:
    """Follows one machine's instructions."""

    m: Groups[int]
    most: int
    flight: int
    way: dict[int, Way] = field(default_factory=dict)
    given: dict[int, list[int]] = field(default_factory=dict)
    launched: dict[int, list[int]] = field(default_factory=dict)
    flying: dict[int, list[int]] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    began: list[int] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    back: list[int] = field(default_factory=list)

    def take(self, steps: list[Any]) -> None:
        for step in steps:
            match step:
                case MakeGroup(number):
                    assert number not in self.began
                    self.began.append(number)
                    self.alive.add(number)
                    assert len(self.alive) <= self.most
                case LaunchPiece(number, piece):
                    assert number in self.alive
                    assert number not in self.ends
                    self.launched.setdefault(number, []).append(piece)
                    assert self.launched[number] == self.given[number][:len(self.launched[number])]
                    self.flying.setdefault(number, []).append(piece)
                    for way in Way:
                        assert sum(len(f) for n, f in self.flying.items() if self.way[n] is way) <= self.flight
                    assert len(self.flying[number]) <= 2
                case PieceMoved(number, piece):
                    assert self.flying[number].pop(0) == piece
                    self.back.append(piece)
                case EndGroup(number):
                    assert number not in self.ends
                    self.ends.append(number)
                case GroupOver(number, pieces):
                    self.over.add(number)
                    self.alive.discard(number)
                    self.flying.pop(number, None)
                    self.back += pieces


NAMES = ["open", "on_opened", "move", "on_launched", "on_piece_done", "on_broken", "close", "on_ended", "tick"]
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5), st.booleans()), max_size=120)


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(1, 3))
def test_any_order_of_events_keeps_the_laws(events: list[tuple[str, int, bool]], most: int, flight: int) -> None:
    m = Groups[int](most=most, flight=flight, depth=2, open_s=10, move_s=5, idle_s=20)
    judge = Judge(m, most, flight)
    asked: list[int] = []
    pieces = 0
    now = 0.0
    for name, which, flag in events:
        now += 1.0
        number = asked[which % len(asked)] if asked else 0
        if name == "open":
            number = len(asked) + 1
            asked.append(number)
            judge.way[number] = Way.SEND if flag else Way.RECEIVE
            judge.take(m.open(number, judge.way[number], now))
        elif name == "move" and asked:
            pieces += 1
            judge.given.setdefault(number, []).append(pieces)
            judge.take(m.move(number, pieces, now))
        elif name in {"on_opened", "on_launched", "on_piece_done", "on_ended"} and number in judge.alive:
            if name == "on_ended" and number not in judge.ends:
                continue
            judge.take(getattr(m, name)(number, now))
        elif name in {"on_broken", "close"}:
            judge.take(getattr(m, name)(number, "x"))
        elif name == "tick":
            judge.take(m.tick(now))
    for number in asked:
        judge.take(m.close(number, "end"))
    while ending := [number for number in judge.ends if number in judge.alive]:
        for number in ending:
            judge.take(m.on_ended(number, now))
        for number in asked:
            judge.take(m.close(number, "end"))
    assert judge.over == set(asked), "each group is over once"
    assert sorted(judge.back) == list(range(1, pieces + 1)), "each piece comes back once"
    assert m.count == 0


# --- many processes: nobody waits for ever ---


@dataclass
class Gpu:
    """A process with its GPU: kernels start in the order of their launch, as far as there is room for them."""

    m: Groups[int]
    room: int
    resident: list[tuple[int, int]] = field(default_factory=list)
    queued: deque[tuple[int, int]] = field(default_factory=deque)

    def start(self) -> None:
        while self.queued and len(self.resident) < self.room:
            self.resident.append(self.queued.popleft())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 12), st.integers(1, 3), st.data())
def test_engines_that_all_send_to_each_other_never_wait_in_a_circle(count: int, each: int, flight: int,
                                                                   data: st.DataObject) -> None:
    """Prefill launches what decode has launched: room on a GPU for the slots of both directions is enough."""
    gpus = [Gpu(Groups(most=99, flight=flight, depth=2, open_s=1, move_s=1, idle_s=1), 2 * flight) for _ in range(count)]
    pairs = [(p, d) for p in range(count) for d in range(count) if p != d]
    posted: deque[tuple[int, int]] = deque()
    left = dict.fromkeys(range(len(pairs)), each)

    def carry_out(who: int, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, LaunchPiece):
                gpus[who].queued.append((step.number, step.piece))
                if pairs[step.number][1] == who:
                    posted.append((step.number, step.piece))
                carry_out(who, gpus[who].m.on_launched(step.number, 0))

    for number, (p, d) in enumerate(pairs):
        for who, way in ((p, Way.SEND), (d, Way.RECEIVE)):
            gpus[who].m.open(number, way, 0)
            gpus[who].m.on_opened(number, 0)
    order = data.draw(st.permutations([n for n in range(len(pairs)) for _ in range(each)]))
    for piece, number in enumerate(order):
        carry_out(pairs[number][1], gpus[pairs[number][1]].m.move(number, piece, 0))
    while any(left.values()):
        moved = False
        while posted:
            number, piece = posted.popleft()
            carry_out(pairs[number][0], gpus[pairs[number][0]].m.move(number, piece, 0))
        for gpu in gpus:
            gpu.start()
        for number, (p, d) in enumerate(pairs):
            first = [next((one for one in gpus[who].resident if one[0] == number), None) for who in (p, d)]
            if first[0] is not None and first[0] == first[1]:
                for who in (p, d):
                    gpus[who].resident.remove(first[0])
                    carry_out(who, gpus[who].m.on_piece_done(number, 0))
                left[number] -= 1
                moved = True
        assert moved or posted, f"stuck with {left}"


@dataclass
class Rank:
    """A process: taking memory of its GPU waits for its receives, and its launches wait for that."""

    m: Groups[int]
    opening: set[int] = field(default_factory=set)
    called: dict[int, deque[int]] = field(default_factory=dict)
    """By group: pieces whose call was made and which are not done."""
    used: set[int] = field(default_factory=set)
    receives: set[int] = field(default_factory=set)
    """Groups in which it receives."""

    @property
    def waits(self) -> bool:
        """Whether what takes memory here waits: a receive runs."""
        return any(pieces and number in self.used for number, pieces in self.called.items() if number in self.receives)

    @property
    def takes(self) -> bool:
        """Whether something takes memory here."""
        return bool(self.opening) or any(pieces and number not in self.used for number, pieces in self.called.items())


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_engines_that_make_groups_while_they_receive_never_wait_in_a_circle(count: int, each: int, flight: int,
                                                                            data: st.DataObject) -> None:
    """As NCCL does it: a group opens, and its first piece moves, when both have called and neither takes memory in vain;
    a send is launched when nothing that its process does waits for memory."""
    ranks = [Rank(Groups(most=99, flight=flight, depth=2, open_s=1, move_s=1, idle_s=1)) for _ in range(count)]
    pairs = [(p, d) for p in range(count) for d in range(count) if p != d] * 2
    for number, (_, d) in enumerate(pairs):
        ranks[d].receives.add(number)
    wanted = dict.fromkeys(range(len(pairs)), each)
    left = dict(wanted)
    to_open = data.draw(st.permutations([(number, who) for number in range(len(pairs)) for who in (0, 1)]))
    posted: list[tuple[int, int]] = []

    def carry_out(who: int, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, MakeGroup):
                ranks[who].opening.add(step.number)
            elif isinstance(step, LaunchPiece):
                ranks[who].called.setdefault(step.number, deque()).append(step.piece)
                if step.number in ranks[who].receives:
                    posted.append((step.number, step.piece))
                carry_out(who, ranks[who].m.on_launched(step.number, 0))
            elif isinstance(step, GroupOpened) and step.number in ranks[who].receives:
                for piece in range(wanted[step.number]):
                    carry_out(who, ranks[who].m.move(step.number, piece, 0))

    def actions() -> list[tuple[str, int]]:
        out = [("open", 0)] if to_open else []
        out += [("posted", 0)] if posted else []
        for number, (p, d) in enumerate(pairs):
            prefill, decode = ranks[p], ranks[d]
            quiet = not prefill.waits and not decode.waits
            if number in prefill.opening & decode.opening and quiet:
                out.append(("opened", number))
            if prefill.called.get(number) and decode.called.get(number):
                first = number not in prefill.used
                if quiet if first else not (prefill.takes and prefill.waits):
                    out.append(("moved", number))
        return out

    while any(left.values()):
        found = actions()
        assert found, f"all wait for each other: {left}"
        name, number = data.draw(st.sampled_from(found))
        if name == "open":
            number, side = to_open.pop()
            carry_out(pairs[number][side], ranks[pairs[number][side]].m.open(number, Way.RECEIVE if side else Way.SEND, 0))
        elif name == "posted":
            number, piece = posted.pop(0)
            carry_out(pairs[number][0], ranks[pairs[number][0]].m.move(number, piece, 0))
        elif name == "opened":
            for who in pairs[number]:
                ranks[who].opening.discard(number)
            for who in pairs[number]:
                carry_out(who, ranks[who].m.on_opened(number, 0))
        else:
            left[number] -= 1
            for who in pairs[number]:
                ranks[who].called[number].popleft()
                ranks[who].used.add(number)
            for who in pairs[number]:
                carry_out(who, ranks[who].m.on_piece_done(number, 0))
