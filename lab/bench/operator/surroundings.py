"""An operator on fake nodes, with a namespace in which it is measured."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from kube_client import Kube, Mirror
from kube_operator import OperatorProcess
from kube_team import operator_login
from routers import Routers
from testcluster.light import LightCluster


class Surroundings(NamedTuple):
    """What a scenario needs."""

    kube: Kube
    pods: Mirror
    services: Mirror
    routers: Routers
    operator: OperatorProcess


@contextlib.asynccontextmanager
async def surroundings(cluster: LightCluster, folder: Path, namespace: str) -> AsyncIterator[Surroundings]:
    """They begin and end together. ``namespace``: it is made."""
    kubeconfig = operator_login(cluster)
    async with Kube(cluster.kubeconfig) as kube:
        await kube.create("Namespace", {"metadata": {"name": namespace}})
        async with Mirror(kube, "Pod", namespace) as pods, Mirror(kube, "DisaggService", namespace) as services, \
                Routers(kube, namespace, pods) as routers:
            operator = OperatorProcess(kubeconfig, folder / "operator.log", "--no-leader-election", "--log-level=warning")
            await operator.start()
            try:
                yield Surroundings(kube, pods, services, routers, operator)
            finally:
                await operator.stop()
