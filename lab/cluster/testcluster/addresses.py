"""Addresses of a full cluster, by the families that it has: IPv4 and IPv6, or IPv6 alone.

Of each kind there is one for each family, in the same order; the first is what Kubernetes calls primary. The ranges are
private ones that hosts rarely use (RFC 1918, RFC 4193).
"""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec


class Addresses(msgspec.Struct, frozen=True):
    """Of one cluster."""

    host: tuple[str, ...]
    """Of the host, as the node and pods reach it."""
    node: tuple[str, ...]
    node_ranges: tuple[str, ...]
    pods: tuple[str, ...]
    """Ranges."""
    services: tuple[str, ...]
    """Ranges."""

    @property
    def api_service(self) -> str:
        """Of the Service ``kubernetes``: the first of its range."""
        return self._service(1)

    @property
    def dns(self) -> str:
        """Of the Service ``kube-dns``."""
        return self._service(10)

    @property
    def anywhere(self) -> str:
        """What is bound to be reached by the node's address."""
        return "0.0.0.0" if "." in self.node[0] else "::"

    def _service(self, number: int) -> str:
        return str(ipaddress.ip_network(self.services[0])[number])


_V6: Final = "fd58:7079:64"
DUAL: Final = Addresses(
    host=("10.90.0.254", f"{_V6}:90::fe"),
    node=("10.90.0.1", f"{_V6}:90::1"),
    node_ranges=("10.90.0.0/24", f"{_V6}:90::/64"),
    pods=("10.88.0.0/16", f"{_V6}:88::/64"),
    services=("10.96.0.0/16", f"{_V6}:96::/112"),
)
IPV6: Final = Addresses(host=DUAL.host[1:], node=DUAL.node[1:], node_ranges=DUAL.node_ranges[1:], pods=DUAL.pods[1:],
                        services=DUAL.services[1:])
LIGHT: Final = Addresses(host=("127.0.0.1",), node=("127.0.0.1",), node_ranges=(), pods=(), services=("10.96.0.0/16",))
"""Of a cluster without nodes, on loopback."""


def is_v4(address: str) -> bool:
    """Whether an address or a range is of IPv4."""
    return "." in address
