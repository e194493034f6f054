"""Choosing a pair: filters that make every candidate right, and then the policy.

Belongs here: who may serve a request at all (ready, same fingerprint, not tried before, model). Does not belong here: which
of the equal ones is best (``policies``).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role
from xpyd_sidecar.routing.policies import Policy, Query
from xpyd_sidecar.routing.roster import Member, Roster


class Target(msgspec.Struct, frozen=True):
    """Where a leg goes."""

    instance: InstanceName
    incarnation: Incarnation
    fingerprint: Fingerprint
    http: HostPort
    control: HostPort
    """KV control address of the chosen DP rank; empty where the instance has none."""
    dp_rank: int | None = None
    """Set where one HTTP server stands before several ranks: it is told by a header."""


class Pair(msgspec.Struct, frozen=True):
    """What a request gets."""

    decode: Target
    prefill: Target | None


class Picker:
    """Picks from a roster by a policy."""

    def __init__(self, roster: Roster, policy: Policy) -> None:
        self._roster = roster
        self._policy = policy

    def pair(self, prompt: msgspec.Raw, *, alone: bool, not_prefill: Collection[InstanceName] = (),
             not_decode: Collection[InstanceName] = ()) -> Pair | None:
        """A decode instance, and unless ``alone`` a prefill instance of its fingerprint.

        Decode instances that have a possible partner come first; where none has, ``prefill`` is None. None: nobody decodes.
        """
        decodes = [m for m in self._roster.pickable(Role.DECODE) if m.name not in not_decode]
        if not decodes:
            return None
        prefills = [] if alone else self._prefills(not_prefill)
        if prefills:
            kinds = {m.fingerprint for m in prefills}
            paired = [m for m in decodes if m.fingerprint in kinds and m.control]
            if paired:
                decode = self._choose(Role.DECODE, paired, len(prefills), prompt)
                prefill = self._partner(decode.fingerprint, prefills, len(paired), prompt)
                return Pair(self._target(decode), None if prefill is None else self._target(prefill))
        return Pair(self._target(self._choose(Role.DECODE, decodes, 1, prompt)), None)

    def prefill_for(self, prompt: msgspec.Raw, decode: Target, not_prefill: Collection[InstanceName] = ()) -> Target | None:
        """Another prefill instance for a request that waits on ``decode``."""
        found = self._partner(decode.fingerprint, self._prefills(not_prefill), 1, prompt) if decode.control else None
        return None if found is None else self._target(found)

    def why_not(self, role: Role) -> str:
        """Why nobody of a role can be picked."""
        return self._roster.why_not(role)

    def _prefills(self, but: Collection[InstanceName]) -> list[Member]:
        return [m for m in self._roster.pickable(Role.PREFILL) if m.control and m.name not in but]

    def _partner(self, fingerprint: Fingerprint, prefills: list[Member], partners: int,
                 prompt: msgspec.Raw) -> Member | None:
        equal = [m for m in prefills if m.fingerprint == fingerprint]
        return self._choose(Role.PREFILL, equal, partners, prompt) if equal else None

    def _choose(self, role: Role, candidates: list[Member], partners: int, prompt: msgspec.Raw) -> Member:
        if len(candidates) == 1:
            return candidates[0]
        return candidates[self._policy.choose(Query(role, candidates, partners, prompt))]

    def _target(self, member: Member) -> Target:
        rank = self._roster.next_rank(member)
        one_door = len(member.http) == 1 and len(member.control) > 1
        return Target(
            instance=member.name, incarnation=member.incarnation, fingerprint=member.fingerprint,
            http=member.http[rank % len(member.http)],
            control=member.control[rank % len(member.control)] if member.control else HostPort(""),
            dp_rank=rank if one_door else None)
