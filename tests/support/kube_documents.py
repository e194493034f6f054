"""A DisaggService as the API server shows it, and pods of it, for tests of the Kubernetes backend."""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import labels

Body = dict[str, Any]
UID = "11111111-2222-3333-4444-555555555555"


def document(name: str = "qwen", namespace: str = "team-a", *, generation: int = 1, version: int = 10, **spec: Any) -> Body:
    """1P2D on CPUs; ``spec`` is laid over."""
    return {
        "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService",
        "metadata": {"name": name, "namespace": namespace, "uid": UID, "generation": generation,
                     "resourceVersion": str(version), "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"model": {"source": "Qwen/Qwen3-8B"}, "prefill": {"replicas": 1, "resources": {}},
                 "decode": {"replicas": 2, "resources": {}}} | spec,
    }


def service(**spec: Any) -> DisaggService:
    """The decoded document."""
    return decode_service(document(**spec), strict=False, target=Target.KUBERNETES).service


def pod(ordinal: int, role: str = "decode", *, version: int = 100, owner: str = UID, status: Body | None = None,
        labelled: dict[str, str] | None = None, **metadata: Any) -> Body:
    """A pod of the service, ready unless ``status`` says otherwise."""
    mark = {labels.SERVICE: "qwen", labels.COMPONENT: labels.ENGINE, labels.ROLE: role, labels.REVISION: "r1"}
    ready = {"phase": "Running", "podIP": f"10.0.{ordinal // 250}.{ordinal % 250 + 1}",
             "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z"},
                            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:05:00Z"}],
             "containerStatuses": [{"name": "main", "ready": True, "started": True, "restartCount": 0,
                                    "state": {"running": {"startedAt": "2026-01-01T00:00:05Z"}}}]}
    reference = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "name": "qwen", "uid": owner,
                 "controller": True}
    return {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "main"}]},
            "metadata": {"name": f"qwen-e{ordinal}", "namespace": "team-a", "uid": f"pod-{ordinal}-{owner[:1]}",
                         "resourceVersion": str(version), "creationTimestamp": "2026-01-01T00:00:00Z",
                         "labels": mark | (labelled or {}), "ownerReferences": [reference]} | metadata,
            "status": ready if status is None else status}
