"""The beginning of a stream, its end, or all of it in one read, taken in one call where that was compiled (``_answer``).

XPYD_PLAIN=1 in the environment leaves every read to ``token_recorder``.
"""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar import built

REVISION = 6
"""Of what both have in common; grows with every change of ``_answer.c``."""

Whole = tuple[bytes, str, int, str, bytes, int, int, int, int, int, int, int]
"""What the client gets; of the first event id, time and model; the prompt's ids as JSON without brackets; whether an
event named a role, gave a finish reason, or was for usage alone; whether the stream ended; where the event stands that
others will be like, without its line ends; and how many ids the prompt has."""
Take = Callable[[bytes, bool, str, int, bytearray], Whole | None]


def _nothing(data: bytes, chat: bool, name: str, created: int,  # noqa: ARG001 (the compiled one's names)
             log: bytearray) -> Whole | None:  # noqa: ARG001
    """Take ``data``, whole events of a stream or its rest, and note them in ``log``. None: nothing was done (here: ever).

    ``chat``: of which API. ``name`` and ``created``: of the events before; no name: there were none.
    """
    return None


take: Take = _nothing
try:
    from xpyd_sidecar.router.relay import _answer

    built.check("the shortcuts", _answer.REVISION, REVISION)
    take = _answer.take
except ImportError:  # not built, or for another machine: everything works without
    pass
