"""What policies know of candidates: how loaded each is, in requests and in tokens, what is usual among them, their order
by a key, and what they probably hold.

Tokens that are queued (``backlog``): what the engine has told with its last beat, less what it has computed since, and what
this router has sent since:

    max(0, told - rate * age) + sent           rate: tokens a second that it computed while some waited, by beats

Rendezvous hashing: several routers agree on an order of instances without talking to each other. Highest random weight
(Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): each instance has a weight for each key,
and the highest wins. An instance that comes or goes moves only the keys that it wins or won. The weight is the product of
the key and an odd constant of the instance, modulo 2**30 (multiply-shift hashing, Dietzfelbinger et al., 1997): one
multiplication of small integers an instance, so that 256 of them take microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.fleet.member import FleetMember

REFRESH = 16
"""The mean of n candidates is added up anew every n / ``REFRESH`` picks, so that its cost per pick does not grow with n."""
SORT_AFTER = 8
"""The first few of an order are found one by one, which is cheaper than sorting: hardly ever are more of them asked for."""
FEW_TOKENS = 1024
"""So many tokens that wait are never too many."""
UNTOLD = 1024
"""Tokens that a request counts for of which nobody tells them."""
_WEIGHT = (1 << 30) - 1


def score(member: FleetMember) -> int:
    """Requests on the instance.

    The last beat counts those of every router but is up to an interval old; what this router opened and closed since then
    is known exactly and is added. Never less than this router's own open legs. Legs that failed a short while ago count as
    if they were open still, or who fails at once would look idle.
    """
    reported = member.load.running + member.load.waiting
    return max(reported + member.in_flight - member.in_flight_at_beat, member.in_flight) + member.failed


def backlog(member: FleetMember, now: float) -> float:
    """Tokens of prompts that wait to be computed on the instance, about; those that are believed to be cached left out."""
    failed, prompts = UNTOLD * member.failed, member.load.prompts
    if prompts is not None:
        left = prompts.queued - member.computed_per_s * max(0.0, now - member.beat_at)
        return (max(0, left)) + member.sent_tokens + failed
    others = member.load.running + member.load.waiting - member.in_flight_at_beat
    return member.uncached_tokens + UNTOLD * (max(0, others)) + failed


class Mean:
    """Mean load of candidates, per role. Between two sums each pick adds its own."""

    def __init__(self) -> None:
        self._seen: dict[Role, tuple[Sequence[FleetMember], list[float]]] = {}

    def load_per_instance(self, role: Role, candidates: Sequence[FleetMember], load: Callable[[FleetMember], float] = score,
           own: float = 1) -> float:
        """Load per instance, the one that is being placed, of ``own``, included."""
        n = len(candidates)
        seen, state = self._seen.get(role, ((), []))
        if seen is candidates and state[1] > 0:
            state[0] += own / n
            state[1] -= 1
            return state[0]
        mean = (sum(map(load, candidates)) + own) / n
        if isinstance(candidates, tuple):  # a list may change
            self._seen[role] = (candidates, [mean, n // REFRESH])
        return mean


@lru_cache(maxsize=8192)
def name_key(name: str) -> int:
    """An odd number that every router makes of a name: an instance's constant, or the key of what is named so."""
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
            constants = [name_key(member.name) for member in candidates]
            if isinstance(candidates, tuple):  # a list may change
                self._seen[role] = (candidates, constants)
        key &= _WEIGHT
        return [key * constant & _WEIGHT for constant in constants]


MOST_NODES = 1 << 17
"""Nodes of one router, about 20 MB: as many as 16 instances tell of."""
MOST_INSTANCES = 1024
"""Instances that have a bit; beyond it the belief begins anew."""


class PrefixCacheIndex:
    """What each instance probably holds in its prefix cache, for both roles: a trie over the cuts of prompts.

    Every node of the trie is a prefix, known by its key (``PromptPrefix``); with it goes the set of instances that a prompt
    with this prefix was sent to, or that tell that they hold it (an instance is a bit). The first is a belief, which ends
    when an instance tells that it does not hold it (``tell``). Of those that tell nothing everything is forgotten in time:
    there are two generations of at most ``most`` / 2 nodes; the older one is dropped when the younger one is full, and what
    is used is moved to the younger one. An instance that was restarted is another one.
    """

    def __init__(self, most: int = MOST_NODES) -> None:
        self._half = max(1, most // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._counts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Nodes by bit, of the younger and the older generation."""
        self._bits: dict[tuple[InstanceName, Incarnation], int] = {}
        self.told = False
        """Whether instances tell what they hold."""
        self._given = 0
        """Bits that were given since the belief began."""
        self._seen: dict[Role, tuple[Sequence[FleetMember], int, dict[int, int]]] = {}

    def __len__(self) -> int:
        """Nodes."""
        return len(self._young) + len(self._old)

    def add(self, member: FleetMember, prefix: PromptPrefix) -> None:
        """A prompt was sent to an instance."""
        self._add(self._bit(member), [key for _, key in prefix.keys])

    def tell(self, member: FleetMember, added: Iterable[int], removed: Iterable[int], *, whole: bool = False) -> None:
        """An instance tells keys of what it holds, and of what it does not hold (any more). ``whole``: what was believed of
        it before does not count.
        """
        self.told = True
        if whole:
            self._bits.pop((member.name, member.incarnation), None)
        bit = self._bit(member)
        self._add(bit, added)
        for nodes, counts in zip((self._young, self._old), self._counts, strict=True):
            for key in removed:
                held = nodes.get(key, 0)
                if held & bit:
                    counts[bit] = max(0, counts.get(bit, 0) - 1)
                    nodes[key] = held & ~bit

    def _add(self, bit: int, keys: Iterable[int]) -> None:
        count = self._counts[0]
        for key in keys:
            held = self._young.get(key)
            if held is None:
                held = self._old.get(key, 0)
                if len(self._young) >= self._half:
                    self._old, self._young = self._young, {}
                    count = {}
                    self._counts = (count, self._counts[0])
            if not held & bit:
                count[bit] = count.get(bit, 0) + 1
            self._young[key] = held | bit

    def count(self, name: InstanceName, incarnation: Incarnation) -> int:
        """About how many prefixes an instance holds."""
        bit = self._bits.get((name, incarnation), 0)
        return sum(counts.get(bit, 0) for counts in self._counts)

    def holders(self, candidates: Sequence[FleetMember], prefix: PromptPrefix) -> tuple[list[tuple[int, int]], int]:
        """Who probably holds the most of a prompt: bytes and index of candidates, the longest first; and the common part.

        What more than half of the candidates hold (a system prompt, say) distinguishes nobody: its length is told apart,
        and those who hold no more than that are not listed. The list ends where less than half of the longest is held.
        """
        path = self._path(prefix)
        found: list[tuple[int, int]] = []
        if not path:
            return found, 0
        indices, most, seen = self._indices(candidates), len(candidates) // 2, 0
        for cut, held in reversed(path):
            new, seen = held & ~seen, seen | held
            group = []
            while new:
                bit = new & -new
                new ^= bit
                index = indices.get(bit)
                if index is not None:
                    group.append((cut, index))
            if len(found) + len(group) > most:
                return found, cut
            found += group
            if found and 2 * cut < found[0][0]:
                break
        return found, 0

    def holding(self, candidates: Sequence[FleetMember], prefix: PromptPrefix, least: float) -> list[tuple[int, int]]:
        """Bytes and index of decode instances that hold at least so much, and something, the longest first. Who was given a
        prompt has answered it, and holds its answer as well.
        """
        indices, seen, found = self._indices(candidates), 0, []
        for cut, held in reversed(self._path(prefix)):
            holds = prefix.with_answer(cut)
            if holds < least:
                break
            new, seen = held & ~seen, seen | held
            found += [(holds, index) for bit, index in indices.items() if new & bit] if new else []
        return found

    def held_bytes(self, member: FleetMember, prefix: PromptPrefix) -> int:
        """Bytes of a prompt that an instance probably holds; of those that it was sent before this prompt was looked up."""
        bit = self._bits.get((member.name, member.incarnation), 0)
        cut = next((cut for cut, mask in reversed(self._path(prefix)) if mask & bit), 0) if bit else 0
        return prefix.with_answer(cut) if member.role is Role.DECODE else cut

    def _path(self, prefix: PromptPrefix) -> list[tuple[int, int]]:
        """Bytes and the bits of those that hold them, the shortest first. Looked up once for a prompt."""
        if prefix.path is None:
            young, old = self._young, self._old
            prefix.path = [(cut, mask) for cut, key in prefix.keys if (mask := young.get(key, 0) or old.get(key, 0))]
        return prefix.path

    def _indices(self, candidates: Sequence[FleetMember]) -> dict[int, int]:
        """Bit → index. Remembered for the candidates seen last, since the roster gives the same object until it changes."""
        role = candidates[0].role
        seen = self._seen.get(role)
        if seen is not None and seen[0] is candidates and seen[1] == self._given:
            return seen[2]
        made = {bit: index for index, member in enumerate(candidates)
                if (bit := self._bits.get((member.name, member.incarnation)))}
        if isinstance(candidates, tuple) and len(candidates) > 1:  # a list may change
            self._seen[role] = (candidates, self._given, made)
        return made

    def _bit(self, member: FleetMember) -> int:
        who = (member.name, member.incarnation)
        bit = self._bits.get(who)
        if bit is None:
            if self._given >= MOST_INSTANCES:
                self._bits, self._young, self._old, self._seen = {}, {}, {}, {}
                self._counts, self._given = ({}, {}), 0
            bit = self._bits[who] = 1 << self._given
            self._given += 1
        return bit
