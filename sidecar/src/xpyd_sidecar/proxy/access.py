"""The access log: one line for each request.

Belongs here: its logger, and what the line of a generation request says. Does not belong here: how lines leave (``logs``).
"""

from __future__ import annotations

import logging
import math

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.routing.record import Record

access = logging.getLogger("xpyd_sidecar.access")


def line_of(record: Record) -> dict[str, object]:
    """The fields of a request that is over."""
    return {"request": record.request_id, "transfer": record.transfer, "api": record.api, "stream": record.stream,
            "status": record.status, "prefill": record.went(Role.PREFILL), "decode": record.went(Role.DECODE),
            "attempt": record.attempt, "skips": record.skips, "seconds": round(record.last_at - record.arrived, 4),
            "first_byte_s": None if math.isnan(record.first_at) else round(record.first_at - record.arrived, 4),
            "detail": record.detail}
