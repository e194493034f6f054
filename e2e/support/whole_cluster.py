"""Fixtures: one whole cluster, with the operator installed from manifests/, and one service on real vLLM engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_in_cluster import Images, ServiceInCluster
from testcluster.full import FullCluster

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests" / "base"
SYSTEM = "xpyd-system"


@pytest.fixture(scope="session")
def images() -> Images:
    """All three images, built where something changed."""
    done = subprocess.run([sys.executable, "-m", "images", "build"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    mounts = subprocess.run([sys.executable, "-m", "images", "paths"], cwd=ROOT, capture_output=True, text=True, check=True)
    built: dict[str, Any] = json.loads(done.stdout)
    return Images(built, json.loads(mounts.stdout))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Iterator[FullCluster]:
    """The cluster with the images in it."""
    with FullCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        for image in images.built.values():
            cluster.import_image(Path(image["archive"]))
        yield cluster


@pytest.fixture(scope="session")
def operator(cluster: FullCluster, images: Images) -> FullCluster:
    """The cluster with the operator installed as a user would, but for the names of the images."""
    text = cluster.kubectl("kustomize", str(MANIFESTS))
    for name in ("operator", "sidecar"):
        text = text.replace(f"xpyd-{name}:0.1.0", images.name(name))
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    cluster.kubectl("rollout", "status", "-n", SYSTEM, "deployment/xpyd-operator", "--timeout=300s", timeout_s=310)
    return cluster


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the node that every pod's user may write, as an administrator makes one."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o1777)
    return folder


@pytest.fixture(scope="session")
def service(operator: FullCluster, images: Images, shared: Path) -> Iterator[ServiceInCluster]:
    """1P1D, decode scaled through its pool; ready."""
    service = ServiceInCluster(operator, images, shared)
    service.apply()
    try:
        service.wait_ready("1P1D")
        yield service
    finally:
        service.remove()
