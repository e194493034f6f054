"""Decode's choice of a link: the best that prefill has welcomed it with, or the next with the reason, or none; once."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from xpyd_sidecar.errors import Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.session_bodies import Gpu, LinkChoice, LinkName, LinkWelcome, NixlMemory, SharedStore
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.session import link_trial
from xpyd_sidecar.session.link_trial import OTHERWISE, Fetcher, FetchSettings, Trial
from xpyd_sidecar.transport.links import FetchLink
from xpyd_sidecar.transport.shm import fetch
from xpyd_sidecar.transport.shm.mailbox import mark
from xpyd_sidecar.transport.shm.serve import TICKETS_AT, SharedCopies

NIXL = LinkWelcome(nixl=NixlMemory("agent", b"m", "1.5.1", 4096, 4096, 64, b"\1" * 32), reason="shm: not on one host")
SECRET = b"s" * 32
HOST = "this host"


class ScriptedLink(FetchLink):
    def __init__(self, name: LinkName) -> None:
        self.name = name
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class ScriptedMailbox:
    """What is in the mailboxes of this process; ``lack``: why none can be bound."""

    letters: ClassVar[deque[tuple[bytes, int | None]]] = deque()
    lack: ClassVar[OSError | None] = None
    open: ClassVar[int] = 0

    def __init__(self, folder: Path | None) -> None:
        self.name = "@xpyd-kv-1"
        if ScriptedMailbox.lack is not None:
            raise ScriptedMailbox.lack
        ScriptedMailbox.open += 1

    def take(self, wanted: Callable[[bytes], bool]) -> tuple[bytes, int | None] | None:
        letters = ScriptedMailbox.letters
        return letters.popleft() if letters and wanted(letters[0][0]) else None

    def close(self) -> None:
        ScriptedMailbox.open -= 1


class World:
    """A session and its choice; ``settle``: of the links that are being made, the last one's word."""

    peer = "p"

    def __init__(self, transport: str, *names: LinkName, host: str = "", reader: Any = None,
                 encrypts: bool = False) -> None:
        self.said: list[tuple[FrameKind, Any]] = []
        self.made: list[str] = []
        self.chosen: list[tuple[str, str]] = []
        self.links: list[FetchLink] = []
        self.settle: Callable[[FetchLink | None, str], None] = self.nobody
        others: Any = {name: self.maker(name) for name in names}
        settings = FetchSettings(transport, host, nixl="1.5.1", encrypts=encrypts)
        self.trial: Trial = Fetcher(settings, self, others, reader).begin(self, self.choose)  # type: ignore[arg-type]

    def choose(self, link: FetchLink, reason: str) -> None:
        self.chosen.append((link.name, reason))
        self.links.append(link)

    @staticmethod
    def nobody(link: FetchLink | None, reason: str) -> None:
        raise AssertionError((link, reason))

    def maker(self, name: LinkName) -> Any:
        def make(session: Any, owner: Any, welcome: Any, settled: Any) -> bool:
            self.made.append(name)
            self.settle = settled
            if name == "tcp":
                settled(ScriptedLink("tcp"), "")
            return name != "tcp"

        return make

    def send(self, kind: FrameKind, body: Any = None, key: Any = NO_TRY) -> bytes:
        self.said.append((kind, body))
        return b""

    def post(self, call: Callable[[], None]) -> None:
        raise AssertionError("nothing is posted")

    def close(self, error: PeerError) -> None:
        raise error

    def welcomed(self, welcome: LinkWelcome = NIXL) -> None:
        self.trial.on_frame(Frame(FrameKind.WELCOME, NO_TRY, msgspec.msgpack.encode(welcome)))

    def shared(self, reason: str = "") -> None:
        """Prefill says that it has sent the descriptor, or why not."""
        self.trial.on_frame(Frame(FrameKind.SHARED, NO_TRY, msgspec.msgpack.encode(LinkChoice("shm", reason))))


def test_prefill_waits_for_this_side_while_a_link_is_made_and_no_longer() -> None:
    world = World("rdma", "nixl")
    assert world.trial.able.nixl == "1.5.1"
    assert not world.trial.waits_for_us
    world.welcomed()
    assert world.trial.waits_for_us
    link = ScriptedLink("nixl")
    world.settle(link, "")
    assert not world.trial.waits_for_us
    assert world.chosen == [("nixl", "shm: not on one host")]
    world.trial.close()
    assert link.closed == 0


def test_a_link_that_is_made_after_its_session_has_ended_is_closed() -> None:
    world = World("rdma", "nixl")
    world.welcomed()
    world.trial.close()
    link = ScriptedLink("nixl")
    world.settle(link, "")
    assert (link.closed, world.chosen) == (1, [])


def test_nothing_else_is_tried_after_the_session_has_ended() -> None:
    world = World("auto", "nixl", "tcp")
    world.welcomed()
    world.trial.close()
    world.settle(None, "nixl: no answer")
    assert (world.made, world.chosen) == (["nixl"], [])


def test_what_cannot_be_made_is_done_without_where_that_may_be() -> None:
    world = World("auto", "nixl", "tcp")
    world.welcomed()
    world.settle(None, "nixl: no answer")
    assert world.made == ["nixl", "tcp"]
    assert world.chosen == [("tcp", "shm: not on one host; nixl: no answer")]


def test_who_insists_refuses_and_tells_prefill_why() -> None:
    world = World("rdma", "nixl")
    world.welcomed()
    with pytest.raises(Incompatible, match="transport rdma: shm: not on one host; nixl: no answer"):
        world.settle(None, "nixl: no answer")
    assert world.said == [(FrameKind.LINK, LinkChoice("tcp", "shm: not on one host; nixl: no answer"))]


def test_a_link_that_decode_has_not_is_refused() -> None:
    world = World("auto", "tcp")
    with pytest.raises(Incompatible, match="prefill has welcomed over nixl, which is not at decode"):
        world.welcomed()


def test_prefill_welcomes_once() -> None:
    world = World("rdma", "nixl")
    world.welcomed()
    with pytest.raises(ProtocolError, match="sent WELCOME out of turn"):
        world.welcomed()


def test_a_group_is_made_where_prefill_has_welcomed_with_one() -> None:
    world = World("nccl", "nccl", "tcp")
    world.welcomed(LinkWelcome(gpu=Gpu("GPU-1", "2.29.7", 4096)))
    assert (world.made, world.trial.waits_for_us) == (["nccl"], True)
    world.settle(ScriptedLink("nccl"), "")
    assert world.chosen == [("nccl", "")]


def test_what_prefill_has_nothing_better_for_comes_over_tcp_with_its_reason() -> None:
    world = World("auto", "tcp")
    world.welcomed(LinkWelcome(reason="shm: not on one host; nixl: not at prefill"))
    assert world.chosen == [("tcp", "shm: not on one host; nixl: not at prefill")]
    assert world.said == []


# --- memory that prefill shows ---

@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedMailbox]:
    monkeypatch.setattr(link_trial, "Mailbox", ScriptedMailbox)
    monkeypatch.setattr(ScriptedMailbox, "letters", deque([(SECRET, None)]))
    monkeypatch.setattr(ScriptedMailbox, "lack", None)
    monkeypatch.setattr(ScriptedMailbox, "open", 0)
    return ScriptedMailbox


@pytest.fixture
def shown() -> tuple[SharedCopies, SharedStore]:
    made = SharedCopies(8192)
    cell = made.tickets.take()
    assert cell is not None
    at, ticket = made.tickets.descriptor(cell)
    return made, SharedStore(made.name, made.size, TICKETS_AT + at, ticket, mark(SECRET))


Shown = tuple[SharedCopies, SharedStore]


def test_memory_is_mapped_once_prefill_knows_that_the_mailbox_is_decodes(mailbox: type[ScriptedMailbox],
                                                                        shown: Shown) -> None:
    copies, memory = shown
    world = World("auto", "tcp", host=HOST)
    assert (world.trial.able.host, world.trial.able.mailbox) == (HOST, "@xpyd-kv-1")
    world.welcomed(LinkWelcome(shared=memory))
    assert world.said == [(FrameKind.LINK, LinkChoice("map", "", SECRET))]
    mailbox.letters.append((memory.name, os.dup(copies.fd)))
    world.shared()
    assert world.chosen == [("shm", "")]
    assert mailbox.open == 0
    assert not world.links[0].reads_into_device
    world.links[0].close()


def test_a_device_reads_what_is_mapped(mailbox: type[ScriptedMailbox], shown: Shown) -> None:
    copies, memory = shown
    views: list[memoryview] = []

    class Reader:
        def __init__(self, view: memoryview) -> None:
            views.append(view)

        def close(self, closed: Callable[[], None]) -> None:
            views.pop().release()
            closed()

    world = World("auto", host=HOST, reader=Reader)
    world.welcomed(LinkWelcome(shared=memory))
    mailbox.letters.append((memory.name, os.dup(copies.fd)))
    world.shared()
    assert [len(view) for view in views] == [copies.size]
    assert world.links[0].reads_into_device
    world.links[0].close()
    assert views == []


def begin(world: World, memory: SharedStore) -> None:
    """Decode asks to map what it is shown."""
    world.welcomed(LinkWelcome(shared=memory))
    assert world.said.pop() == (FrameKind.LINK, LinkChoice("map", "", SECRET))


def no_letter(world: World, shown: Shown) -> None:
    ScriptedMailbox.letters.clear()
    world.welcomed(LinkWelcome(shared=shown[1]))


def not_sent(world: World, shown: Shown) -> None:
    begin(world, shown[1])
    world.shared("shm: decode's mailbox: No such file or directory")


def not_come(world: World, shown: Shown) -> None:
    begin(world, shown[1])
    world.shared()


def another(world: World, shown: Shown) -> None:
    begin(world, shown[1])
    other = SharedCopies(8192)
    ScriptedMailbox.letters.append((shown[1].name, os.dup(other.fd)))
    world.shared()


CANNOT: dict[str, tuple[Callable[[World, Shown], None], str]] = {
    "no letter": (no_letter, "shm: nothing of prefill's has come into the mailbox"),
    "not sent": (not_sent, "shm: decode's mailbox: No such file or directory"),
    "not come": (not_come, "shm: the descriptor of prefill's memory has not come"),
    "another": (another, "shm: another memory")}


@pytest.mark.parametrize("why", CANNOT)
def test_where_memory_cannot_be_mapped_blocks_come_over_tcp_with_the_reason(
        why: str, mailbox: type[ScriptedMailbox], shown: Shown) -> None:
    fail, reason = CANNOT[why]
    world = World("auto", "tcp", host=HOST)
    fail(world, shown)
    assert world.chosen == [("tcp", reason)]
    assert (world.said, mailbox.open) == ([], 0)


@pytest.mark.parametrize("why", CANNOT)
@pytest.mark.usefixtures("mailbox")
def test_who_insists_on_memory_refuses_says_so_and_names_what_would_help(why: str, shown: Shown) -> None:
    fail, reason = CANNOT[why]
    world = World("shm", "tcp", host=HOST)
    with pytest.raises(Incompatible) as raised:
        fail(world, shown)
    assert raised.value.reason == f"transport shm: {reason}; {OTHERWISE}"
    assert world.said == [(FrameKind.LINK, LinkChoice("tcp", reason))]
    assert world.chosen == []


def test_a_mailbox_that_cannot_be_bound_is_none(mailbox: type[ScriptedMailbox], caplog: pytest.LogCaptureFixture) -> None:
    mailbox.lack = OSError(errno.ENOSPC, "No space left on device")
    for transport in ("auto", "shm"):
        world = World(transport, "tcp", host=HOST)
        assert (world.trial.able.host, world.trial.able.mailbox) == (HOST, "")
        world.trial.close()
    assert caplog.text.count("no mailbox for p in this network namespace: No space left on device") == 2


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("where", ["mailbox", "mapping"])
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_lack_of_files_or_memory_is_no_refusal_for_good(*, lack: int, where: str, transport: str,
                                                          mailbox: type[ScriptedMailbox], shown: Shown,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be over in a moment: where there is no other link, the transfer can be tried again."""
    error = OSError(lack, os.strerror(lack))

    def lacking(*_: object) -> None:
        raise error

    def run() -> World:
        if where == "mailbox":
            mailbox.lack = error
        world = World(transport, "tcp", host=HOST)
        if where == "mailbox":
            world.welcomed(LinkWelcome(reason="shm: decode names no mailbox"))
            return world
        monkeypatch.setattr(fetch, "_mapped", lacking)
        begin(world, shown[1])
        mailbox.letters.append((shown[1].name, os.dup(shown[0].fd)))
        world.shared()
        return world

    if transport == "shm":
        with pytest.raises(PeerGone, match="cannot be asked now: "):
            run()
    else:
        assert [name for name, _ in run().chosen] == ["tcp"]


def test_a_descriptor_that_comes_with_the_secret_is_closed(mailbox: type[ScriptedMailbox], shown: Shown) -> None:
    fd = os.dup(shown[0].fd)
    mailbox.letters[0] = SECRET, fd
    world = World("auto", "tcp", host=HOST)
    begin(world, shown[1])
    world.trial.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.usefixtures("mailbox")
def test_prefill_says_that_it_has_sent_something_once_and_when_it_was_asked(shown: Shown) -> None:
    world = World("auto", "tcp", host=HOST)
    with pytest.raises(ProtocolError, match="sent SHARED out of turn"):
        world.shared()
    not_sent(world, shown)
    with pytest.raises(ProtocolError, match="sent SHARED out of turn"):
        world.shared()
    with pytest.raises(ProtocolError, match="sent PING out of turn"):
        world.trial.on_frame(Frame(FrameKind.PING, NO_TRY, b""))


def test_a_session_that_ends_before_its_choice_leaves_no_mailbox(mailbox: type[ScriptedMailbox], shown: Shown) -> None:
    world = World("auto", "tcp", host=HOST)
    begin(world, shown[1])
    assert mailbox.open == 1
    world.trial.close()
    world.trial.close()
    assert mailbox.open == 0


@pytest.mark.parametrize(("prefill", "decode"), [(False, True), (True, False)])
def test_a_prefill_that_has_encryption_otherwise_is_refused_before_any_link_is_made(*, prefill: bool, decode: bool) -> None:
    """A prefill that does not know the field would send blocks in clear."""
    world = World("auto", "nixl", "tcp", encrypts=decode)
    assert world.trial.able.encrypts is decode
    word = {True: "enabled", False: "disabled"}
    with pytest.raises(Incompatible, match=f"kv.encryption is {word[prefill]} at prefill, {word[decode]} at decode"):
        world.welcomed(LinkWelcome(stripes=4, encrypts=prefill))
    assert (world.made, world.chosen) == ([], [])
