"""What waits, what is on offer, and when a put's memory may be freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import Kind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import Blocks
from xpyd_sidecar.transport.offers import OfferQueue, offer

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
DATA = memoryview(bytes(range(6 * 16)))


class Session:
    peer = "d"

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []

    def queue(self, header: bytes, payload: bytes, sent: Callable[[], None] | None = None) -> None:
        assert sent is None
        self.sent.append((header, payload))


@pytest.fixture
def session() -> Session:
    return Session()


def put(queue: OfferQueue, session: Session, freed: list[str], name: str = "one", most: int = 32) -> None:
    queue.put(session, KEY, Blocks(2, 10, 6, DATA), lambda: freed.append(name), cover=True, most=most)


def test_blocks_wait_in_pieces_and_are_offered_in_their_order(session: Session) -> None:
    queue = OfferQueue()
    put(queue, session, [])
    cuts = [(one.blocks.first, one.blocks.blocks, bytes(one.blocks.data)) for one in queue.waiting]
    assert cuts == [(10, 2, bytes(DATA[:32])), (12, 2, bytes(DATA[32:64])), (14, 2, bytes(DATA[64:]))]
    first, second = queue.next(7), queue.next()
    assert (first.blocks.first, first.where) == (10, 7)
    assert [queue.taken(session), queue.taken(session)] == [first, second]
    assert len(queue.waiting) == 1
    assert queue


def test_a_put_is_done_when_all_its_pieces_are_in_whatever_order(session: Session) -> None:
    queue, freed = OfferQueue(), []
    put(queue, session, freed, "one")
    put(queue, session, freed, "two", most=1 << 20)
    held = queue.clear()
    assert not queue
    for one in (held[2], held[3], held[0]):
        one.done()
    assert freed == ["two"]
    held[1].done()
    assert freed == ["two", "one"]


def test_an_answer_to_no_offer_is_the_peers_mistake(session: Session) -> None:
    queue = OfferQueue()
    put(queue, session, [])
    with pytest.raises(ProtocolError, match="not on offer"):
        queue.taken(session)


@pytest.mark.parametrize("cover", [True, False])
def test_an_offer_says_where_a_piece_lies_and_what_its_sum_is(session: Session, cover: bool) -> None:
    queue = OfferQueue()
    queue.put(session, KEY, Blocks(2, 10, 6, DATA), lambda: None, cover=cover, most=32)
    queue.next()
    one = queue.next()
    offer(one, 4096)
    [(header, body)] = session.sent
    said = frames.decode(header)
    assert (said.kind, said.key, said.region, said.first, said.blocks) == (Kind.OFFER, KEY, 2, 12, 2)
    told = bodies.read_body(memoryview(body), bodies.Offer)
    assert (told.address, told.size, told.within) == (4096, 32, None)
    assert told.checksum == (frames.total(frames.sums(DATA[32:64], 16)) if cover else None)
