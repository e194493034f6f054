"""A decode engine that stops reading, with every buffer between it and prefill full, holds up nobody else."""

from __future__ import annotations

import time
from functools import partial

from kv_ranks import DecodeRank, PrefillRank, key

from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.session.sender import Kept

BLOCK = 1 << 20
KEEP = 48 * BLOCK


def keep(p: PrefillRank, which: Key, holder: str, region: int, first: int) -> bool:
    """As the engine's thread does it: lease, copy, hand over."""
    lease = p.sender.store.lease(BLOCK, holder)
    if lease is None:
        return False
    p.sender.push(which, [Copy(region, first, 1, Kept(lease.chunk.view, lease))])
    return True


def test_a_stopped_peer_leaves_others_their_share_and_their_speed() -> None:
    with PrefillRank(keep_bytes=KEEP, block=BLOCK, timeout_s=60) as p, \
            DecodeRank(chunks=1, block=BLOCK, load_s=60, timeout_s=60) as stopped, \
            DecodeRank(block=BLOCK, load_s=60, timeout_s=60) as other:
        blocks = KEEP // BLOCK
        stopped.load("s", key("a"), p, first=0, count=blocks)
        taken = sum(keep(p, key("a"), "stopped", region, first) for first in range(blocks // 2) for region in range(2))
        end = time.monotonic() + 60
        while not stopped.receiver.inbox:  # its only chunk is in use from here on: it reads no more
            assert time.monotonic() < end
            time.sleep(0.01)
        while keep(p, key("a"), "stopped", 1, blocks - 1 - taken % 2):
            taken += 1
        held = p.sender.store.used
        assert KEEP // 2 < held < KEEP
        for number in range(6):
            which = key("bcdef0"[number])
            name = f"r{number}"
            other.load(name, which, p, first=0, count=2)
            for region in range(2):
                for first in range(2):
                    assert keep(p, which, "other", region, first)
            other.wait(partial(done, other, number + 1), deadline_s=60)
        assert {one.outcome for one in other.finished} == {Outcome.OK}
        assert not stopped.finished
        assert p.sender.store.used >= held - 4 * BLOCK, "what was kept for the stopped one is still there"


def done(rank: DecodeRank, count: int) -> bool:
    return len(rank.finished) >= count
