"""Ways to move blocks between two engines, behind one interface (``base``).

A new one is a module here, a name in ``choose`` and in ``contract.launch.KvOptions.transport``.
"""

from __future__ import annotations

from xpyd_sidecar.engine.links.base import Link
from xpyd_sidecar.engine.links.tcp import TcpLink
from xpyd_sidecar.errors import ConfigError


def choose(transport: str) -> Link:
    """The link of a transport.

    Raises:
        ConfigError: there is none of that name.
    """
    if transport in {"auto", "tcp"}:
        return TcpLink()
    raise ConfigError(f"transport: {transport!r} is not supported yet (auto and tcp are)")
