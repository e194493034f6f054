"""Which names a request may ask for: models, and what instances answer to besides (LoRA adapters, further served names).

A further name counts once a pair has it: a prefill and a decode instance of one fingerprint, or a decode instance where
there is no prefill at all. While nobody takes new legs, all are asked: such a request waits like others, it is not of an
unknown model. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xpyd_sidecar.contract.ids import Fingerprint, Role
from xpyd_sidecar.router.fleet.member import FleetMember


class ServedNames:
    """Of a roster as it is now."""

    def __init__(self, members: Collection[FleetMember], ready: Sequence[FleetMember]) -> None:
        """``ready``: those that take new legs."""
        named = [member for member in members if member.model]
        models = {member.model for member in named}
        further = of_pairs(ready or named) - models
        self.listed = (*sorted(models), *sorted(further))
        """Models first."""
        self.all = frozenset(models | further)
        self._everywhere = frozenset.intersection(*(one.names for one in ready)) if ready else frozenset()

    def partly(self, name: str) -> bool:
        """Whether not all that take new legs answer to it, though a pair does."""
        return name not in self._everywhere and name in self.all


def of_pairs(members: Sequence[FleetMember]) -> set[str]:
    """Names that a prefill and a decode instance of one fingerprint have; those of decode, where there is no prefill."""
    prefill: dict[Fingerprint, set[str]] = {}
    for member in members:
        if member.role is Role.PREFILL:
            prefill.setdefault(member.fingerprint, set()).update(member.names)
    found: set[str] = set()
    for member in members:
        if member.role is Role.DECODE:
            found |= member.names & prefill.get(member.fingerprint, set()) if prefill else member.names
    return found
