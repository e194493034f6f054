"""Which way a session may take, as prefill sees it."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import Incompatible, PeerGone, ProtocolError
from xpyd_sidecar.kv.bodies import DataHello, Gpu, LinkChoice, NixlMemory, NixlReader
from xpyd_sidecar.session import link_choice
from xpyd_sidecar.session.endpoint import LocalRank
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.session.prefill_link_choice import PrefillLinkChoice
from xpyd_sidecar.transport.link import Session
from xpyd_sidecar.transport.shm.mailbox import Mailbox
from xpyd_sidecar.transport.shm.prefill import SharedCopies
from xpyd_sidecar.transport.tcp.link import TcpLink

OURS = Gpu("GPU-1", "2.29.7", 8 << 20)
THEIRS = Gpu("GPU-2", "2.29.7", 4 << 20)
NCCL = LinkOptions("nccl", gpu=OURS)
READER = NixlReader("1.5.1", 2 << 20, 8)
MEMORY = NixlMemory("agent", b"metadata", "1.5.1", 0, 4096, 0, b"ticket")


@pytest.mark.parametrize(("ways", "theirs", "reason"), [
    (NCCL, THEIRS, ""),
    (LinkOptions("auto"), THEIRS, "decode's transport is nccl, prefill's is auto"),
    (LinkOptions("shm"), THEIRS, "decode's transport is nccl, prefill's is shm"),
    (NCCL, None, "decode's transport is not nccl"),
    (NCCL, Gpu("GPU-2", "2.30.4", 1), "nccl: version 2.29.7 at prefill, 2.30.4 at decode"),
    (NCCL, OURS, "nccl: both on one GPU"),
    (NCCL._replace(one_gpu=True), OURS, ""),
])
def test_why_there_is_no_group(ways: LinkOptions, theirs: Gpu | None, reason: str) -> None:
    assert link_choice.ungrouped(ways, theirs) == reason


@pytest.mark.parametrize(("transport", "host", "reads"), [
    ("auto", True, READER), ("rdma", False, READER), ("shm", True, None), ("tcp", False, None), ("nccl", False, None)])
def test_what_a_side_says_of_itself(transport: str, host: bool, reads: NixlReader | None) -> None:
    ways = LinkOptions(transport, nixl=READER)
    assert (bool(ways.host), ways.reads) == (host, reads)


class Grouping:
    """Links are enough here."""

    def __init__(self, pieces: list[int]) -> None:
        self.pieces = pieces

    def link(self, session: Session, piece: int) -> TcpLink:
        self.pieces.append(piece)
        return TcpLink(session)


class Reading:
    """Shows memory to everybody."""

    def link(self, session: Session, theirs: NixlReader) -> ShownLink:
        return ShownLink(session)


class ShownLink(TcpLink):
    name = "nixl"

    def shown(self) -> NixlMemory:
        return MEMORY


class Decode(Session):
    peer = "decode"


def inviting(ways: LinkOptions, pieces: list[int], reading: Reading | None = None) -> PrefillLinkChoice:
    me = LocalRank(InstanceName("p"), Incarnation("1" * 32), 0, b"", ways, 5.0, 1 << 20,
                   Grouping(pieces), reading, sharing=SharedCopies(4096))  # type: ignore[arg-type]
    return PrefillLinkChoice(me, Decode())


def hello(host: str, gpu: Gpu | None, mailbox: str = "", reads: NixlReader | None = None) -> DataHello:
    return DataHello(b"", InstanceName("d"), Incarnation("2" * 32), Incarnation("1" * 32), 0, b"", host, mailbox, gpu,
                     reads)


def test_pieces_are_what_both_take_and_nothing_else_is_offered_beside_a_group() -> None:
    pieces: list[int] = []
    way = inviting(NCCL, pieces)
    assert way.welcome(hello("", THEIRS)) == ""
    assert (way.gpu, way.shared) == (OURS, None)
    way.decided(LinkChoice("nccl", ""))
    assert pieces == [4 << 20]


def test_a_group_that_was_not_offered_cannot_be_chosen() -> None:
    way = inviting(LinkOptions(), [])
    assert way.welcome(hello("", THEIRS)) == "decode's transport is nccl, prefill's is auto"
    assert way.gpu is None
    with pytest.raises(ProtocolError, match="chose nccl, which was not offered"):
        way.decided(LinkChoice("nccl", ""))


@pytest.mark.parametrize(("near", "ours", "theirs", "takes", "reason"), [
    (True, READER, READER, "shm", ""),
    (True, None, None, "shm", ""),
    (False, READER, READER, "nixl", "not on one host"),
    (False, READER, None, "tcp", "not on one host; nixl: decode has or wants none"),
    (False, None, READER, "tcp", "not on one host; nixl: no RDMA device is here at prefill"),
    (False, None, None, "tcp", "not on one host; nixl: no RDMA device is here at prefill"),
], ids=["a host with rdma", "a host", "two hosts with rdma", "rdma at prefill alone", "rdma at decode alone", "two hosts"])
def test_auto_takes_memory_on_a_host_then_nixl_then_tcp(
        near: bool, ours: NixlReader | None, theirs: NixlReader | None, takes: str, reason: str) -> None:
    """And no NCCL, whatever both have."""
    way = inviting(LinkOptions(nixl=ours, no_nixl="" if ours else "no RDMA device is here"), [], Reading())
    box = Mailbox(None)
    said = hello(link_choice.host() if near else "elsewhere", None, box.name, theirs)
    assert way.welcome(said) == reason
    box.close()
    shown = {"shm": way.shared, "nixl": way.memory, "nccl": way.gpu}
    assert {name for name, what in shown.items() if what is not None} == {takes} - {"tcp"}
    way.decided(LinkChoice(takes, ""))  # type: ignore[arg-type]
    assert way.link.name == takes
    way.close()


def test_every_reason_is_told() -> None:
    way = inviting(LinkOptions(no_nixl="no RDMA device is here"), [])
    assert way.welcome(hello(link_choice.host(), None)) == ("shm: decode names no mailbox; "
                                                            "nixl: no RDMA device is here at prefill")
    assert (way.shared, way.memory) == (None, None)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_decode_that_has_left_before_it_was_sent_the_memory_is_lost_and_refused_nothing(
        transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mailbox is gone, which says nothing of whether the two can share memory."""
    way = inviting(LinkOptions(transport), [])
    box = Mailbox(None)
    box.close()
    monkeypatch.setattr(Decode, "left", True)
    with pytest.raises(PeerGone, match="closed the connection"):
        way.welcome(hello(link_choice.host(), None, box.name))
    monkeypatch.undo()
    if transport == "auto":
        assert way.welcome(hello(link_choice.host(), None, box.name)) == "shm: decode's mailbox: Connection refused"
        return
    with pytest.raises(Incompatible, match="transport shm: shm: decode's mailbox: Connection refused"):
        way.welcome(hello(link_choice.host(), None, box.name))


def test_a_link_is_chosen_once() -> None:
    way = inviting(LinkOptions(), [])
    box = Mailbox(None)
    way.welcome(hello(link_choice.host(), None, box.name))
    box.close()
    way.decided(LinkChoice("shm", ""))
    with pytest.raises(ProtocolError, match="chose tcp after shm"):
        way.decided(LinkChoice("tcp", "after all"))
    assert way.link.name == "shm"
    way.close()


def test_who_insists_is_told_why_not() -> None:
    with pytest.raises(Incompatible, match="transport nccl: decode's transport is not nccl"):
        inviting(NCCL, []).welcome(hello(link_choice.host(), None))
    with pytest.raises(Incompatible, match="transport shm: decode's transport is nccl, prefill's is shm"):
        inviting(LinkOptions("shm"), []).welcome(hello("", THEIRS))
    way = inviting(NCCL, [])
    way.welcome(hello("", THEIRS))
    with pytest.raises(Incompatible, match="transport nccl: decode's own"):
        way.decided(LinkChoice("tcp", "decode's own"))
