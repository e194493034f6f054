"""What routers do with requests that nobody can take at once, as ``spec.router`` says it."""

from __future__ import annotations

import msgspec

from xpyd_operator.errors import XpydError


class RouterRules(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of ``spec.router``."""

    queue_timeout_s: float = 30.0
    """Longest wait in the queue; then the request is refused."""
    queue_size: int = 1024
    """Requests that wait in one router, at most; beyond it they are refused."""
    routers: int = 8
    """At most; one per decode instance until then."""
    skip_below: int = 0
    """Prompts with fewer tokens are computed by decode."""
    onto_decode: bool = True
    """Where no prefill instance serves, decode computes prompts; False: they are refused."""

    def __post_init__(self) -> None:
        if self.queue_timeout_s <= 0 or self.queue_size < 0 or self.routers < 1 or self.skip_below < 0:
            raise XpydError(f"router: times must be above 0, sizes from 0 on, routers from 1 on: {self}")

    def most_waiting(self, decodes: int) -> int:
        """Of all routers together."""
        return self.queue_size * min(self.routers, max(1, decodes))


PATIENT = RouterRules(queue_timeout_s=float("inf"), queue_size=1 << 40)
"""Nobody is refused."""
