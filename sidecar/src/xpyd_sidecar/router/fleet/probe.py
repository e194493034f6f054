"""Health probes: ``GET /health`` of an engine, on a connection of its own.

A fresh connection on purpose: an engine that is ending refuses new ones at once, while old ones may stay open and silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.router.fleet.roster import Probed
from xpyd_sidecar.router.http.patience import within
from xpyd_sidecar.router.http.wire import MAX_HEAD, HeadReader, Malformed, ResponseHead

TIMEOUT_S = 5.0


async def probe(address: HostPort, timeout_s: float = TIMEOUT_S) -> tuple[Probed, str]:
    """Ask once; never raises for what the other side does. The words say why it is not healthy. Raises Lack: nobody was
    asked, since this process has no file, port or memory for a connection.
    """
    try:
        async with within(timeout_s):
            return await _ask(address)
    except TimeoutError:
        return Probed.SILENT, f"no answer to GET /health within {timeout_s:g} s"
    except (OSError, ValueError, EOFError, Malformed) as error:
        if isinstance(error, OSError) and resources.ours(error):
            raise resources.Lack(resources.words(error)) from None
        return Probed.DEAD, f"GET /health: {error}"


async def probe_all(addresses: Sequence[HostPort]) -> tuple[Probed, str]:
    """Ask several servers of an instance at once: what the worst of them says. Raises as ``probe`` does."""
    found = await asyncio.gather(*map(probe, addresses))
    return next((one for wanted in (Probed.DEAD, Probed.SILENT) for one in found if one[0] is wanted), found[0])


async def _ask(address: HostPort) -> tuple[Probed, str]:
    host, port = split_host_port(address)
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % address.encode())
        head = await _head_of(reader)
    finally:
        writer.transport.abort()
    if head.status < 300:
        return Probed.HEALTHY, ""
    return Probed.DEAD, f"GET /health answered {head.status}"


async def _head_of(reader: asyncio.StreamReader) -> ResponseHead:
    heads = HeadReader()
    while True:
        data = await reader.read(MAX_HEAD)
        if not data:
            raise EOFError("the connection was closed without an answer")
        found = heads.feed(data)
        if found is not None:
            return found[0]
