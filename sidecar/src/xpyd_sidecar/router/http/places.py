"""The places of a server's connections: who may have one, and who gives way when all are taken. Pure: time is an argument.

    enter ──▶ fresh ──claim──▶ busy ◀──wake / rest──▶ idle        leave: from anywhere
              no accepted       a request is          nothing is
              request yet       whole, or its         asked
                                body is wanted

Laws
  * When all places are taken, a fresh connection gives way, the oldest first, once it is ``GRACE_S`` old; where there is
    none, the one that has been idle for longest. A busy one never does; bytes that are no whole request make nobody busy.
  * Of one source at most ``per_source`` connections are fresh; a network of IPv6 that one customer has (/64) is one source.
    For one more the oldest of them gives way, once it is ``GRACE_S`` old; where none is, the new one is refused. So who
    shares an address with a stranger waits for a second, and is not locked out.
    Loopback addresses and trusted proxies, which speak for many, are not counted.
  * A key has at most ``per_key`` of the places; who claims one more stays what it was.
  * What is kept of a connection is gone when it leaves.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any, Protocol

import msgspec

GRACE_S = 1.0
"""How old a connection without an accepted request must be before it gives way."""
PER_SOURCE, PER_KEY = 8, 2
"""A source, and a key, may have all places divided by these."""
LEAST = 8
"""But never fewer places than these."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class PlaceHolder(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """Close: somebody else needs the place more."""


class ConnectionPlace(msgspec.Struct, eq=False):
    """What is known of a connection."""

    since: float
    """When it came, or fell idle."""
    source: str = ""
    """Where it is counted while it is fresh; empty: nowhere."""
    key: str = ""
    """Whose it is; empty: nobody's in particular."""
    fresh: bool = True


class ConnectionPlaces:
    """The connections of one server."""

    def __init__(self, most: int, trusted: tuple[str, ...] = ()) -> None:
        """``most``: places; ``trusted``: networks of proxies. Raises ValueError: one of them is no network."""
        self.most = most
        self._trusted = tuple(ipaddress.ip_network(each, strict=False) for each in trusted)
        self._of: dict[PlaceHolder, ConnectionPlace] = {}
        self._fresh: dict[PlaceHolder, ConnectionPlace] = {}
        self._idle: dict[PlaceHolder, ConnectionPlace] = {}
        """Both: those that came, or fell idle, first stand first."""
        self._sources: dict[str, dict[PlaceHolder, None]] = {}
        """The fresh ones of each source, those that came first first."""
        self._keys: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._of)

    @property
    def per_source(self) -> int:
        """Fresh connections that one source may have."""
        return max(LEAST, self.most // PER_SOURCE)

    @property
    def per_key(self) -> int:
        """Connections that one key may have."""
        return max(LEAST, self.most // PER_KEY)

    def enter(self, one: PlaceHolder, peer: Any, now: float) -> tuple[bool, PlaceHolder | None]:
        """A connection came. ``peer``: the name of its socket's other end.

        Returns whether it has a place (False: its source has too many fresh ones, all of which came just now), and who of
        its source gives way for it: that one has no place any more.
        """
        source = "" if not isinstance(peer, tuple) else source_of(str(peer[0]), self._trusted)
        oldest: PlaceHolder | None = None
        if source:
            fresh = self._sources.get(source, {})
            if len(fresh) >= self.per_source:
                oldest = next(iter(fresh))
                if now - self._of[oldest].since < GRACE_S:
                    return False, None
                self.leave(oldest)
            self._sources.setdefault(source, {})[one] = None
        self._of[one] = self._fresh[one] = ConnectionPlace(now, source)
        return True, oldest

    def source(self, one: PlaceHolder) -> str:
        """Where a connection came from; empty where that is of many, or it is gone."""
        place = self._of.get(one)
        return "" if place is None else place.source

    def claim(self, one: PlaceHolder, key: str) -> bool:
        """It brought an accepted request of ``key`` (empty: of everybody). False: that key has its share already."""
        place = self._of.get(one)
        if place is None:
            return True
        if key and key != place.key:
            count = self._keys.get(key, 0)
            if count >= self.per_key:
                return False
            self._keys[key] = count + 1
        if key != place.key:
            _less(self._keys, place.key)
            place.key = key
        if place.fresh:
            place.fresh = False
            del self._fresh[one]
            self._no_longer_fresh(one, place.source)
        return True

    def rest(self, one: PlaceHolder, now: float) -> None:
        """Nothing is asked on it any more; where that was so before, it has been idle since then."""
        place = self._of.get(one)
        if place is not None and not place.fresh and one not in self._idle:
            place.since = now
            self._idle[one] = place

    def wake(self, one: PlaceHolder) -> None:
        """A request is to be answered, or its body is."""
        self._idle.pop(one, None)

    def leave(self, one: PlaceHolder) -> None:
        """It is gone."""
        place = self._of.pop(one, None)
        if place is None:
            return
        self._idle.pop(one, None)
        if self._fresh.pop(one, None) is not None:
            self._no_longer_fresh(one, place.source)
        _less(self._keys, place.key)

    def _no_longer_fresh(self, one: PlaceHolder, source: str) -> None:
        fresh = self._sources.get(source)
        if fresh is not None:
            fresh.pop(one, None)
            if not fresh:
                del self._sources[source]

    def dispensable(self, now: float) -> PlaceHolder | None:
        """Who gives way first; None: everybody is busy, or came just now."""
        for one, place in self._fresh.items():
            if now - place.since >= GRACE_S:
                return one
            break
        return next(iter(self._idle), None)


def _less(counts: dict[str, int], name: str) -> None:
    if not name:
        return
    if counts[name] > 1:
        counts[name] -= 1
    else:
        del counts[name]


@lru_cache(maxsize=4096)
def source_of(host: str, trusted: tuple[Network, ...]) -> str:
    """What a connection from there is counted as; empty: it is not counted."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback or any(address in network for network in trusted):
        return ""
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
