"""Rendezvous hashing: several routers agree on an order of instances without talking to each other.

Highest random weight (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): each instance has
a weight for each key, and the highest wins. An instance that comes or goes moves only the keys that it wins or won.

The weight is the product of the key and an odd constant of the instance, modulo 2**30 (multiply-shift hashing,
Dietzfelbinger et al., 1997): one multiplication of small integers an instance, so that 256 of them take microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.fleet.roster import Member

_MASK = (1 << 30) - 1
SORT_AFTER = 8
"""The first few of an order are found one by one, which is cheaper than sorting: hardly ever are more of them asked for."""


@lru_cache(maxsize=8192)
def _constant(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") & _MASK | 1


class Rendezvous:
    """Orders candidates by a key. Remembers the constants of the candidates seen last, per role."""

    def __init__(self) -> None:
        self._seen: dict[Role, tuple[Sequence[Member], list[int]]] = {}

    def best(self, role: Role, candidates: Sequence[Member], key: int) -> int:
        """Index of the winner."""
        weights = self._weights(role, candidates, key)
        return weights.index(max(weights))

    def order(self, role: Role, candidates: Sequence[Member], key: int) -> Iterator[int]:
        """All indices, the winner first."""
        weights = self._weights(role, candidates, key)
        for _ in range(min(SORT_AFTER, len(weights))):
            index = weights.index(max(weights))
            yield index
            weights[index] = -1
        rest = [index for index, weight in enumerate(weights) if weight >= 0]
        yield from sorted(rest, key=weights.__getitem__, reverse=True)

    def _weights(self, role: Role, candidates: Sequence[Member], key: int) -> list[int]:
        seen, constants = self._seen.get(role, ((), []))
        if seen is not candidates:
            constants = [_constant(member.name) for member in candidates]
            if isinstance(candidates, tuple):  # a list may change
                self._seen[role] = (candidates, constants)
        key &= _MASK
        return [key * constant & _MASK for constant in constants]
