"""A light cluster for tests, and what its audit log says about who asked for what.

    cluster = start_light(tmp_path_factory)                 ended with this interpreter at the latest
    before = requests(cluster)
    …
    writes = [each for each in requests(cluster)[len(before):] if each.user == operator and each.verb != "get"]
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from testcluster.base import Cluster
from testcluster.control_plane import API, CONTROLLERS
from testcluster.kubectl import wait_until
from testcluster.light import LightCluster


class _User(msgspec.Struct):
    username: str


class _Object(msgspec.Struct, rename="camel"):
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    api_group: str = ""


class _Answer(msgspec.Struct):
    code: int = 0


class Request(msgspec.Struct, rename="camel"):
    """One line of the audit log: a request that was answered, or a watch that began."""

    verb: str
    user_: _User = msgspec.field(name="user")
    object: _Object = msgspec.field(name="objectRef", default_factory=_Object)
    answer: _Answer = msgspec.field(name="responseStatus", default_factory=_Answer)
    user_agent: str = ""
    path: str = msgspec.field(name="requestURI", default="")

    @property
    def user(self) -> str:
        """Such as ``admin`` or ``system:serviceaccount:NAMESPACE:NAME``."""
        return self.user_.username


_DECODER = msgspec.json.Decoder(Request)


def requests(cluster: Cluster, user: str | None = None) -> list[Request]:
    """What the API server was asked so far, in order; of one user if named. A line still being written is left out."""
    data = cluster.audit_log.read_bytes()
    found = [_DECODER.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    return [each for each in found if user is None or each.user == user]


@contextlib.contextmanager
def start_light(
    tmp_path_factory: pytest.TempPathFactory, *, scheduler: bool = False, kwok: bool = False
) -> Iterator[LightCluster]:
    """A light cluster in a folder of its own, with the CRDs of this tree; its logs stay in that folder."""
    with LightCluster(tmp_path_factory.mktemp("cluster"), scheduler=scheduler, kwok=kwok) as cluster:
        apply_crds(cluster)
        yield cluster


@contextlib.asynccontextmanager
async def away(cluster: Cluster, *, paused: bool = False) -> AsyncIterator[None]:
    """The API server is away, or hangs, while the block runs.

    Then the cluster's own controllers start afresh: they are not what is tested, and would try again only after a minute.
    """
    begin, end = (cluster.pause, cluster.resume) if paused else (cluster.stop, cluster.start)
    await asyncio.to_thread(begin, API)
    try:
        yield
    finally:
        await asyncio.to_thread(end, API)
        await asyncio.to_thread(cluster.stop, CONTROLLERS)
        await asyncio.to_thread(cluster.start, CONTROLLERS)


def apply_crds(cluster: Cluster) -> None:
    """Make the API server know the resources of ``crds/``."""
    folder = Path(__file__).resolve().parents[2] / "crds"
    cluster.kubectl("apply", "--server-side", "-f", str(folder))
    wait_established(cluster, folder)


def wait_established(cluster: Cluster, path: Path) -> None:
    """Until the CRDs of a file or folder are. One without any condition yet is an error to kubectl wait."""
    established = ("wait", "--for=condition=Established", "--timeout=100s", "-f", str(path))
    wait_until(lambda: bool(cluster.kubectl(*established)), 240, f"the CRDs of {path.name} are established")
