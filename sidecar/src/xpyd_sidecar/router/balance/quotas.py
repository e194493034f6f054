"""What each tenant may take: tokens a minute and a day, and requests in flight. Pure: times are arguments.

    refusal  nothing is left of a minute, of a day, or of its requests in flight
    take     what a request is expected to take is taken ─▶ TokenReservation
    settle   what it did not take is given back; what it took beyond that is a debt

    a minute   a bucket: it fills with limit / 60 tokens a second, and holds ``BURST_S`` of that
    a day      a count since 00:00 UTC

Who has anything left may send, however large the request is: what is then missing is a debt, which is paid before the next
one. So no request is too large, none starves behind smaller ones, and a debt is one request and what answers were longer
than expected.

An answer is expected to be as long as those of its tenant were lately, or as it may be at most. With the most alone, who
writes a large ``max_tokens`` into each request could have few of them at a time, and never use what is his.

Laws
  1. Over T seconds a tenant is charged at most limit · (T + ``BURST_S``) / 60 tokens, and one debt.
  2. A reservation is settled once; one that took nothing leaves no trace but the time.
  3. Each call costs the same, however many tenants there are; nothing grows with requests.
  4. Other limits take what was there along: neither a debt nor what is in flight is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from xpyd_sidecar.contract.tenants import Tenant

BURST_S: Final = 30.0
"""An hour has 60.5 minutes of tokens at most."""
BEGIN_S: Final = 2.0
"""A tenant begins with so many seconds of its tokens: routers that start do not know of each other yet, and each would give
out a bucket."""
DAY_S: Final = 86_400
USUAL: Final = 256.0
"""Tokens of a tenant's answers, while nothing is known."""
KEEP: Final = 0.95
"""Of what is known of them, at each new answer."""
Bound = Literal["minute", "day", "in_flight"]


class QuotaRefusal(NamedTuple):
    """A request that is not let in."""

    bound: Bound
    limit: int
    after_s: float
    """When there is something left again, seconds; at once where a request has to end."""


class QuotaStanding(NamedTuple):
    """What is left to a tenant, of the minute or of the day, whichever is less."""

    limit: int
    remaining: int
    reset_s: float
    """When all of it is there again, if nothing is taken."""


class TokenReservation(msgspec.Struct, eq=False):
    """What a request that is let in has taken."""

    account: TenantAccount
    tokens: int
    day: int
    open: bool = True


class TenantAccount:
    """Of one tenant, at this router."""

    __slots__ = ("_at", "_day", "_level", "_rate", "_room", "elsewhere", "in_flight", "share", "tenant", "today", "usual",
                 "wanted")

    def __init__(self, tenant: Tenant, now: float) -> None:
        self.tenant = tenant
        self.share = 1.0
        """Of its limits, that this router gives out: the others have the rest."""
        self.elsewhere = 0
        """Tokens that other routers have given out today."""
        self.in_flight = 0
        self.usual = USUAL
        """Tokens of its answers."""
        self.wanted = 0
        """Tokens that requests were to take, refused ones included, since somebody last looked."""
        self.today = 0
        """Tokens that this router has given out today."""
        self._day = -1
        self._at = now
        self._limit()
        self._level = math.inf if tenant.tokens_per_minute is None else self._rate * BEGIN_S

    def _limit(self) -> None:
        limit = self.tenant.tokens_per_minute
        self._rate = math.inf if limit is None else limit * self.share / 60
        self._room = math.inf if limit is None else self._rate * BURST_S

    def become(self, tenant: Tenant, now: float) -> None:
        """Other limits."""
        self._fill(now)
        unbounded = self.tenant.tokens_per_minute is None
        self.tenant = tenant
        self._limit()
        self._level = self._room if unbounded else min(self._level, self._room)

    def give_share(self, share: float, elsewhere: int, now: float) -> None:
        """Of its limits, and what others have given out today; told again after midnight."""
        self.elsewhere = elsewhere
        if share != self.share:
            self._fill(now)
            self.share = share
            self._limit()
            self._level = min(self._level, self._room)

    # ---- requests

    def expected_tokens(self, prompt: int, answer: int) -> int:
        """Tokens that a request is expected to take. ``answer``: of the longest answer that it may have."""
        return max(1, prompt + min(answer, math.ceil(self.usual)))

    def refusal(self, now: float, unix: float) -> QuotaRefusal | None:
        """Why no request is let in now; None: one is. ``unix``: seconds since 1970, by which days are told apart."""
        self._fill(now)
        self._turn(unix)
        tenant = self.tenant
        most = tenant.in_flight
        if most is not None and self.in_flight >= max(1, int(most * self.share)):
            return QuotaRefusal("in_flight", most, 0.0)
        if tenant.tokens_per_minute is not None and self._level <= 0:
            return QuotaRefusal("minute", tenant.tokens_per_minute, -self._level / self._rate)
        if tenant.tokens_per_day is not None and self.today + self.elsewhere >= tenant.tokens_per_day:
            return QuotaRefusal("day", tenant.tokens_per_day, DAY_S - unix % DAY_S)
        return None

    def take(self, tokens: int, now: float, unix: float) -> TokenReservation:
        """Let a request in that takes so many tokens; whoever calls has asked for a refusal before."""
        self._fill(now)
        self._turn(unix)
        self._level -= tokens
        self.today += tokens
        self.in_flight += 1
        return TokenReservation(self, tokens, self._day)

    def settle(self, one: TokenReservation, used: int, answer: int, now: float, unix: float) -> None:
        """A request has ended, and took ``used`` tokens. ``answer``: of those it was given; below 0: nobody knows."""
        if not one.open:
            return
        one.open = False
        self._fill(now)
        self._turn(unix)
        self.in_flight -= 1
        self._level = min(self._room, self._level + one.tokens - used)
        if one.day == self._day:
            self.today += used - one.tokens
        if answer >= 0:
            self.usual = KEEP * self.usual + (1 - KEEP) * answer

    def standing(self, now: float, unix: float) -> QuotaStanding | None:
        """What is left; None: no tokens are bounded."""
        self._fill(now)
        self._turn(unix)
        tenant, found = self.tenant, []
        if tenant.tokens_per_minute is not None:
            reset_s = (self._room - self._level) / self._rate
            found.append(QuotaStanding(tenant.tokens_per_minute, max(0, int(self._level)), reset_s))
        if tenant.tokens_per_day is not None:
            left = max(0, tenant.tokens_per_day - self.today - self.elsewhere)
            found.append(QuotaStanding(tenant.tokens_per_day, left, DAY_S - unix % DAY_S))
        return min(found, key=lambda one: one.remaining) if found else None

    # ---- time

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._room, self._level + (now - self._at) * self._rate)
            self._at = now

    def _turn(self, unix: float) -> None:
        """A clock that is set back begins no day again."""
        day = int(unix // DAY_S)
        if day > self._day:
            self._day, self.today = day, 0


class Quotas:
    """Of all tenants, at one router."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._wanting: dict[str, TenantAccount] = {}

    def __len__(self) -> int:
        """Tenants."""
        return len(self._accounts)

    def __iter__(self) -> Iterator[TenantAccount]:
        """All of them."""
        return iter(self._accounts.values())

    def take_over(self, tenants: Iterable[Tenant], now: float) -> None:
        """These are the tenants from now on."""
        before, self._accounts = self._accounts, {}
        for tenant in tenants:
            account = before.get(tenant.name)
            if account is None:
                account = TenantAccount(tenant, now)
            elif account.tenant != tenant:
                account.become(tenant, now)
            self._accounts[tenant.name] = account

    def want(self, account: TenantAccount, tokens: int) -> None:
        """A request of a tenant is to take so many tokens, whether it may or not."""
        account.wanted += tokens
        self._wanting[account.tenant.name] = account

    def wanting(self) -> list[TenantAccount]:
        """Those of which requests have come since the last call."""
        found, self._wanting = list(self._wanting.values()), {}
        return found

    def account(self, name: str) -> TenantAccount | None:
        """The account of a tenant; None: it is none any more."""
        return self._accounts.get(name)
