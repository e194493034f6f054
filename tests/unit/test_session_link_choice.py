"""Which way a session may take, as prefill sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import Incompatible, PeerGone, ProtocolError
from xpyd_sidecar.kv.bodies import DataHello, Gpu, LinkChoice
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


@pytest.mark.parametrize(("ways", "theirs", "reason"), [
    (LinkOptions(gpu=OURS), THEIRS, ""),
    (LinkOptions("nccl", gpu=OURS), THEIRS, ""),
    (LinkOptions("tcp", gpu=OURS), THEIRS, "prefill's transport is tcp"),
    (LinkOptions("shm", gpu=OURS), THEIRS, "prefill's transport is shm"),
    (LinkOptions(no_gpu="nccl4py: No module named 'nccl'"), THEIRS, "nccl: nccl4py: No module named 'nccl' at prefill"),
    (LinkOptions(gpu=OURS), None, "nccl: decode has or wants none"),
    (LinkOptions(gpu=OURS), Gpu("GPU-2", "2.30.4", 1), "nccl: version 2.29.7 at prefill, 2.30.4 at decode"),
    (LinkOptions(gpu=OURS), OURS, "nccl: both on one GPU"),
    (LinkOptions(gpu=OURS, one_gpu=True), OURS, ""),
])
def test_why_there_is_no_group(ways: LinkOptions, theirs: Gpu | None, reason: str) -> None:
    assert link_choice.ungrouped(ways, theirs) == reason


@pytest.mark.parametrize(("transport", "group", "host"), [
    ("auto", OURS, True), ("nccl", OURS, False), ("shm", None, True), ("tcp", None, False)])
def test_what_a_side_says_of_itself(transport: str, group: Gpu | None, host: bool) -> None:
    ways = LinkOptions(transport, gpu=OURS)
    assert (ways.group, bool(ways.host)) == (group, host)


class Grouping:
    """Links are enough here."""

    def __init__(self, pieces: list[int]) -> None:
        self.pieces = pieces

    def link(self, session: Session, piece: int) -> TcpLink:
        self.pieces.append(piece)
        return TcpLink(session)


class Decode(Session):
    peer = "decode"


def inviting(ways: LinkOptions, pieces: list[int]) -> PrefillLinkChoice:
    me = LocalRank(InstanceName("p"), Incarnation("1" * 32), 0, b"", ways, 5.0, 1 << 20,
                   Grouping(pieces), sharing=SharedCopies(4096))  # type: ignore[arg-type]
    return PrefillLinkChoice(me, Decode())


def hello(host: str, gpu: Gpu | None, mailbox: str = "") -> DataHello:
    return DataHello(b"", InstanceName("d"), Incarnation("2" * 32), Incarnation("1" * 32), 0, b"", host, mailbox, gpu)


def test_pieces_are_what_both_take_and_nothing_else_is_offered_beside_a_group() -> None:
    pieces: list[int] = []
    way = inviting(LinkOptions(gpu=OURS), pieces)
    assert way.welcome(hello("a host", THEIRS)) == ""
    assert (way.gpu, way.shared) == (OURS, None)
    way.decided(LinkChoice("nccl", ""))
    assert pieces == [4 << 20]


def test_a_group_that_was_not_offered_cannot_be_chosen() -> None:
    way = inviting(LinkOptions(gpu=OURS), [])
    way.welcome(hello("elsewhere", OURS))
    assert way.gpu is None
    with pytest.raises(ProtocolError, match="chose nccl, which was not offered"):
        way.decided(LinkChoice("nccl", ""))


def test_every_reason_is_told() -> None:
    way = inviting(LinkOptions(gpu=OURS), [])
    assert way.welcome(hello("elsewhere", OURS)) == "nccl: both on one GPU; not on one host"
    near_by = inviting(LinkOptions(gpu=OURS), [])
    assert near_by.welcome(hello(link_choice.host(), OURS)) == "nccl: both on one GPU; shm: decode names no mailbox"
    assert near_by.shared is None
    near_by = inviting(LinkOptions(gpu=OURS), [])
    box = Mailbox(None)
    assert near_by.welcome(hello(link_choice.host(), OURS, box.name)) == ""
    assert near_by.shared is not None
    box.close()
    near_by.close()


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


def test_who_insists_is_told_why_not(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="transport nccl: nccl: decode has or wants none"):
        inviting(LinkOptions("nccl", tmp_path, OURS), []).welcome(hello(link_choice.host(), None))
    way = inviting(LinkOptions("nccl", gpu=OURS), [])
    way.welcome(hello("", THEIRS))
    with pytest.raises(Incompatible, match="transport nccl: decode's own"):
        way.decided(LinkChoice("tcp", "decode's own"))
