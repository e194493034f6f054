"""What each instance probably holds in its prefix cache: a trie over the cuts of prompts, in bounded memory.

Every node of the trie is a prefix, known by its key (``PromptPrefix``); with it goes the set of instances that a prompt
with this prefix was sent to. It is a belief: engines evict without telling. So everything is forgotten in time: there are
two generations of at most ``most`` / 2 nodes; the older one is dropped when the younger one is full, and what is used is
moved to the younger one. An instance that was restarted is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.fleet.member import FleetMember

MOST_NODES = 1 << 16
"""Nodes of one router: about 10 MB."""
MOST_INSTANCES = 1024
"""Instances that have a bit; beyond it the belief begins anew."""


class Holdings:
    """Of one router, for both roles: an instance is a bit."""

    def __init__(self, most: int = MOST_NODES) -> None:
        self._half = max(1, most // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._counts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Nodes by bit, of the younger and the older generation."""
        self._bits: dict[tuple[InstanceName, Incarnation], int] = {}
        self._seen: dict[Role, tuple[Sequence[FleetMember], int, dict[int, int]]] = {}

    def __len__(self) -> int:
        """Nodes."""
        return len(self._young) + len(self._old)

    def add(self, member: FleetMember, prefix: PromptPrefix) -> None:
        """A prompt was sent to an instance."""
        bit = self._bit(member)
        count = self._counts[0]
        for _, key in prefix.keys:
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

    def longest(self, candidates: Sequence[FleetMember], prefix: PromptPrefix) -> list[tuple[int, int]]:
        """Bytes and index of every candidate that holds something, the longest first."""
        path = self._path(prefix)
        found: list[tuple[int, int]] = []
        for index, member in enumerate(candidates):
            bit = self._bits.get((member.name, member.incarnation), 0)
            held = next((cut for cut, mask in reversed(path) if mask & bit), 0)
            if held:
                found.append((held, index))
        found.sort(reverse=True)
        return found

    def _path(self, prefix: PromptPrefix) -> list[tuple[int, int]]:
        """Bytes and the bits of those that hold them, the shortest first."""
        young, old = self._young, self._old
        mask, path = -1, []
        for cut, key in prefix.keys:
            mask &= young.get(key, 0) or old.get(key, 0)
            if not mask:
                break
            path.append((cut, mask))
        return path

    def _indices(self, candidates: Sequence[FleetMember]) -> dict[int, int]:
        """Bit → index. Remembered for the candidates seen last, since the roster gives the same object until it changes."""
        role = candidates[0].role
        seen = self._seen.get(role)
        if seen is not None and seen[0] is candidates and seen[1] == len(self._bits):
            return seen[2]
        made = {bit: index for index, member in enumerate(candidates)
                if (bit := self._bits.get((member.name, member.incarnation)))}
        if isinstance(candidates, tuple) and len(candidates) > 1:  # a list may change
            self._seen[role] = (candidates, len(self._bits), made)
        return made

    def _bit(self, member: FleetMember) -> int:
        who = (member.name, member.incarnation)
        bit = self._bits.get(who)
        if bit is None:
            if len(self._bits) >= MOST_INSTANCES:
                self._bits, self._young, self._old, self._seen = {}, {}, {}, {}
                self._counts = ({}, {})
            bit = self._bits[who] = 1 << len(self._bits)
        return bit
