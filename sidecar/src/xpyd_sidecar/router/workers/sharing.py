"""What the workers of a router share: its port, its bounds, and how many legs are open on an instance."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Iterable

import msgspec

from xpyd_sidecar import listening
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, join_host_port
from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.errors import ConfigError


def share(router: RouterConfig, count: int) -> RouterConfig:
    """The settings of one worker: bounds of the whole router are divided, rounded up."""
    def part(value: int) -> int:
        return -(-value // count)
    return msgspec.structs.replace(
        router, workers=1, max_in_flight=part(router.max_in_flight), queue_size=part(router.queue_size),
        max_per_instance=part(router.max_per_instance), body_budget_bytes=part(router.body_budget_bytes))


def reserve(host: str, port: int) -> socket.socket:
    """Keep the port for the workers. It must be nobody's: SO_REUSEPORT would share it with another router in silence.
    Raises ConfigError: it is taken, or the address cannot be bound.
    """
    address = listening.bound(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as alone:
            listening.both_families(alone, host)
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((address, port))
            alone.listen(1)
            port = alone.getsockname()[1]
        reserved = socket.socket(family)
        listening.both_families(reserved, host)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, port))
    except OSError as error:
        where = join_host_port(host, port)
        raise ConfigError(f"router.port: cannot listen on {where}: {error.strerror or error}") from None
    return reserved


Key = tuple[InstanceName, Incarnation]


class LegCounts:
    """Open legs by worker and incarnation, summed over the workers. ``index``: the number of what workers were told.

    Law: an instance that drains never counts as free of legs before every worker has said that it knows of the drain. Until
    then one of them may still pick it.
    """

    def __init__(self) -> None:
        self._legs: dict[int, dict[Key, int]] = {}
        self._applied: dict[int, int] = {}
        """By worker: the last of what it was told that it has applied. A worker that has ended holds nothing up."""
        self._drains: dict[Key, int] = {}
        """Since when workers are told that an incarnation drains."""

    def begin(self, worker: int) -> None:
        """A worker begins: it has no legs and knows nothing."""
        self._legs[worker], self._applied[worker] = {}, 0

    def end(self, worker: int) -> None:
        """A worker has ended, and its legs with it."""
        self._legs.pop(worker, None)
        self._applied.pop(worker, None)

    def report(self, worker: int, applied: int, legs: Iterable[tuple[InstanceName, Incarnation, int]]) -> list[Key]:
        """What a worker says of its legs; whose counts may be others now. Of one that has ended nothing counts."""
        if worker not in self._applied:
            return []
        news = applied > self._applied[worker]
        self._applied[worker] = applied
        known, changed = self._legs[worker], []
        for name, incarnation, count in legs:
            changed.append((name, incarnation))
            if count:
                known[name, incarnation] = count
            else:
                known.pop((name, incarnation), None)
        return changed + (list(self._drains) if news else [])

    def drains(self, key: Key, index: int) -> None:
        """Workers are told with ``index`` that it drains, or were told before."""
        self._drains.setdefault(key, index)

    def serves(self, key: Key) -> None:
        """It does not drain."""
        self._drains.pop(key, None)

    def keep(self, here: Collection[Key]) -> None:
        """Forget the drains of all others."""
        self._drains = {key: index for key, index in self._drains.items() if key in here}

    def of(self, key: Key) -> int:
        """Open legs; at least one where a worker may still pick what drains."""
        legs = sum(known.get(key, 0) for known in self._legs.values())
        return max(legs, 1) if key in self._drains and self.applied() < self._drains[key] else legs

    def applied(self) -> int:
        """What every worker has applied of what they were told; a great number where there is none."""
        return min(self._applied.values(), default=sys.maxsize)
