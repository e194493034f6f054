"""What routers tell each other of their tenants, through agents: in acknowledgements, from there in beats to all routers.

Words are of one router at one time; of a tenant, how many tokens a minute its requests want there, refused ones included,
and how many of today it has given out. A router tells of at most ``MAX_TOLD`` tenants at a time, of others later.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_TOLD: Final = 128
"""Tenants that one router tells of at a time."""
MAX_CARRIED: Final = 512
"""Tenants that one beat tells of, those of all routers together."""
MAX_DEMANDING: Final = 64
"""Routers that one beat tells of."""
Amount = Annotated[int, msgspec.Meta(ge=0, le=10**18)]


class TenantDemand(msgspec.Struct, frozen=True, array_like=True):
    """Of one tenant at one router."""

    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    wanted: Amount
    """Tokens a minute, on average over the last seconds."""
    today: Amount
    """Tokens given out since 00:00 UTC."""


class RouterDemand(msgspec.Struct, frozen=True, array_like=True):
    """Of one router."""

    router: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    at: Amount
    """By its clock, milliseconds since 1970: what is older than what is known says nothing."""
    tenants: Annotated[tuple[TenantDemand, ...], msgspec.Meta(max_length=MAX_TOLD)] = ()


def newest_demands(said: tuple[RouterDemand, ...]) -> tuple[RouterDemand, ...]:
    """What a beat tells of that which routers said: each has the same room, its first words go first."""
    some = tuple(sorted(said, key=lambda one: one.router))[:MAX_DEMANDING]
    most = MAX_CARRIED // max(1, len(some))
    return tuple(one if len(one.tenants) <= most else msgspec.structs.replace(one, tenants=one.tenants[:most])
                 for one in some)
