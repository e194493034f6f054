"""Everything in a document that points outside: addresses that engines and routers ask, and the hub's token and caches.

    addresses    proxies, mirrors, object stores, collectors, stores of KV: in fields of xpyd, in variables, in arguments
    warnings     those that the service's own NetworkPolicy cuts off
    notes        a service account, where the node's identity service is cut off
    variables    what a pod's environment has of the hub (``render.pod``)
    RULES        a variable that would take the place of a field

An address that only a variable's source, an image or a file has is not seen.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from xpyd_operator.api import templates
from xpyd_operator.api.rule import Finding, Rule
from xpyd_operator.api.service import DisaggService, ServiceSpec
from xpyd_operator.api.source import Bucket, Hub
from xpyd_operator.errors import Fault
from xpyd_sidecar.contract.ids import Role

ALWAYS_OUT: Final = (53, 443)
"""Ports that the NetworkPolicy lets everything out to: name resolution and HTTPS."""
_URL: Final = re.compile(
    r"([a-z][a-z0-9+.-]*)://(?:[^/@\s]*@)?(\[[0-9A-Fa-f:.]+\]|[^/:?#,\s\[\]]+)(?::([0-9]{1,5}))?(?=$|[/?#])"
)
_BARE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][-A-Za-z0-9.]*):([0-9]{2,5})")
_PORTS: Final = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379, "etcd": 2379, "s3": 443, "gs": 443, "az": 443}
"""By scheme, where an address says none."""
_NAMED_SO: Final = re.compile(
    r".*(_PROXY|_ENDPOINT|_ADDRESS|_ADDR|_URL|_MASTER|_SERVER)|MOONCAKE_.*|LMCACHE_.*", re.IGNORECASE
)
"""Variables that may have an address without a scheme."""
_NO_ADDRESSES: Final = frozenset({"NO_PROXY", "no_proxy"})
_HERE: Final = re.compile(r"localhost|127\..*|0\.0\.0\.0|\[::1?\]|\*|\$.*", re.IGNORECASE)
MODELSCOPE: Final = "VLLM_USE_MODELSCOPE"
TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables that do what ``model.tokenSecret`` does."""
CACHES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "MODELSCOPE_CACHE")
"""Variables that say where ``model.cache`` is."""
_IDENTITY: Final = (("169.254.169.254", 80), ("169.254.170.23", 80))
"""Of a cloud's nodes, by which a service account gets its credentials: GKE's metadata server, EKS Pod Identity."""


class Address(msgspec.Struct, frozen=True):
    """One address that something of the service asks."""

    path: str
    """Where it stands."""
    host: str
    port: int
    name: str = ""
    """The variable or option that it is the value of."""


def addresses(service: DisaggService) -> Iterator[Address]:
    """All that can be read off the document, each once for each place."""
    spec = service.spec
    if isinstance(spec.model.origin, Bucket):
        yield from _in("spec.model.source", "", spec.model.origin.url)
    if spec.router.tracing.endpoint is not None:
        yield from _in("spec.router.tracing.endpoint", "", spec.router.tracing.endpoint)
    store = spec.kv.offload.store if spec.kv.offload is not None else None
    if store is not None:
        yield from _options("spec.kv.offload.store.options", store.options)
    for index, variable in enumerate(spec.engine.env):
        yield from _in(f"spec.engine.env[{index}].value", variable.name, variable.value or "")
    for path, template in spec.templates():
        for where, variable_of in templates.variables(template, path):
            if isinstance(variable_of.get("value"), str):
                yield from _in(f"{where}.value", str(variable_of["name"]), variable_of["value"])
    lists = (("spec.engine.args", spec.engine.args),
             *((f"spec.{role}.args", spec.written_section(role).args) for role in Role))
    for path, args in lists:
        for index, argument in enumerate(args):
            yield from _argument(f"{path}[{index}]", argument)


def warnings(service: DisaggService) -> Iterator[Fault]:
    """Addresses that the NetworkPolicy of the service cuts off."""
    if not service.spec.network_policy.enabled:
        return
    rules = service.spec.network_policy.egress
    own = {service.name, f"{service.name}-members", f"{service.name}-engines"}
    for one in addresses(service):
        if one.port in ALWAYS_OUT or one.host.partition(".")[0] in own or lets_out(rules, one.host, one.port):
            continue
        words = (f"{one.name or one.host} goes to port {one.port}{f' of {one.host}' if one.name else ''}, which "
                 f"spec.networkPolicy lets nobody out to; add it to spec.networkPolicy.egress, e.g. "
                 f"{{ports: [{{port: {one.port}}}]}}")
        yield Fault(one.path, words)


def notes(service: DisaggService) -> Iterator[Fault]:
    """A service account that perhaps gets its credentials from a cut-off service of the node."""
    policy = service.spec.network_policy
    if not policy.enabled or any(lets_out(policy.egress, host, port) for host, port in _IDENTITY):
        return
    for path, template in service.spec.templates():
        spec = template.get("spec")
        if isinstance(spec, dict) and spec.get("serviceAccountName"):
            words = ("a service account that stands for one of the cloud gets its credentials from the node, which "
                     "spec.networkPolicy cuts off; docs/kubernetes.md has the rules for each cloud")
            yield Fault(f"{path}.spec.serviceAccountName", words)


def variables(service: DisaggService, cache: str) -> dict[str, Any]:
    """What an engine's environment has of the hub, by name: a value, or ``valueFrom`` with where it comes from.

    Args:
        service: the document.
        cache: the folder for what is downloaded.
    """
    model = service.spec.model
    found: dict[str, Any] = {"HF_HOME": cache} if service.spec.asks_hub else {"HF_HUB_OFFLINE": "1"}
    scope = next((one.value for one in service.spec.engine.env if one.name == MODELSCOPE), None)
    if isinstance(model.origin, Hub) and (scope or "").lower() in ("1", "true"):
        found["MODELSCOPE_CACHE"] = f"{cache}/modelscope"
    if model.token_secret is not None:
        reference = {"name": model.token_secret.name, "key": model.token_secret.key}
        found["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": reference}}
    return found


def lets_out(rules: Iterable[Mapping[str, Any]], host: str, port: int) -> bool:
    """Whether some egress rule may let a TCP connection out. A name may be anybody's, so only addresses are compared."""
    return any(_port_fits(rule.get("ports"), port) and _peer_fits(rule.get("to"), host) for rule in rules)


def _port_fits(ports: Any, port: int) -> bool:
    if not isinstance(ports, list | tuple) or not ports:
        return True
    for one in ports:
        if not isinstance(one, dict) or one.get("protocol", "TCP") != "TCP":
            continue
        first, last = one.get("port"), one.get("endPort")
        if not isinstance(first, int) or first <= port <= (last if isinstance(last, int) else first):
            return True
    return False


def _peer_fits(peers: Any, host: str) -> bool:
    if not isinstance(peers, list | tuple) or not peers:
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    blocks = [one["ipBlock"] for one in peers if isinstance(one, dict) and isinstance(one.get("ipBlock"), dict)]
    return any(_holds(block, address) for block in blocks)


def _holds(block: Mapping[str, Any], address: Any) -> bool:
    try:
        return address in ipaddress.ip_network(str(block.get("cidr")), strict=False) and not any(
            address in ipaddress.ip_network(str(one), strict=False) for one in block.get("except") or ())
    except (ValueError, TypeError):
        return True  # the API server refuses it


def _in(path: str, name: str, text: str) -> Iterator[Address]:
    """Addresses in a value: one, or several with commas."""
    if name in _NO_ADDRESSES:
        return
    for part in text.split(","):
        found, port = _URL.match(part.strip()), 0
        if found is not None:
            host, port = found[2], int(found[3] or _PORTS.get(found[1], 0))
        elif _NAMED_SO.fullmatch(name) and (found := _BARE.fullmatch(part.strip())):
            host, port = found[1], int(found[2])
        if port and not _HERE.fullmatch(host):
            yield Address(path, host, port, name)


def _argument(path: str, argument: str) -> Iterator[Address]:
    name, joined, value = argument.partition("=")
    text = value if joined and name.startswith("-") else argument
    try:
        inside = json.loads(text) if text[:1] in ("{", "[") else text
    except ValueError:
        inside = text  # not for here to say
    for found in _texts(inside):
        yield from _in(path, "", found)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(one)


def _options(path: str, options: Mapping[str, Any]) -> Iterator[Address]:
    """Of a store: addresses, and hosts whose port is an option of its own (``x.host`` and ``x.port``)."""
    for key, value in options.items():
        here = f"{path}.{key}" if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f"{path}[{json.dumps(key, ensure_ascii=False)}]"
        if isinstance(value, dict):
            yield from _options(here, value)
        elif isinstance(value, str):
            beside = options.get(f"{key.removesuffix('host')}port") if key.endswith("host") else None
            if isinstance(beside, int | str) and str(beside).isdigit():
                host = value.rpartition("://")[2].strip("/")
                if not _HERE.fullmatch(host):
                    yield Address(here, host, int(beside), key)
            else:
                yield from _in(here, f"{key}_ADDRESS", value)


def _stated(spec: ServiceSpec) -> dict[str, str]:
    """Variables that a field has set, each with that field."""
    found = dict.fromkeys(TOKENS, "model.tokenSecret") if spec.model.token_secret is not None else {}
    return found | (dict.fromkeys(CACHES, "model.cache") if spec.model.cache.claim is not None else {})


def _twice(spec: ServiceSpec) -> Iterator[Finding]:
    stated = _stated(spec)
    for index, variable in enumerate(spec.engine.env):
        if variable.name in stated:
            yield f"engine.env[{index}].name", _one_of(variable.name, stated[variable.name])
    for path, template in spec.templates():
        for where, variable_of in templates.variables(template, path.removeprefix("spec."), only="main"):
            if variable_of["name"] in stated:
                yield f"{where}.name", _one_of(variable_of["name"], stated[variable_of["name"]])


def _one_of(name: str, field: str) -> str:
    return f"{name} would take the place of what spec.{field} says, and that would be of no effect; keep one of them"


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec",),
        reads=("model", "engine.env", "template", "prefill.template", "decode.template", "router.template"),
        says="",
        wrong=_twice,
        no_twin="CEL does not see what objects of Kubernetes name",
    ),
)
