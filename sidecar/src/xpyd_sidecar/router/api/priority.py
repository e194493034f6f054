"""Priority of a request, as its client asks for it: the header X-Vllm-Priority, else the field ``priority``, else 0.
Lower runs sooner, as in vLLM.

The value is clamped to the band of the client's key before it is used: in the router's queue, where priority orders the
requests of one key alone, and in engines, which compare it over all keys (``--scheduling-policy priority``).

    one key, or none    -8 … 8      all requests have one owner
    several keys         0 … 8      a client may put its work behind that of others, never before it
    keys of tenants     within -8 … 8, as the tenant's ``priority`` says (``contract.tenants``)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.faults import bad_request

PRIORITY = b"x-vllm-priority"
FIELD = "priority"
PRIORITIES = 8
"""Priorities beyond ± this count as this."""


class PriorityBand(NamedTuple):
    """The least and the greatest priority that requests may have; both are allowed."""

    least: int
    most: int

    def clamp(self, priority: int) -> int:
        """Return the priority within the band that is nearest to ``priority``."""
        return max(self.least, min(self.most, priority))


OWN = PriorityBand(-PRIORITIES, PRIORITIES)
"""Of a key that no other is beside."""
SHARED = PriorityBand(0, PRIORITIES)
"""Of one of several keys."""

_whole = msgspec.json.Decoder(int | None).decode


def priority_of(headers: Mapping[bytes, bytes], fields: Mapping[str, Raw], band: PriorityBand) -> int:
    """Return the priority of a request, clamped to ``band``. Raises HttpFault: 400, header or field is no whole number."""
    header = headers.get(PRIORITY)
    if header is None:
        return band.clamp(_field(fields[FIELD]) or 0) if FIELD in fields else 0
    try:
        return band.clamp(int(header))
    except ValueError:
        raise bad_request(f"the header X-Vllm-Priority must be a whole number, not {header!r}") from None


def clamp_field(fields: dict[str, Raw], band: PriorityBand) -> bool:
    """Clamp the field ``priority`` in ``fields``, and return whether it was changed.

    Raises HttpFault: 400, it is no whole number.
    """
    if FIELD not in fields:
        return False
    asked = _field(fields[FIELD])
    if asked is None or asked == (clamped := band.clamp(asked)):
        return False
    fields[FIELD] = Raw(b"%d" % clamped)
    return True


def _field(raw: Raw) -> int | None:
    try:
        asked: int | None = _whole(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"{FIELD!r}: {error}", param=FIELD) from None
    return asked
