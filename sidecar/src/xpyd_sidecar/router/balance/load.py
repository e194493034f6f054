"""How loaded an instance is, as far as it is known now; and what is usual among several."""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.fleet.roster import FleetMember

REFRESH = 16
"""The mean of n candidates is added up anew every n / ``REFRESH`` picks, so that its cost per pick does not grow with n."""


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
