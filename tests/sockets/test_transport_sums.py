"""Sums of copies: the same whether they were made before anybody asked for blocks or when they are sent."""

from __future__ import annotations

import random
import time

import pytest
from kv_ranks import REGIONS, DecodeRank, PrefillRank, content, key, push

from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.link import Blocks, Sums

EACH, COUNT = 70_000, 6
DATA = memoryview(random.Random(1).randbytes(EACH * COUNT))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each call that sums up."""
    calls: list[int] = []

    def sums(data: memoryview, size: int) -> bytes:
        calls.append(len(data))
        return real(data, size)

    real = moves.sums
    monkeypatch.setattr(moves, "sums", sums)
    return calls


@pytest.mark.parametrize("early", [True, False])
def test_parts_have_the_sums_of_their_blocks(early: bool, counted: list[int]) -> None:
    sums = Sums(DATA, COUNT)
    if early:
        sums.make()
    # A taker lacks all but the first two blocks, in frames of three and of one.
    wanted = Blocks(7, 12, COUNT - 2, DATA[2 * EACH:], sums, 2)
    for first, count in ((12, 3), (15, 1)):
        part = wanted.part(first, count)
        assert (part.region, part.first, part.blocks) == (7, first, count)
        assert part.data == DATA[(first - 10) * EACH:(first - 10 + count) * EACH]
        assert part.total() == frames.total(frames.sums(part.data, EACH))
    assert sum(counted) == (len(DATA) if early else 4 * EACH)
    assert Blocks(0, 0, COUNT, DATA).total() == frames.total(frames.sums(DATA, EACH))


def test_what_was_asked_for_or_given_back_is_not_summed_up_again(counted: list[int]) -> None:
    asked, dropped = Sums(DATA, COUNT), Sums(DATA, COUNT)
    asked.of(0, 1)
    asked.make()
    dropped.drop()
    dropped.make()
    assert counted == [EACH]


@pytest.mark.parametrize("cover", [True, False])
def test_prefill_sums_up_what_waits_to_be_asked_for(cover: bool, counted: list[int]) -> None:
    with PrefillRank(cover=cover) as p, DecodeRank(cover=cover, direct=True) as d:
        push(p)
        end = time.monotonic() + 20
        while cover and len(counted) < REGIONS:
            assert time.monotonic() < end
            time.sleep(0.01)
        d.load("r", key(), p, first=1, count=3)
        assert d.wait_outcomes() == [Outcome.OK]
        assert d.cache == {(region, 100 + n): content(region, n, d.block) for region in range(REGIONS) for n in (1, 2, 3)}
    assert sum(counted) == (REGIONS * 4 * p.block if cover else 0), "once, and before"
