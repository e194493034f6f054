"""What the workers of a router share: its port, and its bounds."""

from __future__ import annotations

import socket

import msgspec

from xpyd_sidecar import listening
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.errors import ConfigError


def share(router: RouterConfig, count: int) -> RouterConfig:
    """The settings of one worker: bounds of the whole router are divided, rounded up."""
    def part(value: int) -> int:
        return -(-value // count)
    return msgspec.structs.replace(
        router, workers=1, max_in_flight=part(router.max_in_flight), queue_size=part(router.queue_size),
        max_per_instance=part(router.max_per_instance), body_budget_bytes=part(router.body_budget_bytes), compat="none")


def reserve(host: str, port: int) -> socket.socket:
    """Keep the port for the workers. It must be nobody's: SO_REUSEPORT would share it with another router in silence.
    Raises ConfigError: it is taken, or the address cannot be bound.
    """
    address = listening.bound(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as alone:
            listening.both_families(alone, host)
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((address, port))
            alone.listen(1)
            port = alone.getsockname()[1]
        reserved = socket.socket(family)
        listening.both_families(reserved, host)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, port))
    except OSError as error:
        where = join_host_port(host, port)
        raise ConfigError(f"router.port: cannot listen on {where}: {error.strerror or error}") from None
    return reserved
