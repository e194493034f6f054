"""What engines that move KV by RDMA need of their pods: what is worth saying where a document seems not to give it.

How a pod gets an RDMA device differs from cluster to cluster: a key of a device plugin, a claim, a network that a template
names. So nothing is refused here. An engine without one says so when it starts, and ends
(``xpyd_sidecar.engine.nixl_setup``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xpyd_operator.api.devices import NETWORKS
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Fault
from xpyd_sidecar.contract.ids import Role

CHOICE: Final = "UCX_TLS"
"""UCX's own variable: what it may take. Whoever sets it needs no RDMA device."""


def notes(service: DisaggService) -> Iterator[Fault]:
    """Of a document for Kubernetes."""
    if service.spec.kv.transport != "rdma":
        return
    chosen = [index for index, one in enumerate(service.spec.engine.env) if one.name == CHOICE]
    for index in chosen:
        words = "blocks go over what this allows; over tcp and shared memory UCX checks nobody: for trusted networks alone"
        yield Fault(f"spec.engine.env[{index}]", words)
    for which in Role if not chosen else ():
        if not _connected(service.spec.role(which)):
            words = (
                "transport rdma needs an RDMA device, and nothing here seems to bring one: add e.g. limits rdma/ib: 1, "
                "a claim, or a network in template"
            )
            yield Fault(f"spec.{which}.resources", words)


def _connected(role: RoleSpec) -> bool:
    """Whether something may bring an RDMA device. What a template or a claim brings is not known here."""
    if role.template is not None:
        return True
    given = role.resources
    if given is None:
        return False
    return bool(given.claims) or any(key.startswith(NETWORKS) for key in (*given.limits, *given.requests))
