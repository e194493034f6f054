"""Prefill's worker side: what there is of each try in the store, who is told of it, and when a copy is not needed any more.

Laws
1. A manifest is freed once: when as many takers as its try has said TAKEN to it, or when the try has ended. Nothing else
   frees it, and no session that ends. Where this side ends the try, takers that were told of it may be reading it until
   they have answered GONE with CANCEL, or their session has ended: it is not freed before. Who does not answer in
   ``send_s`` loses the session.
2. A taker is told of a manifest only after it has asked for the try, once in a session; of what it has not taken it is told
   again in the next session of the same rank that asks.
3. Every try that was begun ends once, with one PublishEnded; who asks for an ended one is answered with GONE.
4. Until all takers have asked, copies wait for them ``keep_s`` after the last of them, or after the last word of work that
   grows. From then on a try lasts while there is news: a copy, TAKEN, a word of work or of a fetch that goes on. Without
   any for ``send_s`` (of the time in which this side listens) it ends, and always after ``limit_s``.
5. Where decode has more ranks, several take from this one, and each ASK says how many. A try ends ok when all have said
   DONE; one that wants nothing need not, and is told of the end. A taker whose session has ended and that does not ask
   again within ``grace_s`` ends it, but not one that wants nothing, or has said DONE.
6. A manifest that decode is too busy for is pressed again, no sooner than decode has said.

    (unknown) ──begin, copy──▶ KEPT ──every taker has asked──▶ ASKED ──every taker is done──▶ ended ok
        │ ask: remembered        └── release, keep_s over ──────┴── cancel, release, silence, grace over ──▶ ended otherwise

    a manifest, for each taker:   told ──▶ taken          told ──pressed──▶ taken | busy ──later──▶ pressed
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease, ListeningClock
from xpyd_sidecar.kv.manifests import Ask, Manifest

C = TypeVar("C")
EARLY_MAX: Final = 4096
"""Tries that were asked for and have not begun."""
TAKERS_MAX: Final = 1024
"""Of one try: ranks of a decode engine."""


class Tell(NamedTuple):
    """Send a manifest over a session, and its sums as soon as there are some."""

    link: int
    key: Key
    manifest: Manifest


class Press(NamedTuple):
    """Have decode take a manifest that it was told of, although it has no blocks for it: the store is short."""

    link: int
    key: Key
    number: int


class FreeCopy(NamedTuple, Generic[C]):
    """A copy is not needed any more."""

    data: C


class RefuseTry(NamedTuple):
    """Answer GONE on a session."""

    link: int
    key: Key
    outcome: Outcome
    reason: str
    retry: bool
    ended: bool = False
    """It had ended before it was asked for."""


class PublishEnded(NamedTuple):
    """A try is over on this rank. ``confirmed``: every taker has all that it wanted."""

    key: Key
    outcome: Outcome
    reason: str
    confirmed: bool


class EndSession(NamedTuple):
    """Nothing of a session may be read any more: its taker does not answer GONE."""

    link: int


Step = Tell | Press | FreeCopy[C] | RefuseTry | PublishEnded | EndSession


@dataclass
class Taker:
    """A rank of decode that takes from a try. ``link``: its session; None since that has ended."""

    link: int | None
    ask: Ask
    done: bool = False


@dataclass
class PublishedManifest(Generic[C]):
    """A manifest that is not freed. ``taken``: by whom."""

    manifest: Manifest
    data: C
    size: int
    taken: set[Incarnation] = field(default_factory=set)
    pressed: bool = False


@dataclass
class LeavingTry(Generic[C]):
    """A try that this side has ended. ``readers``: by taker, the session in which it has still to answer GONE."""

    readers: dict[Incarnation, int]
    copies: list[C] = field(default_factory=list)
    lease: Lease | None = None
    """Until when they may answer, in the time in which this side listens."""


@dataclass
class OpenTry(Generic[C]):
    """One try that is being published: its manifests and takers."""

    lease: Lease
    """Until when it may wait for news: by the clock until all have asked, then by the time in which this side listens."""
    ends: Lease | None = None
    """By the clock, once all have asked: the bound of the whole."""
    news: bool = False
    """There was some since the last look."""
    next: int = 0
    """Number of the next manifest."""
    open: OrderedDict[int, PublishedManifest[C]] = field(default_factory=OrderedDict)
    takers: dict[Incarnation, Taker] = field(default_factory=dict)
    alone: dict[Incarnation, Lease] = field(default_factory=dict)
    """Takers without a session: until when they may ask again."""
    quiet_until: float = 0.0

    @property
    def takers_expected(self) -> int:
        """How many takers there are to be; 0: nobody has said."""
        return next(iter(self.takers.values())).ask.takers if self.takers else 0

    @property
    def asked(self) -> bool:
        """Whether every taker has asked."""
        return bool(self.takers) and len(self.takers) == self.takers_expected


class Publishing(Generic[C]):
    """The machine. ``link`` numbers name sessions; the owner never uses one twice."""

    def __init__(self, *, keep_s: float, send_s: float, grace_s: float, limit_s: float = math.inf) -> None:
        self._keep_s = keep_s
        self._send_s = send_s
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._listened = ListeningClock(send_s)
        self._open: dict[Key, OpenTry[C]] = {}
        self._early: OrderedDict[Key, dict[Incarnation, Taker]] = OrderedDict()
        self._leaving: dict[Key, LeavingTry[C]] = {}
        self._ended: Recent[Key, tuple[Outcome, str, bool]] = Recent()
        self.pressed_bytes = 0
        """Of manifests that decode has been pressed for and has not answered."""

    @property
    def open(self) -> int:
        """Tries begun and not ended."""
        return len(self._open)

    def __contains__(self, key: object) -> bool:
        """Whether a try was begun and has not ended."""
        return key in self._open

    def busy(self, link: int) -> bool:
        """Whether a session has tries of which it has not said DONE, those included that have not begun."""
        tries = (*(one.takers for one in self._open.values()), *self._early.values())
        return any(taker.link == link and not taker.done for takers in tries for taker in takers.values()) or any(
            link in one.readers.values() for one in self._leaving.values())

    def publish(self, key: Key, manifest: Callable[[int], Manifest], copy: tuple[C, int], now: float) -> list[Step[C]]:
        """A copy is there; the first one begins the try.

        Args:
            key: of the try.
            manifest: makes what is told of it, of its number.
            copy: what is to be freed, and what it weighs in bytes.
            now: by the clock.
        """
        data, size = copy
        if key in self._ended:
            return [FreeCopy(data)]
        out: list[Step[C]] = []
        one = self._open.get(key)
        if one is None:
            one = self._open[key] = OpenTry(Lease.start(now, self._keep_s))
            for taker, known in self._early.pop(key, {}).items():
                if key in self._open:
                    out += self._join(key, one, taker, known, now)
                elif known.link is not None:
                    out.append(RefuseTry(known.link, key, Outcome.PROTOCOL, "others asked for it otherwise", False))
            if key not in self._open:
                return [*out, FreeCopy(data)]
        published = PublishedManifest(manifest(one.next), data, size)
        one.next += 1
        one.open[published.manifest.number] = published
        one.news = True
        if not one.asked:
            self._renew(one, now)
        published.taken.update(name for name, taker in one.takers.items() if taker.ask.nothing or taker.done)
        if self._is_free(one, published):
            del one.open[published.manifest.number]
            return [*out, FreeCopy(data)]
        return [*out, *(Tell(taker.link, key, published.manifest) for name, taker in one.takers.items()
                        if taker.link is not None and name not in published.taken)]

    def ask(self, link: int, taker: Incarnation, key: Key, ask: Ask, now: float) -> list[Step[C]]:
        """A rank of decode asks for a try, perhaps again over a new session."""
        if key in self._ended:
            outcome, reason, retry = self._ended.get(key) or (Outcome.STALE, "ended", False)
            return [RefuseTry(link, key, outcome, reason, retry, ended=True)]
        one = self._open.get(key)
        if one is not None:
            return self._join(key, one, taker, Taker(link, ask), now)
        early = self._early.setdefault(key, {})
        early[taker] = Taker(link, ask, taker in early and early[taker].done)
        if len(self._early) <= EARLY_MAX:
            return self._end_early_if_done(key)
        old, takers = self._early.popitem(last=False)
        reason = "too many transfers asked for ahead"
        return [RefuseTry(each.link, old, Outcome.OVERFLOW, reason, False) for each in takers.values()
                if each.link is not None]

    def _join(self, key: Key, one: OpenTry[C], name: Incarnation, taker: Taker, now: float) -> list[Step[C]]:
        """A taker has asked; what it says must go with what others have said."""
        link, ask = taker.link, taker.ask
        known = one.takers.get(name)
        wanted = one.takers_expected or ask.takers
        if not 1 <= ask.takers <= TAKERS_MAX or ask.takers != wanted or (known is None and len(one.takers) >= wanted):
            reason = f"asked for as one of {ask.takers}, where {len(one.takers)} of {wanted} have"
            told: list[Step[C]] = [] if known is not None or link is None else [
                RefuseTry(link, key, Outcome.PROTOCOL, reason, False)]
            return [*told, *self._fail(key, Outcome.PROTOCOL, reason)]
        if known is not None and known.link == link:
            return self._fail(key, Outcome.PROTOCOL, "asked for twice")
        before = one.asked
        one.takers[name] = Taker(link, ask, taker.done or (known is not None and known.done))
        one.alone.pop(name, None)
        one.news = one.news or before
        if one.asked and not before:
            one.ends = one.ends or Lease.start(now, self._limit_s)
            self._renew(one, now)
        out: list[Step[C]] = []
        for published in list(one.open.values()):
            if ask.nothing:
                out += self._take(one, name, published)
            elif name not in published.taken and link is not None:
                out.append(Tell(link, key, published.manifest))
        return [*out, *self._end_if_done(key, one)]

    def on_taken(self, link: int, taker: Incarnation, key: Key, number: int) -> list[Step[C]]:
        """A taker has a manifest's bytes in its own memory, or does not want them."""
        one = self._open.get(key)
        if one is None or not self._is_of(one, taker, link):
            return []
        published = one.open.get(number)
        if published is None or taker in published.taken:
            return []
        one.news = True
        return self._take(one, taker, published)

    def _take(self, one: OpenTry[C], taker: Incarnation, published: PublishedManifest[C]) -> list[Step[C]]:
        published.taken.add(taker)
        self._unpress(published)
        if not self._is_free(one, published):
            return []
        del one.open[published.manifest.number]
        return [FreeCopy(published.data)]

    @staticmethod
    def _is_free(one: OpenTry[C], published: PublishedManifest[C]) -> bool:
        """Whether all takers that there are to be have taken it."""
        return bool(one.takers_expected) and len(published.taken) >= one.takers_expected

    def on_progress(self, key: Key) -> None:
        """The engine says that its work for a try has grown, or decode that a fetch goes on."""
        one = self._open.get(key)
        if one is not None:
            one.news = True

    def press(self, want: int, now: float) -> list[Step[C]]:
        """Have decode take ``want`` bytes of what it was told of and has not taken, of the oldest tries first."""
        out: list[Step[C]] = []
        for key, one in self._open.items():
            if now < one.quiet_until or all(taker.link is None for taker in one.takers.values()):
                continue
            for published in one.open.values():
                if want <= 0:
                    return out
                told = [taker.link for name, taker in one.takers.items()
                        if taker.link is not None and name not in published.taken]
                if published.pressed or not told:
                    continue
                published.pressed = True
                self.pressed_bytes += published.size
                want -= published.size
                out += [Press(link, key, published.manifest.number) for link in told]
        return out

    def on_busy(self, link: int, taker: Incarnation, key: Key, number: int, until: float) -> None:
        """Decode has no room for a manifest now: nothing of its try is pressed again before ``until``."""
        one = self._open.get(key)
        if one is not None and self._is_of(one, taker, link) and (published := one.open.get(number)) is not None:
            self._unpress(published)
            one.quiet_until = max(one.quiet_until, until)

    def _unpress(self, published: PublishedManifest[C]) -> None:
        if published.pressed:
            published.pressed = False
            self.pressed_bytes -= published.size

    def on_done(self, link: int, taker: Incarnation, key: Key) -> list[Step[C]]:
        """A taker has all that it wanted of a try, and it is right."""
        one = self._open.get(key)
        if one is None:
            early = self._early.get(key, {})
            if taker not in early or early[taker].link != link:
                return []
            early[taker].done = True  # it had all of another try
            return self._end_early_if_done(key)
        if not self._is_of(one, taker, link):
            return []
        one.takers[taker].done = True
        one.news = True
        out: list[Step[C]] = []
        for published in list(one.open.values()):
            if taker not in published.taken:
                out += self._take(one, taker, published)
        return [*out, *self._end_if_done(key, one)]

    def _end_early_if_done(self, key: Key) -> list[Step[C]]:
        """A try that has not begun ends if nobody wants it any more."""
        takers = self._early[key]
        if len(takers) < next(iter(takers.values())).ask.takers or not any(one.done for one in takers.values()) or not all(
                one.done or one.ask.nothing for one in takers.values()):
            return []
        del self._early[key]
        return [*self._told_of_end(key, takers), *self._end(key, Outcome.OK, "", confirmed=True)]

    @staticmethod
    def _told_of_end(key: Key, takers: Mapping[Incarnation, Taker]) -> Iterator[Step[C]]:
        """Who wants nothing of a try is told that the others have what they wanted."""
        return (RefuseTry(taker.link, key, Outcome.OK, "all have what they wanted", False)
                for taker in takers.values() if not taker.done and taker.link is not None)

    def _end_if_done(self, key: Key, one: OpenTry[C]) -> list[Step[C]]:
        some = [taker for taker in one.takers.values() if not taker.ask.nothing]
        if one.asked and all(taker.done for taker in some or one.takers.values()):
            return [*self._told_of_end(key, one.takers), *self._end(key, Outcome.OK, "", confirmed=True)]
        return []

    def cancel(self, link: int, taker: Incarnation, key: Key, outcome: Outcome, reason: str) -> list[Step[C]]:
        """A taker no longer wants a try that it has asked for, or has heard that it is gone."""
        if key in self._leaving:
            return self._answered(key, taker, link)
        one = self._open.get(key)
        known = (one.takers if one is not None else self._early.get(key, {})).get(taker)
        if known is None or known.link != link:
            return []
        # Also where it was early: it was announced, so this engine's scheduler side waits for its end.
        return self._fail(key, outcome, reason, but=taker, retry=outcome in {Outcome.ABORTED, Outcome.STALE})

    def release(self, key: Key, outcome: Outcome, reason: str, *, retry: bool = False) -> list[Step[C]]:
        """Let go of a try, begun or not; decode is told where it has asked."""
        return [] if key in self._ended else self._fail(key, outcome, reason, retry=retry)

    def on_session_lost(self, link: int, now: float) -> list[Step[C]]:
        """A session has ended. Its takers may ask again; what they were told of stays."""
        for takers in self._early.values():
            for name, taker in list(takers.items()):
                if taker.link == link and (taker.ask.nothing or taker.done):
                    taker.link = None
                elif taker.link == link:
                    del takers[name]
        for key in [key for key, takers in self._early.items() if not takers]:
            del self._early[key]
        for one in self._open.values():
            for name, taker in one.takers.items():
                if taker.link == link:
                    taker.link = None
                    if not taker.done and not taker.ask.nothing:
                        one.alone[name] = Lease.start(now, self._grace_s)
                    for published in one.open.values():
                        if name not in published.taken:
                            self._unpress(published)  # who asks next was never pressed
        readers = [(key, name) for key, leaving in self._leaving.items() for name in leaving.readers]
        return [step for key, name in readers for step in self._answered(key, name, link)]

    def _answered(self, key: Key, taker: Incarnation, link: int) -> list[Step[C]]:
        """A taker reads nothing of an ended try any more."""
        leaving = self._leaving[key]
        if leaving.readers.get(taker) == link:
            del leaving.readers[taker]
        if leaving.readers:
            return []
        del self._leaving[key]
        return [FreeCopy(data) for data in leaving.copies]

    def tick(self, now: float) -> list[Step[C]]:
        """After a look at what has come: what has waited too long ends."""
        out: list[Step[C]] = []
        listened = self._listened.advance(now)
        for leaving in self._leaving.values():
            leaving.lease = leaving.lease or Lease.start(listened, self._send_s)
            if leaving.lease.is_over(listened):
                out += map(EndSession, leaving.readers.values())
        for key, one in list(self._open.items()):
            clock = listened if one.asked else now
            news, one.news = one.news, False
            if one.ends is not None and one.ends.is_over(now):
                out += self.release(key, Outcome.DEADLINE, "it took longer than a load may")
            elif any(lease.is_over(now) for lease in one.alone.values()):
                out += self._fail(key, Outcome.PEER_LOST, "a rank of decode is lost", retry=True)
            elif news:
                self._renew(one, now)
            elif one.lease.is_over(clock):
                reason = "decode did not confirm in time" if one.asked else "decode did not ask for it in time"
                out += self.release(key, Outcome.DEADLINE, reason)
        return out

    def _renew(self, one: OpenTry[C], now: float) -> None:
        one.lease = Lease.start(self._listened.advance(now), self._send_s) if one.asked else Lease.start(now, self._keep_s)

    @staticmethod
    def _is_of(one: OpenTry[C], taker: Incarnation, link: int) -> bool:
        """Whether a rank has asked for a try, over this session."""
        known = one.takers.get(taker)
        return known is not None and known.link == link

    def _fail(self, key: Key, outcome: Outcome, reason: str, *, but: Incarnation | None = None,
              retry: bool = False) -> list[Step[C]]:
        """End a try; every taker but ``but`` that has not said DONE is told."""
        one = self._open.get(key)
        takers = one.takers if one is not None else self._early.pop(key, {})
        told = {name: taker.link for name, taker in takers.items()
                if name != but and not taker.done and taker.link is not None}
        refused: list[Step[C]] = [RefuseTry(link, key, outcome, reason, retry) for link in told.values()]
        return [*refused, *self._end(key, outcome, reason, retry=retry, told=told)]

    def _end(self, key: Key, outcome: Outcome, reason: str, *, confirmed: bool = False, retry: bool = False,
             told: Mapping[Incarnation, int] = MappingProxyType({})) -> list[Step[C]]:
        """A try ends. ``told``: of it, and in which session: who may be reading what it was told of."""
        one = self._open.pop(key, None)
        self._ended.put(key, (outcome, reason, retry))
        freed: list[Step[C]] = []
        leaving = LeavingTry[C](dict(told))
        for published in one.open.values() if one is not None else ():
            self._unpress(published)
            if told.keys() - published.taken:
                leaving.copies.append(published.data)
            else:
                freed.append(FreeCopy(published.data))
        if leaving.copies:
            self._leaving[key] = leaving
        return [*freed, PublishEnded(key, outcome, reason, confirmed)]
