"""Names of transfers and how they end.

Belongs here: the key of one try of a transfer, the outcomes, and the bounded memory of what has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from xpyd_sidecar.contract.ids import Attempt, TransferId

K = TypeVar("K")
V = TypeVar("V")


class Key(NamedTuple):
    """One try of one transfer. Of two tries of a transfer the greater ``(attempt, generation)`` wins."""

    transfer: TransferId
    attempt: Attempt
    generation: int
    """Minted by prefill within one attempt, from 1."""

    @property
    def order(self) -> tuple[int, int]:
        """(attempt, generation), by which tries of one transfer are compared."""
        return self.attempt, self.generation

    def __str__(self) -> str:
        return f"{self.transfer}/{self.attempt}.{self.generation}"


class Outcome(StrEnum):
    """How a transfer ended; the ``outcome`` label of ``xpyd_kv_transfers``."""

    OK = "ok"
    DEADLINE = "deadline"
    """The counterpart did not come, or not everything arrived, in time."""
    CHECKSUM = "checksum"
    INCARNATION = "incarnation"
    """The address is held by another life of the peer."""
    INCOMPATIBLE = "incompatible"
    """Wire version, fingerprint or parallel sizes differ."""
    IDENTITY = "identity"
    """The two legs are not the same prompt."""
    AUTH = "auth"
    PROTOCOL = "protocol"
    PEER_LOST = "peer_lost"
    OVERFLOW = "overflow"
    """No room in time, for copies or for more peers and tries."""
    ABORTED = "aborted"
    """A leg ended before its part was done."""
    UNUSED = "unused"
    """Decode did not need it."""
    STALE = "stale"
    """A newer try has taken its place."""


class Recent(Generic[K, V]):
    """The last ``bound`` keys put, each with a value; the oldest are forgotten."""

    def __init__(self, bound: int = 4096) -> None:
        self._bound = bound
        self._items: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> None:
        """Store a value; ``key`` is the newest now, and the oldest key is forgotten where there are more than ``bound``."""
        self._items.pop(key, None)
        self._items[key] = value
        while len(self._items) > self._bound:
            self._items.popitem(last=False)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key. Where it is not remembered, ``make`` makes it, and it is the newest."""
        if key not in self._items:
            self.put(key, make())
        return self._items[key]

    def pop(self, key: K) -> V | None:
        """Forget a key. Returns the value that it had; None where it was not remembered."""
        return self._items.pop(key, None)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None where it is not remembered."""
        return self._items.get(key)

    def touch(self, key: K) -> V | None:
        """Return the value of a key, which is the newest from now on; None where it is not remembered."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)
