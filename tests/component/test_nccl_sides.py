"""Both sides of the link over NCCL without threads: what they say, what they answer when, and what they refuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.packing import PackedArray, Stretch
from xpyd_sidecar.kv.selection import Piece
from xpyd_sidecar.kv.session_bodies import Able, FetchBytes, FetchSent, Gpu, Group, LinkWelcome
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.transport.links import FetchLink, FetchOrder
from xpyd_sidecar.transport.nccl.driver import Message
from xpyd_sidecar.transport.nccl.fetch import NcclFetching, NcclFetchLink
from xpyd_sidecar.transport.nccl.serve import NcclServeLink, NcclServer

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
GPU = Gpu("GPU-1", "2.29.7", 4096)


@dataclass
class Hub:
    """In the place of the communicator thread: what it was told."""

    joined: list[tuple[Way, bytes | None]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    given: list[tuple[int, Message]] = field(default_factory=list)
    driver: Any = field(default_factory=lambda: SimpleNamespace(piece=4096))

    def join(self, member: object, way: Way, uid: bytes | None = None) -> int:
        self.joined.append((way, uid))
        return len(self.joined)

    def leave(self, number: int, reason: str) -> None:
        assert reason
        self.left.append(number)

    def move(self, number: int, message: Message, member: object) -> None:
        self.given.append((number, message))


class Session:
    """Of one side; calls are made when ``run`` is."""

    peer = "the peer"

    def __init__(self) -> None:
        self.said: list[tuple[FrameKind, Any]] = []
        self.calls: deque[Callable[[], None]] = deque()
        self.errors: list[PeerError] = []
        self.link: Any = None

    def send(self, kind: FrameKind, body: msgspec.Struct | None = None, key: Key = NO_TRY) -> bytes:
        if not self.errors:
            self.said.append((kind, body))
        return b""

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def close(self, error: PeerError) -> None:
        if not self.errors:
            self.errors.append(error)
            self.link.close()

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()

    def hears(self, kind: FrameKind, body: msgspec.Struct | None = None) -> bool:
        """The link hears a frame as the connection would give it."""
        if self.errors:
            return False
        try:
            heard = self.link.on_frame(Frame(kind, KEY, msgspec.msgpack.encode(body) if body is not None else b""))
        except PeerError as error:
            self.close(error)
            raise
        assert isinstance(heard, bool)
        return heard


# --- prefill's ---


class Copy:
    """Of manifest 7, at 1024 in the store."""

    offset = 1024

    def __init__(self) -> None:
        self.view = memoryview(bytearray(range(256)) * 8)
        self.held = 0

    def hold(self) -> None:
        self.held += 1

    def let_go(self) -> None:
        self.held -= 1


class Serving:
    """Prefill's side of a session."""

    def __init__(self) -> None:
        self.hub, self.session, self.copy = Hub(), Session(), Copy()
        self.stripes: list[int] = []
        tcp = SimpleNamespace(attach=lambda sock, number, answer, keys: self.stripes.append(number), close=lambda: None,
                              stripes=4)
        server: Any = SimpleNamespace(copy=lambda key, number: self.copy if number == 7 else None, link=lambda session: tcp)
        made = NcclServer(self.hub, GPU, lambda: server, one_gpu=False)  # type: ignore[arg-type]
        served = made.serve(self.session, Able(gpu=GPU_2))
        assert not isinstance(served, str)
        self.link, welcome = served
        assert isinstance(self.link, NcclServeLink)
        assert welcome == LinkWelcome(gpu=GPU)
        self.session.link = self.link

    def grouped(self) -> int:
        """A group is there, of this number."""
        self.session.hears(FrameKind.GROUP, Group(0))
        number = len(self.hub.joined)
        self.link.on_group_begun(number, b"uid")  # type: ignore[attr-defined]
        assert self.session.said[-1] == (FrameKind.GROUP, Group(number, b"uid"))
        return number

    def fetch(self, group: int, *pieces: tuple[bodies.Comb, ...], manifest: int = 7) -> None:
        self.session.hears(FrameKind.FETCH, FetchBytes(3, manifest, pieces or ((bodies.Comb(1024, 100),),), group))


GPU_2 = Gpu("GPU-2", "2.29.7", 4096)


def test_prefill_sends_what_a_fetch_in_its_group_asks_for_and_holds_the_copy_until_it_is_out() -> None:
    one = Serving()
    group = one.grouped()
    one.fetch(group, (bodies.Comb(1024, 100), bodies.Comb(1200, 10, 20, 3)), (bodies.Comb(2000, 300),))
    assert one.session.said[-1] == (FrameKind.SENT, FetchSent(3, there=True))
    ((number, message),) = one.hub.given
    assert (number, message.size) == (group, 256 + 512)
    assert [(at, bytes(view)) for at, view in message.spans] == [
        (at, bytes(one.copy.view[offset - 1024:][:size])) for at, offset, size in [
            (0, 1024, 100), (100, 1200, 10), (110, 1220, 10), (120, 1240, 10), (256, 2000, 300)]]
    assert one.copy.held == 1
    assert one.link.busy
    one.link.on_moved(message)  # type: ignore[attr-defined]
    assert one.copy.held == 0
    assert not one.link.busy


def test_copies_are_held_until_the_group_is_over_whatever_has_become_of_the_session() -> None:
    one = Serving()
    group = one.grouped()
    one.fetch(group)
    one.link.close()
    assert one.hub.left == [group]
    assert one.copy.held == 1
    one.link.on_group_lost(group, "the session has ended")  # type: ignore[attr-defined]
    assert one.copy.held == 1
    one.link.on_released((one.hub.given[0][1],))  # type: ignore[attr-defined]
    assert one.copy.held == 0


def test_a_manifest_that_is_not_there_any_more_is_answered_with_as_many_zeros() -> None:
    one = Serving()
    one.fetch(one.grouped(), (bodies.Comb(1024, 300),), manifest=8)
    assert one.session.said[-1] == (FrameKind.SENT, FetchSent(3, there=False))
    ((_, message),) = one.hub.given
    assert (message.size, list(message.spans)) == (512, [])
    one.link.on_moved(message)  # type: ignore[attr-defined]
    assert not one.link.busy


@pytest.mark.parametrize(("pieces", "manifest", "text"), [
    (((bodies.Comb(1000, 100),),), 7, "asked for 100 bytes at 1000, which it was not told of"),
    (((bodies.Comb(1024, 4000),),), 7, "asked for 4000 bytes at 1024"),
    (((bodies.Comb(1024, 10, -1, 2),),), 7, "asked for 10 bytes"),
    (((bodies.Comb(1024, 4097),),), 7, "fetches 4352 bytes at once in a group"),
    (((bodies.Comb(1024, 1, 0, 1 << 40),),), 8, "bytes at once in a group"),
    (((bodies.Comb(1024, -5),),), 8, "fetches 0 bytes at once in a group"),
    (((bodies.Comb(1024, 1, 1, 3000),),) * 22, 7, "bytes at once in a group")])
def test_what_no_honest_decode_fetches_ends_the_session(pieces: Any, manifest: int, text: str) -> None:
    one = Serving()
    group = one.grouped()
    with pytest.raises(ProtocolError, match=text):
        one.fetch(group, *pieces, manifest=manifest)
    assert one.copy.held == 0
    assert one.hub.given == []


def test_a_group_that_was_never_told_of_and_a_second_one_are_refused() -> None:
    one = Serving()
    with pytest.raises(ProtocolError, match="fetches in group 1, of which it was not told"):
        one.fetch(1)
    other = Serving()
    other.grouped()
    with pytest.raises(ProtocolError, match="asks for a group beside group 1"):
        other.session.hears(FrameKind.GROUP, Group(0))


def test_in_a_group_that_has_ended_here_nothing_is_sent_and_decode_is_told() -> None:
    one = Serving()
    group = one.grouped()
    one.link.on_group_lost(group, "another group needs its place")  # type: ignore[attr-defined]
    assert one.session.said[-1] == (FrameKind.UNGROUP, Group(group, reason="another group needs its place"))
    one.fetch(group)
    assert one.hub.given == []
    assert one.grouped() == group + 1


def test_a_group_that_cannot_be_made_is_told_with_its_number() -> None:
    one = Serving()
    one.session.hears(FrameKind.GROUP, Group(0))
    one.link.on_group_lost(1, "16 groups are in use")  # type: ignore[attr-defined]
    assert one.session.said == [(FrameKind.UNGROUP, Group(1, reason="16 groups are in use"))]


def test_decode_leaves_a_group_and_asks_for_another_one() -> None:
    one = Serving()
    group = one.grouped()
    one.session.hears(FrameKind.UNGROUP, Group(group, reason="idle"))
    assert one.hub.left == [group]
    assert one.grouped() == group + 1
    one.link.on_group_lost(group, "decode: idle")  # type: ignore[attr-defined]
    one.fetch(group + 1)
    assert [number for number, _ in one.hub.given] == [group + 1], "what is told of the first says nothing of the second"


def test_without_a_group_bytes_are_asked_for_on_stripes_and_never_by_fetch() -> None:
    one = Serving()
    assert one.link.stripes == 4
    one.link.attach(None, 2, b"answer", b"")  # type: ignore[arg-type]
    assert one.stripes == [2]
    assert not one.session.hears(FrameKind.TAKEN)
    with pytest.raises(ProtocolError, match="fetches in group 0"):
        one.fetch(0)


def test_where_there_is_no_tcp_at_prefill_there_are_no_groups_either() -> None:
    server: Any = SimpleNamespace(copy=None, link=lambda session: "tcp: too many data connections at prefill")
    made = NcclServer(Hub(), GPU, lambda: server, one_gpu=False)  # type: ignore[arg-type]
    assert made.serve(Session(), Able(gpu=GPU_2)) == "tcp: too many data connections at prefill"


# --- decode's ---


class Tcp(FetchLink):
    """In the place of a data connection: what it is to fetch; ``answer`` answers it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.orders: list[FetchOrder] = []
        self.closed = False

    def fetch(self, order: FetchOrder) -> None:
        self.orders.append(order)

    def answer(self) -> None:
        orders, self.orders = self.orders, []
        for order in orders:
            self.owner.on_fetched(order.number, None)

    def close(self) -> None:
        self.closed = True
        orders, self.orders = self.orders, []
        for order in orders:
            self.owner.on_fetch_failed(order.number)


class Fetching:
    """Decode's side of a session, and whose fetches they are."""

    def __init__(self, *, tcp: bool = True, later: bool = False) -> None:
        """``later``: a data connection is made when ``tcp_comes`` is called."""
        self.hub, self.session = Hub(), Session()
        self.tcp = Tcp(self)
        self.tcp_comes: Callable[[], None] = lambda: None
        self.fetches: list[int] = []
        self.failures: list[int] = []
        self.looked_for: dict[int, str] = {}
        """By fetch: in which memory of its range its bytes are looked for."""

        def make(session: object, owner: object, welcome: object, settled: Callable[[FetchLink, str], None]) -> bool:
            if not tcp:
                raise PeerGone("the peer", "data connection: refused")
            self.tcp_comes = partial(settled, self.tcp, "")
            if not later:
                self.tcp_comes()
            return False

        self.maker = NcclFetching(self.hub, GPU_2, self, make)  # type: ignore[arg-type]
        links: list[Any] = []
        assert not self.maker(self.session, self, LinkWelcome(gpu=GPU), lambda link, reason: links.append(link))
        (self.link,) = links
        assert isinstance(self.link, NcclFetchLink)
        self.session.link = self.link

    def on_fetched(self, number: int, sums: object) -> None:
        self.fetches.append(number)

    def on_fetch_failed(self, number: int) -> None:
        self.failures.append(number)

    def device(self, at: int, size: int) -> str:
        assert size % 256 == 0
        self.looked_for[at // 1000] = "device"
        return f"range {at // 1000}"

    def host_places(self, batch: object, at: int) -> list[Any]:
        self.looked_for[at // 1000] = "host"
        return ["rows"]

    def fetch(self, *numbers: int, ring: bool = True, size: int = 300) -> None:
        for number in numbers:
            piece = Piece(0, (Stretch(1024, size),), PackedArray(0, 1, 1, size, 1), (0, 1, 1))
            self.link.fetch(FetchOrder(number, KEY, 7, (piece,), [], None, 1000 * number if ring else None))

    def grouped(self, theirs: int = 5) -> int:
        """The group that was asked for is open."""
        assert self.session.said[-1] == (FrameKind.GROUP, Group(0))
        self.session.hears(FrameKind.GROUP, Group(theirs, b"uid"))
        number = len(self.hub.joined)
        assert self.hub.joined[-1] == (Way.RECEIVE, b"uid")
        self.link.on_group_open(number)
        return number

    def message(self, number: int) -> Message:
        return next(message for _, message in self.hub.given if message.tag.order.number == number)

    @property
    def answers(self) -> tuple[list[int], list[int]]:
        return self.fetches, self.failures


def test_fetches_wait_for_the_group_and_are_said_when_they_are_being_received() -> None:
    one = Fetching()
    one.fetch(1, 2)
    assert one.session.said == [(FrameKind.GROUP, Group(0))], "it is asked for once"
    group = one.grouped(theirs=5)
    assert [(number, message.memory, message.size) for number, message in one.hub.given] == [
        (group, "range 1", 512), (group, "range 2", 512)]
    assert len(one.session.said) == 1
    for number in (1, 2):
        one.link.on_posted(one.message(number))
    combs = ((bodies.Comb(1024, 300),),)
    assert one.session.said[1:] == [(FrameKind.FETCH, FetchBytes(number, 7, combs, 5)) for number in (1, 2)]
    assert one.answers == ([], [])


@pytest.mark.parametrize("first", ["said", "come"])
@pytest.mark.parametrize("there", [True, False])
def test_a_fetch_is_answered_when_it_has_come_and_prefill_has_said_what_it_is(first: str, there: bool) -> None:
    one = Fetching()
    one.fetch(1)
    one.grouped()
    one.link.on_posted(one.message(1))
    if first == "said":
        one.session.hears(FrameKind.SENT, FetchSent(1, there))
    else:
        one.link.on_moved(one.message(1))
    assert one.answers == ([], [])
    if first == "said":
        one.link.on_moved(one.message(1))
    else:
        one.session.hears(FrameKind.SENT, FetchSent(1, there))
    assert one.answers == (([1], []) if there else ([], [1]))
    assert one.looked_for == {1: "device"}


def test_what_prefill_says_out_of_turn_ends_the_session() -> None:
    one = Fetching()
    with pytest.raises(ProtocolError, match="made group 5 after 0, unasked or again"):
        one.session.hears(FrameKind.GROUP, Group(5, b"uid"))
    for number in (1, 3):
        two = Fetching()
        two.fetch(1, 2)
        two.grouped()
        two.link.on_posted(two.message(1))
        two.link.on_posted(two.message(2))
        if number == 1:
            two.session.hears(FrameKind.SENT, FetchSent(1, there=True))
        with pytest.raises(ProtocolError, match=f"sends fetch {number} in a group, which is not the next"):
            two.session.hears(FrameKind.SENT, FetchSent(number, there=True))
    three = Fetching()
    three.fetch(1)
    three.grouped(theirs=5)
    three.session.hears(FrameKind.UNGROUP, Group(5, reason="idle"))
    three.fetch(2)
    with pytest.raises(ProtocolError, match="made group 5 after 5"):
        three.session.hears(FrameKind.GROUP, Group(5, b"uid"))


@pytest.mark.parametrize("by", ["prefill", "nccl"])
def test_a_group_that_ends_with_fetches_under_way_ends_the_session_and_they_are_answered_when_it_is_over(by: str) -> None:
    one = Fetching()
    one.fetch(1, 2, 3)
    group = one.grouped()
    for number in (1, 2):
        one.link.on_posted(one.message(number))
    one.session.hears(FrameKind.SENT, FetchSent(1, there=True))
    one.link.on_moved(one.message(1))
    if by == "prefill":
        one.session.hears(FrameKind.UNGROUP, Group(5, reason="remote error"))
        assert one.hub.left == [group]
    else:
        one.link.on_group_lost(group, "remote error")
        assert one.session.said[-1] == (FrameKind.UNGROUP, Group(5, reason="remote error"))
    assert [str(error) for error in one.session.errors] == ["the peer: nccl: remote error"]
    assert one.answers == ([1], []), "NCCL may still write into the others"
    one.link.on_released((one.message(2), one.message(3)))
    assert one.answers == ([1], [2, 3])
    again = Fetching()
    again.maker._shunned = one.maker._shunned
    again.fetch(1)
    assert [order.number for order in again.tcp.orders] == [1], "no group with that GPU for a while"


def test_a_group_that_ends_when_all_has_come_costs_nothing() -> None:
    one = Fetching()
    one.fetch(1)
    group = one.grouped()
    one.link.on_posted(one.message(1))
    one.link.on_moved(one.message(1))
    one.link.on_group_lost(group, "idle")
    assert one.session.errors == []
    one.session.hears(FrameKind.SENT, FetchSent(1, there=True))
    assert one.answers == ([1], [])


def test_a_group_that_ends_before_prefill_has_heard_of_a_fetch_costs_nothing() -> None:
    one = Fetching()
    one.fetch(1, 2)
    group = one.grouped()
    one.link.on_group_lost(group, "another group needs its place")
    one.link.on_posted(one.message(1))
    assert one.session.said[-1][0] is FrameKind.UNGROUP, "of a group that is gone nothing is said"
    one.link.on_released((one.message(1), one.message(2)))
    assert one.session.errors == []
    one.grouped(theirs=6)
    for message in [message for _, message in one.hub.given[2:]]:
        one.link.on_posted(message)
        one.session.hears(FrameKind.SENT, FetchSent(message.tag.order.number, there=True))
        one.link.on_moved(message)
    assert one.answers == ([1, 2], [])


@pytest.mark.parametrize("refused", [True, False])
def test_without_a_group_fetches_go_over_tcp(refused: bool) -> None:
    one = Fetching()
    one.fetch(1, 2)
    if refused:
        one.session.hears(FrameKind.UNGROUP, Group(5, reason="16 groups are in use"))
    else:
        one.session.hears(FrameKind.GROUP, Group(5, b"uid"))
        one.link.on_group_lost(1, "the group was not open within 10 s")
    one.fetch(3)
    one.tcp.answer()
    assert one.answers == ([1, 2, 3], [])
    assert set(one.looked_for.values()) == {"host"}
    assert one.link.name == "tcp"


@pytest.mark.parametrize("order", [{"ring": False}, {"size": 4097}])
def test_what_has_no_place_on_the_device_or_in_a_slot_goes_over_tcp(order: dict[str, Any]) -> None:
    one = Fetching()
    one.fetch(1, **order)
    one.tcp.answer()
    assert one.answers == ([1], [])
    assert one.session.said == []


def test_fetches_wait_for_a_data_connection_that_is_made_later_once() -> None:
    one = Fetching(later=True)
    one.fetch(1, 2, ring=False)
    comes = one.tcp_comes
    one.fetch(3, ring=False)
    assert one.tcp.orders == []
    assert one.tcp_comes is comes, "it is asked for once"
    one.tcp_comes()
    one.fetch(4, ring=False)
    assert [order.number for order in one.tcp.orders] == [1, 2, 3, 4]


def test_what_waits_for_a_data_connection_is_answered_when_the_session_ends() -> None:
    one = Fetching(later=True)
    one.fetch(1, 2, ring=False)
    one.session.close(PeerGone("the peer", "closed the connection"))
    assert one.answers == ([], [1, 2])
    one.tcp_comes()
    assert one.tcp.closed
    assert one.answers == ([], [1, 2])


def test_where_there_is_no_tcp_either_the_session_ends() -> None:
    one = Fetching(tcp=False)
    one.fetch(1, ring=False)
    assert one.answers == ([], []), "nothing is answered before it returns"
    one.session.run()
    assert one.answers == ([], [1])
    assert "data connection: refused" in str(one.session.errors[0])
    one.fetch(2)
    one.session.run()
    assert one.answers == ([], [1, 2])


def test_the_end_of_the_session_answers_each_fetch_once() -> None:
    one = Fetching()
    one.fetch(1, 2, 3, 4)
    group = one.grouped()
    for number in (1, 2, 3):
        one.link.on_posted(one.message(number))
    one.link.on_moved(one.message(1))  # prefill has not said what it is
    one.session.close(PeerGone("the peer", "closed the connection"))
    assert one.hub.left == [group]
    assert one.answers == ([], [1])
    one.link.on_moved(one.message(2))
    one.link.on_posted(one.message(4))
    one.link.on_group_lost(group, "the session has ended")
    one.link.on_released((one.message(3), one.message(4)))
    assert one.answers == ([], [1, 2, 3, 4])


# --- any order of events ---


class Life:
    """A link, its peer and a communicator thread whose events come in any order that they may come in."""

    def __init__(self) -> None:
        self.one = Fetching()
        self.orders = 0
        self.group = self.theirs = 0
        """Those of the last group, here and there."""
        self.state = "none"
        """Of that group here: none, joined, open, lost, over."""
        self.given: list[Message] = []
        """In the hub: launched ones first."""
        self.launched = 0
        self.sends: deque[int] = deque()
        """Fetches that prefill has heard of and has not answered with SENT."""
        self.here: set[int] = set()
        self.there: dict[int, bool] = {}

    def do(self, what: str, flag: bool) -> None:
        one = self.one
        self.given += [message for _, message in one.hub.given]
        one.hub.given.clear()
        if self.state in {"joined", "open"} and one.hub.left[-1:] == [self.group]:
            self.lose()
        getattr(self, what)(flag)
        one.session.run()
        self.judge()

    def lose(self) -> None:
        self.state = "lost"
        self.one.link.on_group_lost(self.group, "lost")

    def fetch(self, flag: bool) -> None:
        self.orders += 1
        self.one.fetch(self.orders, ring=flag or self.orders % 3 > 0)

    def answer_ask(self, flag: bool) -> None:
        if self.one.link._asks and self.state in {"none", "over"}:
            self.theirs += 1
            if flag:
                self.one.session.hears(FrameKind.GROUP, Group(self.theirs, b"uid"))
                self.group, self.state = len(self.one.hub.joined), "joined"
            else:
                self.one.session.hears(FrameKind.UNGROUP, Group(self.theirs, reason="refused"))

    def open(self, flag: bool) -> None:
        if self.state == "joined":
            self.state = "open"
            self.one.link.on_group_open(self.group)

    def launch(self, flag: bool) -> None:
        if self.state == "open" and len(self.given) > self.launched:
            before = len(self.one.session.said)
            message = self.given[self.launched]
            self.launched += 1
            self.one.link.on_posted(message)
            if [kind for kind, _ in self.one.session.said[before:]] == [FrameKind.FETCH]:
                self.sends.append(message.tag.order.number)

    def sent(self, flag: bool) -> None:
        if self.sends and not self.one.session.errors:
            number = self.sends.popleft()
            self.there[number] = flag
            self.one.session.hears(FrameKind.SENT, FetchSent(number, flag))

    def come(self, flag: bool) -> None:
        if self.state == "open" and self.launched and self.given[0].tag.asked:
            message = self.given.pop(0)
            self.launched -= 1
            self.here.add(message.tag.order.number)
            self.one.link.on_moved(message)

    def break_(self, flag: bool) -> None:
        if self.state in {"joined", "open"}:
            if flag:
                self.lose()
            else:
                self.one.session.hears(FrameKind.UNGROUP, Group(self.theirs, reason="prefill's"))

    def end(self, flag: bool) -> None:
        if self.state == "lost":
            self.state = "over"
            given, self.given, self.launched = self.given, [], 0
            if self.one.session.errors or not any(message.tag.asked for message in given):
                self.sends.clear()
            self.one.link.on_released(tuple(given))

    def by_tcp(self, flag: bool) -> None:
        self.one.tcp.answer()

    def forget(self, flag: bool) -> None:
        self.one.maker._shunned.clear()

    def close(self, flag: bool) -> None:
        if flag and self.orders > 4:
            self.one.session.close(PeerGone("the peer", "closed the connection"))

    def judge(self) -> None:
        answers = [*self.one.fetches, *self.one.failures]
        assert len(answers) == len(set(answers)), "each is answered once"
        assert not {message.tag.order.number for message in self.given} & set(answers), "what NCCL may write into is kept"
        came = self.here & {number for number, there in self.there.items() if there}
        assert {number for number in self.one.fetches if self.one.looked_for.get(number) == "device"} <= came
        if not self.one.session.errors:
            assert all(self.there.get(number) is False for number in self.one.failures), "no other fetch is lost"


EVENTS = ["fetch", "answer_ask", "open", "launch", "sent", "come", "break_", "end", "by_tcp", "forget", "close"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.booleans()), max_size=80))
def test_whatever_happens_a_fetch_is_answered_once_and_not_before_nccl_has_let_go(events: list[tuple[str, bool]]) -> None:
    life = Life()
    for what, flag in events:
        life.do(what, flag)
    life.one.session.close(PeerGone("the peer", "closed the connection"))
    for what in ("by_tcp", "break_", "end", "by_tcp"):
        life.do(what, True)
    assert sorted([*life.one.fetches, *life.one.failures]) == list(range(1, life.orders + 1))
