"""Bytes of a copy that a FETCH asks for, if they are within it. Free of torch."""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.transport.tcp.serve import CopyBytes

COMBS_MAX: Final = 1 << 16
"""Stretches of one FETCH: more are no honest piece."""


def views_of(copy: CopyBytes, asked: bodies.FetchBytes, peer: str) -> list[list[memoryview]]:
    """The bytes of a copy that a fetch asks for, piece by piece, in the order in which they are to be sent.

    Raises:
        ProtocolError: they lie outside of it, or are too many stretches for an honest fetch.
    """
    counts = [comb.count for combs in asked.pieces for comb in combs]
    if sum(counts) > COMBS_MAX or min(counts, default=1) < 1:
        raise ProtocolError(peer, "asked for too many stretches at once, or for less than none")
    return [[view for comb in combs for view in _views(copy, comb, peer)] for combs in asked.pieces]


def _views(copy: CopyBytes, comb: bodies.Comb, peer: str) -> list[memoryview]:
    begin, step = comb.offset - copy.offset, comb.step if comb.count > 1 else 0
    last = begin + step * (comb.count - 1) + comb.size
    if comb.size < 1 or step < 0 or begin < 0 or last > len(copy.view):
        raise ProtocolError(peer, f"asked for {comb.size} bytes at {comb.offset}, which it was not told of")
    return [copy.view[begin + step * nth:][:comb.size] for nth in range(comb.count)]
