"""Everything that the operator makes of a service, for people who want to read it before."""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.names import instance_name
from xpyd_operator.render.children import children, key_secret, pool
from xpyd_operator.render.pods import engine_pod, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role, ServiceName

NO_KEY = "made once by the operator"
"""In place of the key: whoever used it as one would be told that it is none."""


def manifests(service: DisaggService, settings: KubeSettings) -> tuple[dict[str, Any], ...]:
    """The objects of a service with the counts that the document asks for, one pod per instance.

    Revisions are not those of a cluster, since they depend on the key.

    Raises:
        Unsupported: as ``engine_pod``.
    """
    counts = {role: service.spec.replicas(role) for role in Role}
    found = [key_secret(service, NO_KEY), *children(service, counts, settings)]
    found += [pool(service, role, counts[role]) for role in Role]
    ordinal = 0
    for role in Role:
        revision = pod_revision(service, role, "")
        for _ in range(counts[role]):
            name = instance_name(ServiceName(service.name), ordinal)
            found.append(engine_pod(service, role, name, revision, settings))
            ordinal += 1
    return tuple(found)
