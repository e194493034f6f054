"""``spec.router.gateway``: clients that come through a gateway of the Gateway API."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from xpyd_operator.api.base import ObjectName, Part

PICKER_PORT: Final = 9002
"""Where endpoint pickers listen by the Gateway API's own choice; the Service may lead to another one."""
LABEL_MOST: Final = 63
"""Characters of a Gateway's name: its pods carry it as a label."""
ROUTE_HOST_PATTERN: Final = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
PREFIX_PATTERN: Final = r"^(/|(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+)$"

RouteHost = Annotated[str, Meta(min_length=1, max_length=253, pattern=ROUTE_HOST_PATTERN, extra={"kind": "route host"})]
Prefix = Annotated[str, Meta(min_length=1, max_length=253, pattern=PREFIX_PATTERN, extra={"kind": "prefix"})]
GatewayName = Annotated[str, Meta(min_length=1, max_length=LABEL_MOST, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
                                  extra={"kind": "name"})]


class GatewayRef(Part, frozen=True):
    """A Gateway, or one listener of it."""

    name: GatewayName
    """Name of the Gateway."""
    namespace: GatewayName | None = None
    """Namespace of the Gateway, whose listeners have to allow routes of the service's. Default: that of the service."""
    section_name: ObjectName | None = None
    """Name of one listener. Default: every listener that takes the route."""


class GatewayPool(Part, frozen=True):
    """An `InferencePool` whose endpoints are the routers, and the picker that a gateway asks which of them."""

    picker: ObjectName
    """Service of the endpoint picker, in the namespace of this service, with port 9002. It is yours: xpyd makes none. While
    it does not answer the gateway chooses a router itself."""


class GatewayTls(Part, frozen=True):
    """By what a gateway that speaks HTTPS to routers verifies their certificate."""

    hostname: Annotated[str, Meta(min_length=1, max_length=253, pattern=ROUTE_HOST_PATTERN.replace(r"(\*\.)?", ""),
                                  extra={"kind": "certificate host"})]
    """Name that is in the certificate of `router.tls.secret`."""
    ca_config_map: ObjectName | None = None
    """ConfigMap with the authority that signed it, in `ca.crt`. Default: those that the gateway's system trusts. Set it
    where the authority is your own.
    """


class GatewayOptions(Part, frozen=True):
    """A route of the Gateway API to the routers."""

    parent_refs: Annotated[tuple[Annotated[GatewayRef, Meta(extra={"preserve": True})], ...], Meta(extra={"max_items": 8})]
    """Gateways that clients come through, as in an HTTPRoute: `name`, and where they are elsewhere or have several
    listeners `namespace` and `sectionName`."""
    hostnames: Annotated[tuple[RouteHost, ...], Meta(extra={"max_items": 16})] = ()
    """Names that clients ask for (`chat.example.com`, `*.example.com`). Default: those of the listeners. Set it where
    several services share a Gateway by their names.
    """
    path: Prefix = "/"
    """Beginning of the paths that are this service's. One other than `/` is taken away before a router sees it: with
    `/qwen`, clients write `https://HOST/qwen/v1` as their base URL. Set it where they share one name.
    """
    pool: GatewayPool | None = None
    """For gateways that route to an `InferencePool` alone. Default: the route goes to the Service of the routers."""
    tls: GatewayTls | None = None
    """Where routers serve HTTPS (`router.tls.secret`): by what the gateway knows their certificate."""
