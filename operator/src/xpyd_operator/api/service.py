"""``DisaggService``: one model, served by prefill and decode instances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from xpyd_operator.api import templates
from xpyd_operator.api.adapters import AdapterSpec
from xpyd_operator.api.base import Part, Preserved
from xpyd_operator.api.kv import Kv
from xpyd_operator.api.model import Engine, Model
from xpyd_operator.api.operation import DrainOptions, Limits, NetworkPolicy, Planner, Rollout
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.router import Router
from xpyd_operator.api.source import Hub
from xpyd_operator.api.status import ServiceStatus
from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.ids import NAME_MAX, Role

SERVICE_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Narrower than a DNS label by its first character: the name becomes that of a Kubernetes Service."""
ENABLE_ADAPTERS = "--enable-lora"
"""vLLM's option without which an engine takes no adapters."""
ServiceLabel = Annotated[
    str, Meta(min_length=1, max_length=NAME_MAX, pattern=SERVICE_NAME_PATTERN, extra={"kind": "service"})
]


class Metadata(Part, frozen=True):
    """Kubernetes' object metadata."""

    name: ServiceLabel
    """Name of the object."""
    namespace: str | None = None
    """Namespace of the object."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Labels."""
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    """Annotations."""
    uid: str | None = None
    """Set by the API server."""
    resource_version: str | None = None
    """Set by the API server."""
    generation: int | None = None
    """Set by the API server; grows with each change of the spec."""
    creation_timestamp: str | None = None
    """Set by the API server."""
    deletion_timestamp: str | None = None
    """Set by the API server once the object is being deleted."""
    deletion_grace_period_seconds: int | None = None
    """Set by the API server."""
    finalizers: tuple[str, ...] = ()
    """What must happen before the object may go."""
    owner_references: tuple[dict[str, Any], ...] = ()
    """Objects that this one goes with."""
    managed_fields: tuple[dict[str, Any], ...] = ()
    """Set by the API server."""
    self_link: str | None = None
    """No longer used by Kubernetes."""


class ServiceSpec(Part, frozen=True):
    """What is wanted."""

    model: Model
    """What is served."""
    engine: Engine = Engine()
    """vLLM itself, the same for both roles."""
    adapters: Annotated[tuple[AdapterSpec, ...], Meta(extra={"max_items": adapters.MOST, "merge_key": "name"})] = ()
    """LoRA adapters that are served beside the model, each under a name of its own. They are loaded and unloaded while
    engines run. The first one has engines replaced, since they need `--enable-lora`: write that in `engine.args` from
    the beginning where adapters come later. `--max-loras` and `--max-lora-rank` are vLLM's own options. Set it to serve
    several variants of one model.
    """
    prefill: RoleSpec = RoleSpec()
    """Instances that read prompts."""
    decode: RoleSpec = RoleSpec()
    """Instances that write answers."""
    kv: Kv = Kv()
    """How KV goes from prefill to decode."""
    router: Router = Router()
    """How requests come in and how instances are chosen."""
    drain: DrainOptions = DrainOptions()
    """How an instance leaves."""
    rollout: Rollout = Rollout()
    """How a new revision replaces the old one."""
    limits: Limits = Limits()
    """Bounds on the counts, whoever sets them."""
    planner: Planner = Planner()
    """Sets the counts of roles that have `scaling`."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach the pods of the service."""
    suspend: bool = False
    """Nothing of the service runs while this is true: instances and routers are drained and deleted. Services,
    policies, Secrets and pools stay, so that it has the same addresses and counts when it is resumed. Not with `xpyd
    up`. Set it to give the devices back for a while.
    """
    template: Preserved | None = None
    """Pod template of all pods, below those of roles and routers, which are laid over it: `tolerations`,
    `imagePullSecrets`, `serviceAccountName`, variables, volumes. What it says of the containers `main`, `sidecar` and
    `xpyd-install` and of `resourceClaims` is for engines, what it says of `router` for routers in pods of their own.
    Not used by `xpyd up`. Set it for what all pods have in common.
    """

    def role(self, role: Role) -> RoleSpec:
        """The section of a role, its template laid over that of all pods."""
        section = self.written_section(role)
        if self.template is None:
            return section
        return structs.replace(section, template=templates.of_engine(self.template, section.template))

    def written_section(self, role: Role) -> RoleSpec:
        """The section of a role as it was written, with its own template alone."""
        return self.prefill if role is Role.PREFILL else self.decode

    def templates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every template as it was written, with its path."""
        found = {"spec.template": self.template, "spec.prefill.template": self.prefill.template,
                 "spec.decode.template": self.decode.template, "spec.router.template": self.router.template}
        for path, template in found.items():
            if template is not None:
                yield path, template

    @property
    def router_template(self) -> dict[str, Any] | None:
        """The template of routers in pods of their own, laid over that of all pods."""
        return templates.of_router(self.template, self.router.template)

    @property
    def to_zero(self) -> bool:
        """Whether the service may have no instances: a request that comes then waits in a router, and starts some."""
        return self.decode.scaling is not None and self.decode.min_instances == 0 and self.router.placement == "deployment"

    def takes_adapters(self, role: Role) -> bool:
        """Whether a role's engines may have LoRA adapters: those of the document, or by vLLM's own option."""
        return bool(self.adapters) or ENABLE_ADAPTERS in (*self.engine.args, *self.written_section(role).args)

    @property
    def asks_hub(self) -> bool:
        """Whether engines may ask the hub: for the model, or for adapters."""
        return isinstance(self.model.origin, Hub) or any(self.takes_adapters(role) for role in Role)

    def replicas(self, role: Role) -> int:
        """The count that the document itself asks for: ``replicas``, or the lower bound of ``scaling``."""
        return self.role(role).min_instances


class DisaggService(Part, frozen=True):
    """One model, served by prefill and decode instances."""

    api_version: Literal["xpyd.dev/v1beta1"]
    """Version of the API."""
    kind: Literal["DisaggService"]
    """Kind of the object."""
    metadata: Metadata
    """Kubernetes' object metadata."""
    spec: ServiceSpec
    """What is wanted."""
    status: ServiceStatus = ServiceStatus()
    """What the operator says of the service."""

    @property
    def name(self) -> str:
        """Name of the service."""
        return self.metadata.name

    @property
    def served_name(self) -> str:
        """Model name that clients ask for."""
        model = self.spec.model
        origin = model.origin
        return model.served_name or (origin.id if isinstance(origin, Hub) else self.name)

    @property
    def shape(self) -> str:
        """Wanted instances in the words of the field, e.g. ``1P3D``."""
        return f"{self.spec.prefill.min_instances}P{self.spec.decode.min_instances}D"
