"""The access log: one line for each request."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from operator import attrgetter

import msgspec

from xpyd_sidecar import logs
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.observing.record import Record

access = logging.getLogger("xpyd_sidecar.access")


def line_of(record: Record) -> dict[str, object]:
    """The fields of a request that is over."""
    if not record.api:
        return {"request": record.request_id, "path": record.path, "status": record.status,
                "decode": record.went(Role.DECODE), "attempt": len(record.legs),
                "seconds": round(record.last_at - record.arrived, 4), "detail": record.detail}
    passed = {"path": record.path} if record.path else {}
    return {"request": record.request_id, "transfer": record.transfer, "api": record.api, "stream": record.stream,
            "status": record.status, "prefill": record.went(Role.PREFILL), "decode": record.went(Role.DECODE),
            "attempt": record.attempt, "skips": record.skips, "continued": record.continued,
            "seconds": round(record.last_at - record.arrived, 4),
            "first_byte_s": None if math.isnan(record.first_at) else round(record.first_at - record.arrived, 4),
            "detail": record.detail, **passed}


def passed_outcome(outcome: str, ended_as: str) -> str:
    """What ``xpyd_router_passed_requests_total`` calls the outcome of a request whose answer passes through.

    ``ended_as``: the result of the leg that answered, empty where none did.
    """
    if outcome == "ok":
        return "complete"
    if outcome in {"client_gone", "stopped"}:
        return "aborted"
    return "engine_error" if ended_as in {"4xx", "5xx", "aborted"} else outcome


def tell_straight(records: list[Record]) -> None:
    """Log some that went their straight course (prefill and decode answered well at once); their lines leave at once."""
    logs.tell_all(access, "ok", records, _Straight())


class _Straight:
    """``logs.Form``: the line of one that went its straight course."""

    at = attrgetter("ended_unix")
    fields = staticmethod(line_of)

    @staticmethod
    def json(one: Record) -> str:
        """The fields as JSON, without braces. No request id has what JSON escapes (``incoming.request_id_of``)."""
        arrived, (prefill, decode) = one.arrived, one.legs
        between = _between(one.api, prefill.instance, decode.instance)
        return (f'"request":"{one.request_id}","transfer":"{one.transfer}",{between},'
                f'"seconds":{one.last_at - arrived:.4f},"first_byte_s":{one.first_at - arrived:.4f},"detail":""')


@lru_cache(maxsize=1024)
def _between(api: str, prefill: str, decode: str) -> str:
    fields = {"api": api, "stream": True, "status": 200, "prefill": prefill, "decode": decode, "attempt": 1, "skips": "",
              "continued": 0}
    return _encode(fields).decode()[1:-1]


_encode = msgspec.json.Encoder().encode
