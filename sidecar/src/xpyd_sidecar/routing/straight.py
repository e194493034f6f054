"""The course that nearly every request takes, without deciding anything: an exchange is made once something else happens.

    both legs sent ──▶ prefill answered 200, decode's stream began ──▶ its proper end ──▶ over
         └──────────────────┴──────────────────────┴── whatever else ──▶ ``exchange``, which has heard all of that

Belongs here: noting how far a request is on this way, and what the exchange says there. Does not belong here: any other
way; ``exchange`` decides, and a test holds what is written here against it.
"""

from __future__ import annotations

import math
from operator import itemgetter

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.routing.exchange import Budget, Course, Exchange, Limits, Picks
from xpyd_sidecar.routing.moves import Answered, Begun, Complete, Instruction, Over, Relay, Send
from xpyd_sidecar.routing.pick import Pair

PREFILL, DECODE = 1, 2
"""Legs of the first pair."""
_BEGUN: list[Instruction] = [Relay(DECODE)]
_ENDED: list[Instruction] = [Complete(), Over("ok")]
NO_DEADLINE_S = 6.0
"""No deadline comes sooner on this way: limits that are shorter are minded by an exchange from the start."""


class Straight:
    """How far one request is."""

    __slots__ = ("_begun_at", "_pair", "_prefilled_at", "began")

    def __init__(self, now: float) -> None:
        self.began = now
        self._pair: Pair | None = None
        self._prefilled_at = math.nan
        self._begun_at = math.nan

    def start(self, pair: Pair, transfer: TransferId, limits: Limits) -> list[Instruction]:
        """The first legs; none where this is no straight course, and nothing has happened then."""
        prefill, decode = pair.prefill, pair.decode
        if prefill is None or prefill.p2p or decode.p2p or min(limits.request_s, limits.pair_s) < NO_DEADLINE_S:
            return []
        self._pair = pair
        left, first = round(limits.pair_s, 3), Attempt(1)
        peer = legs.Peer(decode.instance, decode.incarnation, decode.control)
        return [Send(PREFILL, Role.PREFILL, prefill, legs.Leg(legs.VERSION, Role.PREFILL, transfer, first, left, peer)),
                Send(DECODE, Role.DECODE, decode, legs.Leg(legs.VERSION, Role.DECODE, transfer, first, left, None))]

    def prefilled(self, now: float) -> None:
        """Prefill's leg was answered with 200: nothing follows."""
        self._prefilled_at = now

    def begun(self, now: float) -> list[Instruction]:
        """Decode's stream has begun, perhaps before prefill's answer was read. None where this is no straight course."""
        if self._pair is None:
            return []
        self._begun_at = now
        return _BEGUN

    def ended(self) -> list[Instruction]:
        """What follows from the proper end of that stream; none where prefill's leg is open: the exchange decides."""
        return [] if math.isnan(self._begun_at) or math.isnan(self._prefilled_at) else _ENDED

    def exchange(self, transfer: TransferId, picks: Picks, limits: Limits, budget: Budget, *, skips: str,
                 course: Course | None) -> Exchange:
        """One that has heard all of this."""
        made = Exchange(transfer, picks, limits, skips=skips, now=self.began, course=course, budget=budget)
        if self._pair is not None:
            made.started(self._pair, self.began)
            heard = ((self._prefilled_at, Answered(PREFILL, 200)), (self._begun_at, Begun(DECODE)))
            for at, event in sorted((one for one in heard if not math.isnan(one[0])), key=itemgetter(0)):
                made.handle(event, at)
        return made
