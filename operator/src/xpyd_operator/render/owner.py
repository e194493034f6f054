"""Metadata of everything that belongs to a service, so that it goes with it."""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.service import DisaggService


def owner_reference(service: DisaggService) -> dict[str, Any]:
    """The service as controller owner. ``blockOwnerDeletion`` is false: the service goes at once, and the garbage collector
    takes what it owned, whether or not the operator runs.

    Raises:
        ValueError: the service is none that an API server knows.
    """
    if service.metadata.uid is None:
        raise ValueError(f"{service.name} has no uid")
    return {
        "apiVersion": service.api_version,
        "kind": service.kind,
        "name": service.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(service: DisaggService, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Name, namespace, labels and owner. Without an owner where the service is only a document (``xpyd render pods``)."""
    made: dict[str, Any] = {"name": name}
    if service.metadata.namespace is not None:
        made["namespace"] = service.metadata.namespace
    made["labels"] = labels
    if service.metadata.uid is not None:
        made["ownerReferences"] = [owner_reference(service)]
    return made
