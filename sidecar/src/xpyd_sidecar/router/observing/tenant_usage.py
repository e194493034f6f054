"""What each tenant has used, as metrics.

Names of tenants come from whoever runs the service, and there may be thousands: the first ``MAX_NAMES`` that ask have
series of their own, and all others share one.
"""

from __future__ import annotations

from typing import Final, Protocol

from xpyd_sidecar.router.observing.record import Record

MAX_NAMES: Final = 200
OTHERS: Final = "_other"
"""No tenant is called so."""


class CountMetric(Protocol):
    """Adds to a counter of the router's."""

    def __call__(self, name: str, *labels: str, by: float = 1) -> None:
        """``xpyd_router_{name}``."""


class TenantUsage:
    """Counts by tenant."""

    def __init__(self, count: CountMetric) -> None:
        self._count = count
        self._names: set[str] = set()

    def _label(self, tenant: str) -> str:
        if tenant in self._names:
            return tenant
        if len(self._names) >= MAX_NAMES:
            return OTHERS
        self._names.add(tenant)
        return tenant

    def count_served(self, record: Record) -> None:
        """A request of a tenant that was served is over."""
        tenant, count = self._label(record.tenant), self._count
        count("tenant_requests", tenant, record.outcome)
        for kind, tokens in (("prompt", record.prompt_tokens), ("cached", record.cached_tokens),
                             ("completion", record.tokens), ("charged", record.charged)):
            if tokens > 0:
                count("tenant_tokens", tenant, kind, by=tokens)

    def count_unserved(self, tenant: str, outcome: str) -> None:
        """One was refused before, or went."""
        self._count("tenant_requests", self._label(tenant), outcome)
