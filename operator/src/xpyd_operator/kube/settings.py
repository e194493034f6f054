"""Everything that an operator is told when it starts (the flags of ``python -m xpyd_operator.kube``)."""

from __future__ import annotations

from typing import Literal

from xpyd_operator.render.settings import KubeSettings


class OperatorSettings(KubeSettings, frozen=True, kw_only=True):
    """What rendering knows, and how the operator works. Times in seconds."""

    namespaces: tuple[str, ...] = ()
    """Namespaces that are looked after; empty: all of them."""
    resync_s: float = 5.0
    """A service that nothing wakes is looked at so often, and less often above 200 of them."""
    gap_s: float = 0.2
    """Shortest time between two rounds of one service, so that a storm of events costs one round."""
    width: int = 32
    """Most requests to the API server at the same time, of all services together."""
    rounds: int = 16
    """Most services that have a round at the same time."""
    gang: Literal["auto", "none", "kubernetes", "volcano", "coscheduling"] = "auto"
    """How instances of several pods are placed as a whole (``render.gang``); ``auto``: as Kubernetes does it, where it
    does."""
    dry_run: bool = False
    """Plan and log, write nothing."""
    fleet_timeout_s: float = 2.0
    """Deadline of one request to a router."""
    request_timeout_s: float = 10.0
    """Deadline of one request to the API server."""
    http_port: int = 8080
    """Port for /metrics and the health paths."""
    master_secret: str = "xpyd-master"  # noqa: S105 (its name)
    """Secret of the operator's namespace that the keys of services are derived from."""
    lease_name: str = "xpyd-operator"
    lease_namespace: str = "xpyd-system"
    identity: str = ""
    """Who holds the Lease; empty: made from the host's name."""
    lease_s: float = 10.0
    """A Lease that was not renewed for so long may be taken over."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"
