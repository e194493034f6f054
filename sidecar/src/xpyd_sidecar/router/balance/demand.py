"""Which share of a tenant's limits each router gives out: by what its clients want there. Pure: times are arguments.

    share of router r  =  (wanted at r + e) / (wanted at all + n · e)       n: routers that are known, e: a bit of the limit

Each router works it out from what it was told, so shares add up to one as soon as all know the same, which is a beat or two
later. Who wants nothing anywhere has the same share everywhere, so that n routers that are asked at once give out one
bucket, not n. The bit that a router keeps without demand is lost to others: at most ``IDLE`` of the limit each.

Laws
  1. While nothing changes, shares add up to one.
  2. What is told late, twice or out of order changes nothing; a router that tells nothing for ``FORGET_S`` counts no more.
  3. What others have given out of a day stays counted until it ends, also when they have gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from xpyd_sidecar.contract.demand import MAX_DEMANDING, MAX_TOLD, RouterDemand, TenantDemand
from xpyd_sidecar.router.balance.quotas import DAY_S, Quotas

IDLE: Final = 0.002
"""Of a limit, that a router has beside what is wanted there."""
FORGET_S: Final = 20.0
KEEP: Final = 0.9
"""Of what is known of a demand, each second: it is over about ten."""
LEAST: Final = 0.5
"""Tokens a minute; who wants less wants nothing."""
AT_ONCE: Final = 1_000
"""Tenants whose shares are worked out in one turn: few milliseconds, in which no token is relayed."""
FIRST: Final = MAX_TOLD * 3 // 4
"""Tenants with the largest demand that are told of at any time; all others take turns for the rest."""


class _ToldTenant(msgspec.Struct):
    """Of one tenant at one other router."""

    wanted: int = 0
    heard: float = 0.0
    day: int = -1
    today: int = 0
    before: int = 0
    """What it gave out today before it began anew."""


class _OtherRouter(msgspec.Struct):
    at: int
    heard: float
    tenants: dict[str, _ToldTenant] = {}


def _news(known: _OtherRouter, said: RouterDemand, now: float) -> bool:
    """Whether it says something new. A router whose clock was set back is believed again once it counted as silent."""
    return said.at > known.at or (said.at < known.at and now - known.heard >= FORGET_S)


class SharedDemand:
    """What one router knows of the demand at all of them."""

    def __init__(self, name: str, quotas: Quotas) -> None:
        """``name``: of this router, as the others know it."""
        self._name = name
        self._quotas = quotas
        self._wanted: dict[str, float] = {}
        """Tokens a minute that are wanted here, of tenants that want some."""
        self._others: dict[str, _OtherRouter] = {}
        self._touched: set[str] = set()
        """Tenants with a share of their own; all others have the same one everywhere."""
        self._due: list[str] = []
        """Those of them whose turn it is."""
        self._known = 0
        """Routers that counted when shares were last worked out."""
        self._day = -1
        self._told = 0
        """Tenants that were told of beside those with the largest demand."""
        self._turned = 0.0
        self._said: RouterDemand | None = None
        """What is told until the next turn."""

    def take_words(self, said: tuple[RouterDemand, ...], now: float, unix: float) -> None:
        """What routers say, as an instance tells it."""
        for one in said:
            known = self._others.get(one.router)
            if one.router == self._name or (known is not None and not _news(known, one, now)):
                continue
            if known is None:
                self._make_room(now)
                known = self._others[one.router] = _OtherRouter(one.at, now)
            known.at, known.heard = one.at, now
            for each in one.tenants:
                self._note(known.tenants, each, int(unix // DAY_S), now)

    def _make_room(self, now: float) -> None:
        """For one more router: the one that has been silent for the longest time goes, and what it gave out with it."""
        if len(self._others) >= MAX_DEMANDING:
            del self._others[max(self._others, key=lambda name: now - self._others[name].heard)]

    def _note(self, known: dict[str, _ToldTenant], said: TenantDemand, day: int, now: float) -> None:
        if self._quotas.account(said.tenant) is None:
            return
        one = known.setdefault(said.tenant, _ToldTenant())
        if one.day != day:
            one.day, one.before = day, 0
        elif said.today < one.today:
            one.before += one.today
        one.wanted, one.heard, one.today = said.wanted, now, said.today
        self._touched.add(said.tenant)

    def share(self, now: float, unix: float) -> None:
        """Called every second: work out demands and shares."""
        gap = max(0.001, now - self._turned) if self._turned else 1.0
        self._turned, self._said = now, None
        self._measure(gap)
        day = int(unix // DAY_S)
        if day != self._day:
            self._day = day
            self._begin_day(day, now)
        here = [one for one in self._others.values() if now - one.heard < FORGET_S]
        if len(here) != self._known:
            self._known = len(here)
            self._touched.update(account.tenant.name for account in self._quotas)
        self._touched.update(self._wanted)
        self._due = self._due or list(self._touched)
        some, self._due = self._due[:AT_ONCE], self._due[AT_ONCE:]
        self._touched -= {name for name in some if not self._give(name, here, now, day)}

    def _measure(self, gap: float) -> None:
        keep = KEEP ** min(gap, 60.0)
        found = {name: keep * wanted for name, wanted in self._wanted.items()}
        for account in self._quotas.wanting():
            name = account.tenant.name
            found[name] = found.get(name, 0.0) + (1 - keep) * account.wanted * 60 / gap
            account.wanted = 0
        self._wanted = {name: wanted for name, wanted in found.items()
                        if wanted >= LEAST and self._quotas.account(name) is not None}

    def _give(self, name: str, here: list[_OtherRouter], now: float, day: int) -> bool:
        """Give a tenant its share here; whether anybody wants something of it, or has given out some of it today."""
        account = self._quotas.account(name)
        if account is None:
            return False
        elsewhere, mine, theirs = 0, self._wanted.get(name, 0.0), 0.0
        for router in self._others.values():
            told = router.tenants.get(name)
            if told is not None and told.day == day:
                elsewhere += told.before + told.today
            if told is not None and now - told.heard < FORGET_S:
                theirs += told.wanted
        limit = account.tenant.tokens_per_minute
        bit = 1.0 if limit is None else IDLE * limit
        account.give_share((mine + bit) / (mine + theirs + (1 + len(here)) * bit), elsewhere, now)
        return mine > 0 or theirs > 0 or elsewhere > 0

    def _begin_day(self, day: int, now: float) -> None:
        for name, router in list(self._others.items()):
            router.tenants = {tenant: told for tenant, told in router.tenants.items()
                              if told.day == day or now - told.heard < FORGET_S}
            if now - router.heard >= FORGET_S:
                del self._others[name]

    def own_words(self, unix: float) -> RouterDemand:
        """What this router tells the others: the same until its next turn."""
        if self._said is None:
            self._said = RouterDemand(self._name, int(unix * 1000), self._words())
        return self._said

    def _words(self) -> tuple[TenantDemand, ...]:
        words = sorted(self._wanted.items(), key=lambda one: -one[1])
        names = [name for name, _ in words[:FIRST]]
        rest = [name for name, _ in words[FIRST:]]
        room = MAX_TOLD - len(names)
        if rest:
            at = self._told % len(rest)
            names += (rest[at:] + rest[:at])[:room]
            self._told += room
        return tuple([TenantDemand(name, round(self._wanted[name]), account.today) for name in names
                      if (account := self._quotas.account(name)) is not None])
