"""The sidecar's configuration: text → checked ``SidecarConfig``.

Belongs here: decoding and the checks that need more than one field or a look at a value. The structs are in
``contract.launch``; what a setting does is where it is used.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import msgspec

from xpyd_sidecar.contract.group import MOST_MEMBERS
from xpyd_sidecar.contract.ids import NAME, NAME_MAX, split_host_port
from xpyd_sidecar.contract.launch import AgentConfig, GroupConfig, RouterConfig, SidecarConfig
from xpyd_sidecar.errors import ConfigError

ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._~%-]+(:[0-9]{1,5})?|[a-z][a-z0-9+.-]*://\[[0-9a-f:.]+\](:[0-9]{1,5})?")
"""An origin as browsers write it (RFC 6454, section 6.2), or all of them."""
NAME_OR_V4: Final = re.compile(r"[A-Za-z0-9._~-]+")
HOST: Final = re.compile(r"[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\]")
"""The name or address of a host, as it stands in front of a port."""


def decode(text: bytes | str) -> SidecarConfig:
    """JSON text → a configuration that can be run.

    Raises:
        ConfigError: one line that names the field (``$.agent.engine``) and what would be right.
    """
    try:
        config = msgspec.json.decode(text, type=SidecarConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not JSON: {error}") from None
    for fault in faults(config):
        raise ConfigError(fault)
    return config


def faults(config: SidecarConfig) -> Iterator[str]:
    """What is wrong with a configuration whose types are right, one line each."""
    if not NAME.fullmatch(config.service) or len(config.service) > NAME_MAX:
        yield f"{config.service!r} is not a name of at most {NAME_MAX} of a-z, 0-9 and '-' - at `$.service`"
    if not config.instance:
        yield "must not be empty - at `$.instance`"
    for field in ("key_file", "run_dir"):
        if not getattr(config, field):
            yield f"a path is required - at `$.{field}`"
    if config.agent is None and config.router is None:
        yield "nothing to run: give `agent`, `router` or both - at `$`"
    if config.agent is not None:
        yield from _agent_faults(config.agent)
    if config.router is not None:
        yield from _router_faults(config.router)


def _group(agent: AgentConfig, group: GroupConfig) -> Iterator[str]:
    """A member among others: its place, and where it finds their leader."""
    if not 1 < group.size <= MOST_MEMBERS:
        yield f"from 2 to {MOST_MEMBERS}, not {group.size} - at `$.agent.group.size`"
    if not 0 <= group.index < group.size:
        yield f"from 0 to {group.size - 1}, not {group.index} - at `$.agent.group.index`"
    if not group.over_s > 0:
        yield f"must be above 0, not {group.over_s:g} - at `$.agent.group.over_s`"
    if group.index == 0 and agent.listen is None:
        yield "the leader must listen, for the other members - at `$.agent.listen`"
    if group.index > 0:
        try:
            split_host_port(group.leader)
        except ValueError as error:
            yield f"{error} - at `$.agent.group.leader`"


def _agent_faults(agent: AgentConfig) -> Iterator[str]:
    addresses = [("engine", agent.engine)]
    yield from _advertised(agent.advertise_host, agent.advertise_port)
    addresses += [(f"routers[{index}]", router) for index, router in enumerate(agent.routers)]
    if agent.listen is not None:
        addresses.append(("listen", agent.listen))
    for field, address in addresses:
        try:
            split_host_port(address)
        except ValueError as error:
            yield f"{error} - at `$.agent.{field}`"
    led = False
    if agent.group is not None:
        yield from _group(agent, agent.group)
        led = agent.group.index > 0
    if not agent.routers and not led:
        yield "at least one router address is required - at `$.agent.routers`"
    if agent.epoch < 0:
        yield f"must not be negative, not {agent.epoch} - at `$.agent.epoch`"
    if agent.assignment_file == "":
        yield "a path is required - at `$.agent.assignment_file`"
    if agent.data_parallel < 1:
        yield f"must be at least 1, not {agent.data_parallel} - at `$.agent.data_parallel`"
    for field in ("heartbeat_s", "resolve_s", "drain_timeout_s", "startup_timeout_s"):
        yield from _positive("agent", field, getattr(agent, field))


def _advertised(host: str, port: int) -> Iterator[str]:
    if not (_is_v6(host) if ":" in host else NAME_OR_V4.fullmatch(host)):
        right = "write a name or an address, without brackets and port"
        yield f"{host!r} is not a host; {right} - at `$.agent.advertise_host`"
    if not 0 < port < 65536:
        yield f"must be a port from 1 to 65535, not {port} - at `$.agent.advertise_port`"


def _is_v6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _router_faults(router: RouterConfig) -> Iterator[str]:
    for field in ("port", "members_port", "admin_port"):
        port = getattr(router, field)
        if not 0 < port < 65536:
            yield f"must be a port from 1 to 65535, not {port} - at `$.router.{field}`"
    if router.port == router.members_port:
        yield f"must differ from port, both are {router.port} - at `$.router.members_port`"
    if router.admin_port in (router.port, router.members_port):
        yield f"must differ from port and members_port, not {router.admin_port} - at `$.router.admin_port`"
    for field in ("heartbeat_s", "resolve_s", "missed_beats", "max_body_bytes", "body_budget_bytes", "max_header_bytes",
                  "max_in_flight", "queue_timeout_s", "request_timeout_s", "receive_timeout_s", "pair_timeout_s",
                  "load_limit_s", "drain_timeout_s"):
        yield from _positive("router", field, getattr(router, field))
    for field in ("listen_on_s", "queue_size", "hold_s", "max_per_instance", "skip_prefill_below",
                  "skip_prefill_rest"):
        if not getattr(router, field) >= 0:
            yield f"must not be negative, not {getattr(router, field)} - at `$.router.{field}`"
    if not 0 <= router.retry_budget <= 1:
        yield f"must be a share from 0 to 1, not {router.retry_budget} - at `$.router.retry_budget`"
    yield from _text_faults(router)


def _text_faults(router: RouterConfig) -> Iterator[str]:
    if (router.tls_cert_file is None) != (router.tls_key_file is None):
        given, lacking = ("cert", "key") if router.tls_key_file is None else ("key", "cert")
        yield f"is required beside tls_{given}_file - at `$.router.tls_{lacking}_file`"
    for index, host in enumerate(router.hosts):
        if not HOST.fullmatch(host):
            yield f"{host!r} is not the name of a host, without a port - at `$.router.hosts[{index}]`"
    for index, network in enumerate(router.trusted_proxies):
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError as error:
            yield f"{network!r} is no network, such as 10.0.0.0/8: {error} - at `$.router.trusted_proxies[{index}]`"
    for index, origin in enumerate(router.cors_origins):
        if not ORIGIN.fullmatch(origin):
            right = "write https://host, with a port where it has one and no path, in lower case, or *"
            yield f"{origin!r} is not an origin; {right} - at `$.router.cors_origins[{index}]`"
    for field in ("tls_cert_file", "tls_key_file"):
        if getattr(router, field) == "":
            yield f"a path is required - at `$.router.{field}`"
    if router.otlp_endpoint:
        url = urlsplit(router.otlp_endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            right = "write http://host:port"
            yield f"{router.otlp_endpoint!r} is not an address of HTTP; {right} - at `$.router.otlp_endpoint`"


def _positive(part: str, field: str, value: float) -> Iterator[str]:
    if not value > 0:
        yield f"must be above 0, not {value} - at `$.{part}.{field}`"
