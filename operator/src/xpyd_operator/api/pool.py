"""``DisaggPool``: the instances of one role of a service, and where an autoscaler sets their number."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import Count, Part
from xpyd_operator.api.service import SERVICE_NAME_PATTERN, Metadata, ServiceLabel
from xpyd_operator.api.status import PoolStatus
from xpyd_sidecar.contract.ids import NAME_MAX


class PoolMetadata(Metadata, frozen=True):
    """Kubernetes' object metadata; the name is that of the service and the role, as in `qwen-prefill`."""

    name: Annotated[
        str, Meta(min_length=1, max_length=NAME_MAX + 8, pattern=SERVICE_NAME_PATTERN, extra={"kind": "service"})
    ]
    """Name of the object: `<service>-prefill` or `<service>-decode`."""


class PoolSpec(Part, frozen=True):
    """What is wanted of one role of a DisaggService: its number of instances."""

    service: ServiceLabel
    """Name of the DisaggService."""
    role: Literal["prefill", "decode"]
    """Role of the instances."""
    replicas: Count = 1
    """Number of instances. With `replicas` in the service it mirrors that; with `scaling` autoscalers write it here."""


class DisaggPool(Part, frozen=True):
    """The instances of one role of a DisaggService. Made and owned by the service; scale it, do not write it."""

    api_version: Literal["xpyd.dev/v1beta1"]
    """Version of the API."""
    kind: Literal["DisaggPool"]
    """Kind of the object."""
    metadata: PoolMetadata
    """Kubernetes' object metadata."""
    spec: PoolSpec
    """What is wanted of the role."""
    status: PoolStatus = PoolStatus()
    """What the operator says of the pool."""
