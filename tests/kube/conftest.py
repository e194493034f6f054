"""One light cluster for the whole tier; for each test a namespace, a scripted kubelet and an operator of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from fair_session import fair  # noqa: F401 (a fixture)
from kube_cluster import start_light
from kube_faults import FaultProxy
from kube_operator import OperatorProcess
from kube_team import Team, make_team, operator_login
from testcluster.control_plane import CONTROLLERS
from testcluster.light import LightCluster

_numbers = itertools.count()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what was there and what the operator said."""
    report = yield
    team = getattr(item, "funcargs", {}).get("quiet_team")
    if report.failed and call.when == "call" and isinstance(team, Team):
        report.sections.append(("team", team.describe()))
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    """A real API server. The first one on a machine is built, which takes minutes."""
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    with start_light(tmp_path_factory) as light:
        light.stop(CONTROLLERS)  # the garbage collector looks for new CRDs at its start, and then only every 30 s
        light.start(CONTROLLERS)
        yield light


@pytest.fixture(scope="session")
def operator_kubeconfig(cluster: LightCluster) -> Path:
    """Of the operator's user."""
    return operator_login(cluster)


@pytest.fixture
async def quiet_team(cluster: LightCluster, operator_kubeconfig: Path, tmp_path: Path,
                     request: pytest.FixtureRequest) -> AsyncIterator[Team]:
    """A namespace whose operator is not started yet."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:40].rstrip("-")
    namespace = f"{name}-{next(_numbers)}"
    operator = OperatorProcess(operator_kubeconfig, tmp_path / "operator.log", "--no-leader-election", namespace=namespace)
    try:
        async with make_team(cluster, namespace, operator) as team:
            yield team
    finally:
        await operator.kill()


@pytest.fixture
async def team(quiet_team: Team) -> Team:
    """A namespace with an operator at work."""
    await quiet_team.operator.start()
    return quiet_team


@pytest.fixture
async def proxied(quiet_team: Team, operator_kubeconfig: Path, tmp_path: Path) -> AsyncIterator[tuple[Team, FaultProxy]]:
    """A team whose operator reaches the API server through a proxy."""
    async with FaultProxy(quiet_team.kube, seed=4) as proxy:
        kubeconfig = proxy.kubeconfig(operator_kubeconfig, tmp_path / "proxied.kubeconfig")
        quiet_team.operator = OperatorProcess(kubeconfig, tmp_path / "operator.log", "--no-leader-election",
                                              namespace=quiet_team.namespace)
        await quiet_team.operator.start()
        try:
            yield quiet_team, proxy
        finally:
            await quiet_team.operator.kill()
