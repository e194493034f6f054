"""What tenants cost a router that has 10,000 of them: finding whose a key is, letting a request in and settling it, a
second's turn of shares, and reading their document.

Everything runs in one thread, as in the router; figures are processor time, the best of several rounds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.bench.processor_time import best_us, run_command

from xpyd_sidecar.contract import tenants
from xpyd_sidecar.contract.demand import MAX_TOLD, RouterDemand, TenantDemand
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.router.api.spending import ExpectedTokens
from xpyd_sidecar.router.balance.demand import SharedDemand
from xpyd_sidecar.router.balance.quotas import Quotas
from xpyd_sidecar.router.http.auth import TenantKeys
from xpyd_sidecar.router.serving.tenancy import TenantRequest

RESULTS = Path(__file__).resolve().parents[3] / "bench/results" / "tenants.json"
TENANTS = tenants.MAX_TENANTS
BUSY = 1_000
"""Tenants that ask within a second."""


def turn_of(those: Sequence[Tenant], busy: int) -> Callable[[], None]:
    """A second in which so many of the tenants asked here, and three other routers told of some."""
    quotas, second = Quotas(), itertools.count(1)
    quotas.take_over(those, 0.0)
    shared = SharedDemand("r0", quotas)

    def turn() -> None:
        at = next(second)
        for tenant in those[:busy]:
            account = quotas.account(tenant.name)
            assert account is not None
            quotas.want(account, 100)
        words = tuple(TenantDemand(tenant.name, 100, at) for tenant in those[:MAX_TOLD])
        shared.take_words(tuple(RouterDemand(f"r{number}", at, words) for number in (1, 2, 3)), float(at), float(at))
        shared.share(float(at), float(at))
        shared.own_words(float(at))

    return turn


def measured() -> dict[str, float]:
    """All figures."""
    service = ServiceKey(bytes(range(32)))
    secrets = [tenants.new_key() for _ in range(TENANTS)]
    document = json.dumps({"tenants": [
        {"name": f"tenant-{number}", "digests": [tenants.digest_of(key)], "tokensPerMinute": 10**9, "tokensPerDay": 10**12,
         "inFlight": 10**6, "models": ["qwen"]} for number, key in enumerate(secrets)]})
    those = tenants.decode(document)
    keys, quotas = TenantKeys(those, tenants.pepper(service)), Quotas()
    quotas.take_over(those, 0.0)
    tokens = itertools.cycle([key.encode() for key in secrets])
    headers = itertools.cycle([{b"authorization": b"Bearer " + key.encode()} for key in secrets])
    names, clock = itertools.cycle(those), itertools.count(1.0, 0.0001)
    expected = ExpectedTokens(500, 1000)

    def request() -> None:
        tenant, now = next(names), next(clock)
        account = quotas.account(tenant.name)
        assert account is not None
        one = TenantRequest(tenant, account, quotas)
        assert one.begin(now, 0) is None
        one.require_model("qwen")
        one.take(expected, now)
        one.limits(now)
        one.end(now)

    out = {"key_us": best_us(lambda: keys.find(next(tokens)), TENANTS),
           "key_of_before_us": best_us(lambda: keys.tenant_of(next(headers)), TENANTS),
           "request_us": best_us(request, TENANTS)}
    out["second_of_1000_busy_ms"] = best_us(turn_of(those, BUSY), 10) / 1000
    out["second_of_10000_busy_ms"] = best_us(turn_of(those, TENANTS), 10) / 1000
    out["document_ms"] = best_us(lambda: TenantKeys(tenants.decode(document), b""), 1) / 1000
    out["document_kib"] = len(document) / 1024
    return out


run_command("What 10,000 tenants cost a router.", RESULTS, measured)
