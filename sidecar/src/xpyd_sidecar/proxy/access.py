"""The access log: one line for each request.

Belongs here: its logger, and what the line of a generation request says. Does not belong here: how lines leave (``logs``).
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache

import msgspec

from xpyd_sidecar import logs
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.routing.record import Record
from xpyd_sidecar.routing.straight_record import StraightRecord

access = logging.getLogger("xpyd_sidecar.access")


def line_of(record: Record) -> dict[str, object]:
    """The fields of a request that is over."""
    return {"request": record.request_id, "transfer": record.transfer, "api": record.api, "stream": record.stream,
            "status": record.status, "prefill": record.went(Role.PREFILL), "decode": record.went(Role.DECODE),
            "attempt": record.attempt, "skips": record.skips, "seconds": round(record.last_at - record.arrived, 4),
            "first_byte_s": None if math.isnan(record.first_at) else round(record.first_at - record.arrived, 4),
            "detail": record.detail}


def tell_straight(records: list[StraightRecord]) -> None:
    """Log some that went their straight course; their lines leave at once."""
    logs.tell_all(access, "ok", [(one.ended_unix, StraightLine(one)) for one in records])


class StraightLine(logs.Ready):
    """The same line, made at once where JSON is wanted."""

    __slots__ = ("_of",)

    def __init__(self, of: StraightRecord) -> None:
        self._of = of

    def __call__(self) -> dict[str, object]:
        """The fields."""
        return line_of(self._of.record())

    def json(self) -> bytes:
        """The fields as JSON, without braces."""
        of = self._of
        return b'"request":%b,"transfer":"%b","api":"%b",%b,"seconds":%b,"first_byte_s":%b,"detail":""' % (
            _encode(of.request_id), of.transfer.encode(), of.api.encode(), _between(of.prefill, of.decode),
            _encode(round(of.ended - of.arrived, 4)), _encode(round(of.begun - of.arrived, 4)))


@lru_cache(maxsize=1024)
def _between(prefill: str, decode: str) -> bytes:
    fields = {"stream": True, "status": 200, "prefill": prefill, "decode": decode, "attempt": 1, "skips": ""}
    return _encode(fields)[1:-1]


_encode = msgspec.json.Encoder().encode
