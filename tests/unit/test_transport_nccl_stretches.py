"""What a FETCH asks for is sent only if it is of the copy that it names."""

from __future__ import annotations

import random

import pytest

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv.session_bodies import Comb, FetchBytes
from xpyd_sidecar.transport.nccl.stretches import COMBS_MAX, views_of

BEGIN = 4096
"""Of the copy, in the store."""


class Copy:
    """What manifest 7 was told of."""

    offset = BEGIN
    view = memoryview(random.Random(1).randbytes(1 << 20))

    def hold(self) -> None:
        """It stays."""

    def let_go(self) -> None:
        """It stays."""


SOME = (Comb(BEGIN + 10, 1000), Comb(BEGIN + 5000, 256, 1024, 200))


def asked(*pieces: tuple[Comb, ...]) -> list[bytes]:
    return [b"".join(views) for views in views_of(Copy(), FetchBytes(1, 7, pieces, 1), "d")]


def test_stretches_are_of_the_copy_in_the_order_in_which_they_are_asked_for() -> None:
    whole = bytes(Copy.view)
    assert asked(SOME, (Comb(BEGIN, 1 << 20),)) == [
        whole[10:1010] + b"".join(whole[5000 + 1024 * nth:][:256] for nth in range(200)), whole]


OUTSIDE = [Comb(BEGIN - 1, 10), Comb(BEGIN, (1 << 20) + 1), Comb(BEGIN, 0), Comb(BEGIN, -1), Comb(BEGIN, 10, 5, 0),
           Comb(BEGIN, 10, -10, 2), Comb(BEGIN, 10, 1 << 20, 2), Comb(BEGIN + 10, 10, 1 << 62, 3), Comb(0, 10),
           Comb(BEGIN, 10, 20, -3), Comb(1 << 62, 10), Comb(BEGIN, 10, (1 << 20) - 9, 2)]


@pytest.mark.parametrize("comb", OUTSIDE)
def test_nothing_beside_the_copy_is_sent_and_nothing_of_a_fetch_that_asks_for_it(comb: Comb) -> None:
    with pytest.raises(ProtocolError, match=r"which it was not told of|for less than none"):
        asked(SOME, (comb,))


def test_no_more_stretches_are_looked_at_than_an_honest_fetch_has() -> None:
    with pytest.raises(ProtocolError, match="too many stretches"):
        asked(*[(Comb(BEGIN, 1, 1, COMBS_MAX // 2),)] * 3)
    with pytest.raises(ProtocolError, match="too many stretches"):
        asked((Comb(BEGIN, 1, 0, 1 << 40),))
    for count in (1 << 40, 10):
        with pytest.raises(ProtocolError, match="for less than none"):
            asked((Comb(BEGIN, 1, 1, count), Comb(BEGIN, 1, 1, -count)))
