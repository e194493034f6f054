"""Whether a service is disaggregating: how many prompt tokens decode engines received as KV, and how many they computed.

Engines' counters come with heartbeats; the router counts what skips prefill by a rule. Pure: time is an argument.

    heartbeats ──update──▶ readings of each instance ──▶ sums of the last ``WINDOW_S`` ──judge──▶ Disaggregation

    share = received / (received + computed)       computed: without ``LEFT_OVER`` tokens for each load, and
                                                   without the share that skips prefill by a rule

Laws
  * Bounded: at most ``READINGS`` readings of each instance of the roster, and ``WINDOW_S`` sums of requests, one a second.
  * Counters are compared within one incarnation and one role of an engine: a first reading counts nothing.
  * Where no prefill instance can be picked, or none can pair with a decode instance, the service is not disaggregating,
    whatever traffic says. Else traffic decides; while there is too little, a verdict that traffic gave before stands.
  * While a verdict and its reason stay the same, message and numbers stay for ``KEPT_S``, so that a status that repeats
    them is not written every second.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Final, Literal

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.contract.intake import HARMLESS, Disaggregation, Intake, IntakeRates, LinkRate
from xpyd_sidecar.router.fleet.member import FleetMember

WINDOW_S: Final = 12.0
"""With a beat, a look and the operator's own time this is below 30 s."""
READINGS: Final = 16
GAP_S: Final = 1.0
"""Readings of one instance are at least so far apart."""
LOOK_S: Final = 0.5
KEPT_S: Final = 60.0
ENOUGH: Final = 0.9
"""Share of tokens, or of loads, below which it does not hold."""
LEFT_OVER: Final = 32
"""Tokens that a load may leave to be computed: the last block of a prompt."""
MIN_TOKENS: Final = 64
"""Fewer say nothing."""
_NAMED: Final = 3


class _Reading(msgspec.Struct, frozen=True):
    at: float
    intake: Intake


class _Tracked(msgspec.Struct):
    incarnation: Incarnation
    role: Role
    readings: deque[_Reading]
    best_bytes_s: float = 0.0
    known: Intake | None = None
    """``more``, where somebody has asked since the last reading."""

    @property
    def over_s(self) -> float:
        """Seconds from the first reading to the last; 0 where there is one."""
        return self.readings[-1].at - self.readings[0].at

    @property
    def more(self) -> Intake:
        """Growth of the counters from the first reading to the last."""
        if self.known is None:
            self.known = _grown(self.readings[0].intake, self.readings[-1].intake)
        return self.known


class _WindowSums(msgspec.Struct):
    """Sums over the window and all decode instances. ``received``, ``computed``: tokens; ``…_s``: tokens a second."""

    received: int = 0
    computed: int = 0
    loads: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    links: dict[str, float] = {}
    """Bytes a second."""
    received_s: float = 0.0
    computed_s: float = 0.0


class IntakeWindow:
    """Judges for one router whether its service is disaggregating. ``now`` is in seconds of the router's clock."""

    def __init__(self) -> None:
        self._seen: dict[InstanceName, _Tracked] = {}
        self._asked: deque[tuple[int, int, Counter[str]]] = deque(maxlen=int(WINDOW_S) + 1)
        """Second, tokens that came, and those of them that skip prefill, by reason."""
        self._told = Disaggregation()
        self._told_at = self._looked = float("-inf")

    @property
    def verdict(self) -> Disaggregation:
        """The verdict of the last ``update``."""
        return self._told

    # ---- events

    def on_opened(self, now: float, tokens: int, skipped: Counter[str]) -> None:
        """Count requests that came, with about ``tokens`` prompt tokens.

        ``skipped``: how many of these tokens skip prefill, by the rule or the request's field that is the cause.
        """
        second = int(now)
        if not self._asked or self._asked[-1][0] != second:
            self._asked.append((second, 0, Counter()))
        at, before, by = self._asked[-1]
        by.update(skipped)
        self._asked[-1] = (at, before + tokens, by)

    def update(self, now: float, members: Collection[FleetMember]) -> Disaggregation:
        """Read the counters of the latest heartbeats, and return the verdict; judges at most once in ``LOOK_S`` seconds.

        ``members``: all of the roster.
        """
        if now - self._looked < LOOK_S:
            return self._told
        self._looked = now
        self._take(members)
        while self._asked and self._asked[0][0] < now - WINDOW_S:
            self._asked.popleft()
        verdict = self._judge(members)
        same = (verdict.holds, verdict.reason) == (self._told.holds, self._told.reason)
        if not same or now - self._told_at >= KEPT_S:
            self._told, self._told_at = verdict, now
        return self._told

    def rates(self, name: InstanceName, incarnation: Incarnation) -> IntakeRates | None:
        """Return rates of one incarnation of an instance, over its last readings; None where there are less than two."""
        seen = self._seen.get(name)
        if seen is None or seen.incarnation != incarnation or not seen.over_s:
            return None
        over_s, more = seen.over_s, seen.more
        loads = dict(more.outcomes).get("ok", 0)
        return IntakeRates(
            received_s=round(more.received / over_s, 3), computed_s=round(_computed(more) / over_s, 3),
            cached_s=round(more.cached / over_s, 3), blocks_waiting=more.blocks_waiting,
            bytes_s=round(_bytes(more) / over_s, 1), best_bytes_s=round(seen.best_bytes_s, 1),
            wait_s=round(more.wait_s / loads, 6) if loads else 0.0, loads_s=round(loads / over_s, 4))

    # ---- readings

    def _take(self, members: Collection[FleetMember]) -> None:
        here = {member.name for member in members}
        for name in [name for name in self._seen if name not in here]:
            del self._seen[name]
        for member in members:
            intake, at = member.load.intake, member.beat_at
            seen = self._seen.get(member.name)
            if intake is None:
                self._seen.pop(member.name, None)
                continue
            if seen is None or (seen.incarnation, seen.role) != (member.incarnation, member.role) or (
                    seen.readings[-1].intake.prompts > intake.prompts):
                self._seen[member.name] = _Tracked(member.incarnation, member.role,
                                                deque([_Reading(at, intake)], maxlen=READINGS))
                continue
            last = seen.readings[-1]
            if at - last.at < GAP_S:
                continue
            seen.best_bytes_s = max(seen.best_bytes_s, (_bytes(intake) - _bytes(last.intake)) / (at - last.at))
            seen.readings.append(_Reading(at, intake))
            while len(seen.readings) > 2 and seen.readings[1].at <= at - WINDOW_S:
                seen.readings.popleft()
            seen.known = None

    def _sums(self) -> _WindowSums:
        sums = _WindowSums()
        for seen in self._seen.values():
            if seen.role is not Role.DECODE or not seen.over_s:
                continue
            more = seen.more
            ended = Counter(dict(more.outcomes))
            loads, computed = ended["ok"], _computed(more)
            sums.received += more.received
            sums.computed += max(0, computed - LEFT_OVER * loads)
            sums.loads += loads
            sums.failed.update({word: count for word, count in ended.items() if word not in HARMLESS and count})
            sums.received_s += more.received / seen.over_s
            sums.computed_s += computed / seen.over_s
            for link, size in more.links:
                sums.links[link] = sums.links.get(link, 0.0) + size / seen.over_s
        return sums

    # ---- the verdict

    def _judge(self, members: Collection[FleetMember]) -> Disaggregation:
        decodes = [one for one in members if one.role is Role.DECODE and one.pickable]
        prefills = [one for one in members if one.role is Role.PREFILL and one.pickable]
        sums, asked = self._sums(), sum(tokens for _, tokens, _ in self._asked)
        skipped = sum((by for _, _, by in self._asked), Counter[str]())
        part = min(1.0, sum(skipped.values()) / asked) if asked else 0.0
        due = max(0.0, sums.computed - part * (sums.received + sums.computed))
        share = sums.received / (sums.received + due) if sums.received + due >= MIN_TOKENS else None
        figures = Disaggregation(
            share=None if share is None else round(share, 2), skipped=round(part, 2),
            links=tuple(LinkRate(link, _three(size / 1e9)) for link, size in
                        sorted(sums.links.items(), key=itemgetter(1), reverse=True) if size),
            failed=tuple(sums.failed.most_common()), received_s=_three(sums.received_s), computed_s=_three(sums.computed_s))
        if not decodes:
            return _say(figures, "Unknown", "NoDecode", "no decode instance can be picked")
        if not prefills:
            there = [f"{one.name} {one.standing}" for one in members if one.role is Role.PREFILL]
            cause = f": {_list(there)}" if there else ": none is known to the router"
            return _say(figures, "False", "NoPrefill",
                        f"decode computes all prompts, since no prefill instance can be picked{cause}")
        if not _pairs(prefills, decodes):
            return _say(figures, "False", "NoPair", "decode computes all prompts, since no prefill and decode instance can "
                                                    "pair (see Compatible)")
        if all(one.load.intake is None for one in decodes):
            return _say(figures, "Unknown", "NotTold", "no decode instance tells what it receives: their agents or engines "
                                                       "are older, or not xpyd's")
        return self._by_traffic(figures, sums, share, skipped)

    def _by_traffic(self, figures: Disaggregation, sums: _WindowSums, share: float | None, skipped: Counter[str]
                    ) -> Disaggregation:
        failed = sum(sums.failed.values())
        rule = f"{figures.skipped:.0%} of the prompts' tokens skip prefill by rule ({_list(_by(skipped))})"
        if failed and failed > (1 - ENOUGH) * (failed + sums.loads):
            why = _list(_by(sums.failed))
            return _say(figures, "False", "LoadsFail", f"{failed} of {failed + sums.loads} loads failed ({why}), so that "
                                                       f"decode computes their prompts itself; {_share(figures)}")
        if figures.skipped >= ENOUGH and not sums.received:
            return _say(figures, "False", "SkippedByRule", f"{rule}, so that prefill has nothing to do")
        if share is None:
            stands = self._told.reason in {"Receiving", "LoadsFail", "SkippedByRule", "Computed"}
            return self._told if stands else _say(figures, "Unknown", "NoTraffic", "too few prompts have come to tell")
        more = f"; {rule}" if figures.skipped >= 0.01 else ""
        if share < ENOUGH:
            few = f"only {failed} of {failed + sums.loads} loads failed" if failed else "no load failed"
            return _say(figures, "False", "Computed", f"{_share(figures)}, though prefill can be picked and {few}{more}")
        return _say(figures, "True", "Receiving", f"{_share(figures)}{more}")


def _say(figures: Disaggregation, holds: Literal["True", "False", "Unknown"], reason: str, message: str) -> Disaggregation:
    return msgspec.structs.replace(figures, holds=holds, reason=reason, message=message)


def _share(figures: Disaggregation) -> str:
    links = ", ".join(f"{one.link} at {one.gb_s:g} GB/s" for one in figures.links)
    over = f" over {links}" if links else ""
    return "decode received none of the prompts' tokens" if not figures.share else (
        f"decode received {figures.share:.0%} of the prompts' tokens that it was to receive{over}")


def _grown(before: Intake, after: Intake) -> Intake:
    """Growth of the counters between two readings of one incarnation; a counter that fell counts as 0."""
    def less(kind: str) -> tuple[tuple[str, int], ...]:
        old = dict(getattr(before, kind))
        return tuple((word, max(0, count - old.get(word, 0))) for word, count in getattr(after, kind))

    return Intake(
        prompts=max(0, after.prompts - before.prompts), cached=max(0, after.cached - before.cached),
        received=max(0, after.received - before.received), outcomes=less("outcomes"), links=less("links"),
        refused=less("refused"), wait_s=max(0.0, after.wait_s - before.wait_s), blocks_waiting=after.blocks_waiting)


def _computed(more: Intake) -> int:
    """Prompt tokens that were neither cached nor received; at least 0, since a load is counted before its prompt."""
    return max(0, more.prompts - more.cached - more.received)


def _bytes(more: Intake) -> int:
    return sum(size for _, size in more.links)


def _pairs(prefills: Sequence[FleetMember], decodes: Sequence[FleetMember]) -> bool:
    """Whether some prefill and decode instance can pair: of one fingerprint, with control addresses, and not refused."""
    kinds = Counter(one.fingerprint for one in prefills if one.control)
    lives = {(one.name, one.incarnation): one.fingerprint for one in prefills if one.control}
    return any(kinds[one.fingerprint] > sum(lives.get((peer.instance, peer.incarnation)) == one.fingerprint
                                            for peer in one.refused)
               for one in decodes if one.control)


def _by(counts: Counter[str]) -> list[str]:
    return [f"{word}: {count}" for word, count in counts.most_common()]


def _list(words: list[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _three(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")
