"""The pressure on a sender's store: what one look at it costs."""

from __future__ import annotations

import math

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.kv.stores import Busy, Expect
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.memory.store import CopyStore, StoreLease
from xpyd_sidecar.session.sender import Kept
from xpyd_sidecar.session.spilling import Spilling

REGIONS, TRANSFERS = 4, 50


class Weighed:
    """Memory of a copy. Who asks for its size is counted."""

    asked = 0

    def __len__(self) -> int:
        Weighed.asked += 1
        return 1000


def test_a_look_at_a_full_store_costs_the_same_however_much_is_on_offer() -> None:
    machine = Sending[Kept](keep_s=60, send_s=60, regions=REGIONS, block_bytes=1000 * REGIONS, cover=True)
    store = CopyStore(lambda size: Chunk(None, memoryview(bytearray(size))), 1 << 20)
    spilling = Spilling(machine, store)
    for number in range(TRANSFERS):
        key = Key(TransferId(f"{number:032x}"), Attempt(1), 1)
        machine.expect(1, key, Expect(REGIONS, 1000 * REGIONS, checksum=True))
        for region in range(REGIONS):
            machine.copy(key, Copy(region, 0, 1, Kept(Weighed(), StoreLease(Chunk(None, memoryview(b"")), 0))), 0.0)  # type: ignore[arg-type]
    assert store.lease(store.bound) is not None
    assert len(spilling.relieve()) == REGIONS * TRANSFERS
    before = Weighed.asked
    assert spilling.relieve() == []
    assert Weighed.asked - before <= REGIONS


@pytest.mark.parametrize("retry_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300])
def test_a_decode_that_is_busy_is_not_asked_again_at_once_whatever_time_it_names(retry_s: float) -> None:
    machine = Sending[Kept](keep_s=60, send_s=60, regions=1, block_bytes=1000, cover=True)
    store = CopyStore(lambda size: Chunk(None, memoryview(bytearray(size))), 1 << 20)
    spilling = Spilling(machine, store)
    key = Key(TransferId("a" * 32), Attempt(1), 1)
    machine.expect(1, key, Expect(1, 1000, checksum=True))
    machine.copy(key, Copy(0, 0, 1, Kept(memoryview(bytes(1000)), StoreLease(Chunk(None, memoryview(b"")), 0))), 0.0)
    assert store.lease(store.bound) is not None
    assert len(spilling.relieve()) == 1
    spilling.heard(1, "d", Header(FrameKind.BUSY, True, 0, key, 0, 0, 1, 0), memoryview(bodies.body(Busy(retry_s))))
    assert spilling.relieve() == []
