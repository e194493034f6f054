"""least_loaded: the less loaded of two drawn at random."""

from __future__ import annotations

from xpyd_sidecar.routing.draw import Draw
from xpyd_sidecar.routing.policies import NoOptions, Query, register
from xpyd_sidecar.routing.roster import Member


def score(member: Member) -> int:
    """Requests on the instance, as far as they are known now.

    The last beat counts those of every router but is up to an interval old; what this router opened and closed since then
    is known exactly and is added. Never less than this router's own open legs.
    """
    reported = member.load.running + member.load.waiting
    return max(reported + member.in_flight - member.in_flight_at_beat, member.in_flight)


@register("least_loaded")
class LeastLoaded:
    """Power of two choices (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).

    Taking the least loaded of all would send every router's next requests to the same instance until the next beat (a
    herd); two random ones keep the load almost as even without that. Ties go to the first drawn, which is random.
    """

    def __init__(self, seed: int, _: NoOptions) -> None:
        self._draw = Draw(seed)

    def choose(self, query: Query) -> int:
        """Index of the chosen one."""
        n = len(query.candidates)
        if n == 1:
            return 0
        first, second = self._draw.two_below(n)
        return second if score(query.candidates[second]) < score(query.candidates[first]) else first
