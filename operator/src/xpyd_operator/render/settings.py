"""What rendering knows about the cluster and about xpyd itself. Nothing of it goes into a revision."""

from __future__ import annotations

from typing import Literal

import msgspec

PodUser = Literal["fixed", "assigned"]


class KubeSettings(msgspec.Struct, frozen=True):
    """Set once for an operator, by its flags."""

    sidecar_image: str
    """Image of router and agent, which also carries the package for the engines."""
    sidecar_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    operator_namespace: str = "xpyd-system"
    """Where the operator runs: from there it may reach the routers."""
    pod_user: PodUser = "fixed"
    """Who pods run as: ``fixed``, user and group 65532; ``assigned``, whom the cluster gives them (OpenShift)."""
