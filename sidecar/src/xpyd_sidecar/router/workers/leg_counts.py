"""Open legs of a router of several processes, summed over its workers.

Law: an instance that drains never counts as free of legs before every worker has said that it knows of the drain. Until
then one of them may still pick it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable

from xpyd_sidecar.contract.ids import Incarnation, InstanceName

Key = tuple[InstanceName, Incarnation]


class LegCounts:
    """By worker and incarnation. ``index``: the number of what workers were told, counted up."""

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
