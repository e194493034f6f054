"""What waits, what is on offer, and when a put's memory may be freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.offers import OfferedBlocks, OfferLink

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
DATA = memoryview(bytes(range(6 * 16)))


class Decode(Session):
    peer = "d"

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []

    def queue(self, header: bytes, payload: bytes, sent: Callable[[], None] | None = None) -> None:
        assert sent is None
        self.sent.append((header, payload))


class Link(OfferLink):
    """Two offers at once."""

    name = "test"

    def __init__(self, session: Decode) -> None:
        super().__init__(session, 2)

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        self._tell(one, 4096 + one.blocks.first, one.blocks.total())
        return one._replace(where=7)


@pytest.fixture
def session() -> Decode:
    return Decode()


def put(link: OfferLink, freed: list[str], name: str = "one", *, most: int = 32, cover: bool = True) -> None:
    link.put(KEY, Blocks(2, 10, 6, DATA, cover=cover), lambda: freed.append(name), most=most)


def test_blocks_wait_in_pieces_and_are_offered_in_their_order(session: Decode) -> None:
    link = Link(session)
    put(link, [])
    cuts = [(one.blocks.first, one.blocks.blocks, bytes(one.blocks.data)) for one in (*link.offered, *link.waiting)]
    assert cuts == [(10, 2, bytes(DATA[:32])), (12, 2, bytes(DATA[32:64])), (14, 2, bytes(DATA[64:]))]
    assert [one.where for one in link.offered] == [7, 7]
    assert len(session.sent) == 2
    link.taken(read=True)
    assert [frames.decode(header).first for header, _ in session.sent] == [10, 12, 14]
    assert link.busy


def test_a_put_is_done_when_all_its_pieces_are(session: Decode) -> None:
    link, freed = Link(session), []
    put(link, freed, "one")
    put(link, freed, "two", most=1 << 20)
    for _ in range(2):
        link.taken(read=True)
    assert freed == []
    link.taken(read=True)
    assert freed == ["one"]
    link.close()
    assert freed == ["one", "two"]
    assert not link.busy


def test_an_answer_to_no_offer_is_the_peers_mistake(session: Decode) -> None:
    link = Link(session)
    with pytest.raises(ProtocolError, match="not on offer"):
        link.taken(read=True)


def test_who_cannot_take_what_was_agreed_on_is_mistaken_and_the_copy_is_freed_once(session: Decode) -> None:
    link, freed = Link(session), []
    put(link, freed)
    with pytest.raises(ProtocolError, match="cannot take a piece over test"):
        link.taken(read=False)
    assert freed == []
    link.close()
    link.close()
    assert freed == ["one"]


@pytest.mark.parametrize("cover", [True, False])
def test_an_offer_says_where_a_piece_lies_and_what_its_sum_is(session: Decode, cover: bool) -> None:
    put(Link(session), [], cover=cover)
    header, body = session.sent[1]
    said = frames.decode(header)
    assert (said.kind, said.key, said.region, said.first, said.blocks) == (FrameKind.OFFER, KEY, 2, 12, 2)
    told = bodies.read_body(memoryview(body), bodies.Offer)
    assert (told.address, told.size) == (4108, 32)
    assert told.checksum == (frames.total(frames.sums(DATA[32:64], 16)) if cover else None)
