"""The rendered manifests, with the kubectl that goes with the API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testcluster import build
from testcluster.light import LightCluster

ROOT = Path(__file__).resolve().parent.parent.parent


def test_install_yaml_is_what_the_base_renders_to(cluster: LightCluster) -> None:
    environment = os.environ | {"KUBECTL": str(cluster.kubectl.program)}
    done = subprocess.run([sys.executable, ROOT / "scripts/manifests.py", "--check"], env=environment, capture_output=True,
                          text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_chart_installs_upgrades_and_leaves_the_crds(cluster: LightCluster) -> None:
    """Over CRDs that kubectl made. The operator's own user of this cluster stays: its rights are left out."""
    program = next(iter(sorted(build.cache().glob("gitops-*/bin/helm"), reverse=True)), None)
    if program is None:
        pytest.skip("Helm is not built: python scripts/tiers.py gitops")
    release = ("xpyd", str(ROOT / "charts/xpyd"), "--namespace=chart", "--set=rbac.create=false")

    def helm(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
                              capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "looks after all namespaces" in helm("install", *release, "--create-namespace", "--take-ownership")
    assert cluster.kubectl.get("deployment/xpyd-operator", "-n", "chart")["spec"]["replicas"] == 2
    helm("upgrade", *release, "--set=replicas=1", "--set=dashboards.enabled=true")
    assert cluster.kubectl.get("deployment/xpyd-operator", "-n", "chart")["spec"]["replicas"] == 1
    assert len(cluster.kubectl.get("configmaps", "-n", "chart", "-l", "grafana_dashboard=1")["items"]) == 2
    helm("uninstall", "xpyd", "--namespace=chart")
    assert cluster.kubectl.get("deployments", "-n", "chart")["items"] == []
    crds = cluster.kubectl("get", "crds", "-o", "name")
    assert "disaggservices.xpyd.dev" in crds, "with the CRDs would go all services"
    assert "disaggpools.xpyd.dev" in crds
    cluster.kubectl("delete", "namespace", "chart", "--wait=false")
