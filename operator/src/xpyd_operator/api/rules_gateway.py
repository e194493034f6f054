"""Rules about a route of the Gateway API to the routers."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.gateway import GatewayOptions
from xpyd_operator.api.router import Router
from xpyd_operator.api.rule import Finding, Rule, finding_if


def _tls(router: Router) -> list[Finding]:
    if router.gateway is None or (router.gateway.tls is None) == (router.tls.secret is None):
        return []
    if router.gateway.tls is None:
        return [("gateway.tls", "is needed where tls.secret is: hostname, and caConfigMap where the authority is your own")]
    return [("gateway.tls", "is only for routers that serve HTTPS; write tls.secret, or leave it out")]


def _plain_pool(router: Router) -> list[Finding]:
    pool = router.gateway is not None and router.gateway.pool is not None and router.tls.secret is not None
    return finding_if(pool, "gateway.pool", "gateways speak plain HTTP to an InferencePool; leave out pool or tls.secret")


def _own_path(gateway: GatewayOptions) -> list[Finding]:
    own = gateway.path == "/v1" or gateway.path.startswith("/v1/")
    words = "the prefix is taken away, and routers answer at /v1; write / or a prefix of this service's own"
    return finding_if(own, "path", words)


def _nowhere(gateway: GatewayOptions) -> list[Finding]:
    return finding_if(not gateway.parent_refs, "parentRefs", "names no Gateway; write the one that clients come through")


def _distinct(gateway: GatewayOptions) -> Iterator[Finding]:
    seen: dict[tuple[str, str], set[str]] = {}
    for index, one in enumerate(gateway.parent_refs):
        sections = seen.setdefault((one.namespace or "", one.name), set())
        section = one.section_name or ""
        if sections and (not section or "" in sections or section in sections):
            words = "is a Gateway that is named before; write another sectionName for each"
            yield f"parentRefs[{index}]", words
        sections.add(section)


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec.router",),
        reads=("gateway.tls", "tls.secret"),
        says="gateway.tls must be written where tls.secret is, and only there",
        cel="!has(self.gateway) || has(self.gateway.tls) == has(self.tls.secret)",
        wrong=_tls,
    ),
    Rule(
        at=("spec.router",),
        reads=("gateway.pool", "tls.secret"),
        says="gateways speak plain HTTP to an InferencePool; leave out gateway.pool or tls.secret",
        cel="!has(self.gateway) || !has(self.gateway.pool) || !has(self.tls.secret)",
        wrong=_plain_pool,
    ),
    Rule(
        at=("spec.router.gateway",),
        reads=("path",),
        says="path is taken away, and routers answer at /v1; write / or a prefix of this service's own",
        cel="self.path != '/v1' && !self.path.startsWith('/v1/')",
        wrong=_own_path,
    ),
    Rule(
        at=("spec.router.gateway",),
        reads=("parentRefs",),
        says="",
        wrong=_distinct,
        no_twin="namespace is a reserved word of CEL, by another name in every dialect of it",
    ),
    Rule(
        at=("spec.router.gateway",),
        reads=("parentRefs",),
        says="parentRefs names no Gateway",
        cel="self.parentRefs.size() > 0",
        wrong=_nowhere,
    ),
)
