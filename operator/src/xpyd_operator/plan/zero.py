"""To no instances and back: when both roles go, what comes back, and what routers are told meanwhile. Pure.

    idle     for how long no router has had a request that generates; of all routers the least, and unknown where one does
             not tell or an engine has work
    gap      how long it was idle before, each time that it was so for ``idle_after`` at least
    cold     what a start takes

Laws
    1. Nothing goes before ``max(idle_after, WORTH x cold)`` of idle time: a shorter gap costs more than it saves (who buys
       when he has paid the price in rent pays at most twice what he would have, had he known).
    2. Nor while the gaps that were seen before, and lasted about as long as this one has, went on for less than ``WORTH``
       cold starts more: in the median, so that one odd gap decides nothing alone where there are several. A gap that ended
       so much earlier counts, too: what comes with a period may be late.
    3. Back is one of each role, within the limits; decode at least.
    4. Who has just been started is not given up before it could serve, as long as it is on its way: else a start that takes
       longer than clients wait would be begun again and again.
    5. What makes that nobody comes is told in words, and what is only waited for as well, but as something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.absent import Breakage, Waiting
from xpyd_operator.plan.conditions import shorten
from xpyd_operator.plan.counts import Counts, counts
from xpyd_operator.plan.observed import Instance
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.waking import WORDS_MAX, WakeCall

WORTH: Final = 3.0
"""Cold starts that a gap must last to be worth one."""
GAPS_MAX: Final = 32
"""Gaps that are remembered, the latest."""


class IdleHistory(msgspec.Struct, frozen=True):
    """What is known of one service. It may be lost: then the next gaps are learned anew."""

    last: float = 0.0
    """When a request was here last, unix seconds, as far as was told; 0: nothing was."""
    gaps: tuple[float, ...] = ()
    """Seconds, the latest last."""

    def with_request(self, idle_s: float, now: float, idle_after_s: float) -> IdleHistory:
        """The history after a router had a request ``idle_s`` before ``now``, unix seconds. What others had later stays."""
        last = now - idle_s
        if last <= self.last <= now:
            return self
        gap = last - self.last
        gaps = (*self.gaps, gap)[-GAPS_MAX:] if self.last and gap >= idle_after_s else self.gaps
        return IdleHistory(last, gaps)


def agreed_idle_s(answers: Iterable[Fleet | None]) -> float | None:
    """For how long no router has had a request; None: it is not known, or an engine has work. None among ``answers``: a
    router did not answer.
    """
    least: float | None = None
    for answer in answers:
        if answer is None or answer.idle_s is None or answer.draining:
            return None
        if any(one.in_flight or one.load.running or one.load.waiting or one.load.transfers for one in answer.instances):
            return None
        least = answer.idle_s if least is None else min(least, answer.idle_s)
    return least


def reason_to_stay(history: IdleHistory, idle_s: float, idle_after_s: float, cold_s: float) -> str:
    """Why instances stay that have been idle for so long, in words; empty: they go."""
    pays_s = WORTH * cold_s
    least_s = max(idle_after_s, pays_s)
    if idle_s < least_s:
        return f"idle for {idle_s:.0f} s of {least_s:.0f} s"
    more = [max(0.0, gap - idle_s) for gap in history.gaps if gap > idle_s - pays_s]
    if more and median(more) < pays_s:
        return f"after gaps like this one requests came within {median(more):.0f} s, and a start takes {cold_s:.0f} s"
    return ""


def comes_soon(instances: Iterable[Instance]) -> bool:
    """Whether no instance of decode serves, and one is on its way that is likely to come in the time that starts have."""
    decodes = [one for one in instances if one.role is Role.DECODE and not one.leaving]
    comes = any(isinstance(one.absence, Waiting) and one.absence.ends_soon for one in decodes)
    return comes and not any(one.ready for one in decodes)


def first_counts(service: DisaggService) -> Counts:
    """What is started when a request comes and nobody runs."""
    return counts(service, {Role.PREFILL: 1, Role.DECODE: 1})


def can_serve(service: DisaggService, wanted: Counts, instances: Sequence[Instance]) -> bool:
    """Whether requests can be served by those that are ready: decode, and prefill where decode must not serve alone."""
    ready = {one.role for one in instances if one.ready}
    alone = service.spec.router.on_no_prefill == "decode" or not wanted.prefill
    return wanted.decode > 0 and Role.DECODE in ready and (alone or Role.PREFILL in ready)


def wake_call(decode: int, instances: Sequence[Instance], held_up: str = "", failed: str = "") -> WakeCall:
    """What routers are told while nobody serves (``can_serve``).

    Args:
        decode: instances that are wanted.
        instances: that there are.
        held_up: why none can be made, as of a quota; empty where they can.
        failed: what went wrong in the last round, in words; it is tried again.
    """
    if decode < 1:
        return WakeCall(0, waits=_words(failed))
    coming = [one for one in instances if one.role is Role.DECODE and not one.leaving]
    if coming and all(one.ready for one in coming):  # it is prefill that is waited for
        coming = [one for one in instances if one.role is Role.PREFILL and not one.leaving]
    if not coming:
        return WakeCall(decode, refused=_words(held_up), waits=_words("" if held_up else failed))
    whys = [(one, one.absence) for one in coming]
    said = [f"{one.name}: {why.message}" for one, why in whys if isinstance(why, Breakage) and why.person]
    if len(said) == len(whys):
        return WakeCall(decode, refused=_words(said[0]))
    waits = next((f"{one.name}: {why.message}" for one, why in whys if why is not None and not isinstance(why, Breakage)),
                 "")
    return WakeCall(decode, waits=_words(waits))


def _words(text: str) -> str:
    return shorten(text, WORDS_MAX)
