from __future__ import annotations

import os
import re

from xpyd_sidecar.router.http import heads


def test_every_one_is_new_and_128_bits_long() -> None:
    drawn = [heads.fresh() for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in drawn)


def test_a_child_draws_its_own() -> None:
    heads.fresh()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sending, "".join(heads.fresh() for _ in range(64)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(sending)
    with os.fdopen(receiving) as told:
        text = told.read()
    theirs = {text[at:at + 32] for at in range(0, len(text), 32)}
    assert len(theirs) == 64
    assert theirs.isdisjoint(heads.fresh() for _ in range(64))
