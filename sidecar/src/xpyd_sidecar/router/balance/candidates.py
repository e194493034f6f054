"""What policies know of candidates: how loaded each is, what is usual among them, their order by a key; and chance.

Rendezvous hashing: several routers agree on an order of instances without talking to each other. Highest random weight
(Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): each instance has a weight for each key,
and the highest wins. An instance that comes or goes moves only the keys that it wins or won. The weight is the product of
the key and an odd constant of the instance, modulo 2**30 (multiply-shift hashing, Dietzfelbinger et al., 1997): one
multiplication of small integers an instance, so that 256 of them take microseconds.

Random numbers: SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014): one addition and
three mixing steps a number, the same on every machine. Good enough to choose instances; never used for keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.fleet.member import FleetMember

REFRESH = 16
"""The mean of n candidates is added up anew every n / ``REFRESH`` picks, so that its cost per pick does not grow with n."""
SORT_AFTER = 8
"""The first few of an order are found one by one, which is cheaper than sorting: hardly ever are more of them asked for."""
_WEIGHT = (1 << 30) - 1
_MASK = (1 << 64) - 1


def score(member: FleetMember) -> int:
    """Requests on the instance.

    The last beat counts those of every router but is up to an interval old; what this router opened and closed since then
    is known exactly and is added. Never less than this router's own open legs.
    """
    reported = member.load.running + member.load.waiting
    return max(reported + member.in_flight - member.in_flight_at_beat, member.in_flight)


class Mean:
    """Mean score of candidates, per role. Between two sums each pick adds its own request."""

    def __init__(self) -> None:
        self._seen: dict[Role, tuple[Sequence[FleetMember], list[float]]] = {}

    def of(self, role: Role, candidates: Sequence[FleetMember]) -> float:
        """Requests per instance, the one that is being placed included."""
        n = len(candidates)
        seen, state = self._seen.get(role, ((), []))
        if seen is candidates and state[1] > 0:
            state[0] += 1 / n
            state[1] -= 1
            return state[0]
        mean = (sum(map(score, candidates)) + 1) / n
        if isinstance(candidates, tuple):  # a list may change
            self._seen[role] = (candidates, [mean, n // REFRESH])
        return mean


@lru_cache(maxsize=8192)
def _constant(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") & _WEIGHT | 1


class Rendezvous:
    """Orders candidates by a key. Remembers the constants of the candidates seen last, per role."""

    def __init__(self) -> None:
        self._seen: dict[Role, tuple[Sequence[FleetMember], list[int]]] = {}

    def order(self, role: Role, candidates: Sequence[FleetMember], key: int) -> Iterator[int]:
        """All indices, the winner first."""
        weights = self._weights(role, candidates, key)
        for _ in range(min(SORT_AFTER, len(weights))):
            index = weights.index(max(weights))
            yield index
            weights[index] = -1
        rest = [index for index, weight in enumerate(weights) if weight >= 0]
        yield from sorted(rest, key=weights.__getitem__, reverse=True)

    def _weights(self, role: Role, candidates: Sequence[FleetMember], key: int) -> list[int]:
        seen, constants = self._seen.get(role, ((), []))
        if seen is not candidates:
            constants = [_constant(member.name) for member in candidates]
            if isinstance(candidates, tuple):  # a list may change
                self._seen[role] = (candidates, constants)
        key &= _WEIGHT
        return [key * constant & _WEIGHT for constant in constants]


class Draw:
    """A stream of numbers that depends on nothing but its seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 random bits."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """A number in 0..n-1 (bias below n / 2**64)."""
        return (self.bits() * n) >> 64

    def two_below(self, n: int) -> tuple[int, int]:
        """Two different numbers in 0..n-1, for n of at least 2."""
        first = self.below(n)
        second = self.below(n - 1)
        return first, second + (second >= first)
