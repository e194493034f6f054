"""The rendered manifests, with the kubectl that goes with the API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testcluster.light import LightCluster

ROOT = Path(__file__).resolve().parent.parent.parent


def test_install_yaml_is_what_the_base_renders_to(cluster: LightCluster) -> None:
    environment = os.environ | {"KUBECTL": str(cluster.kubectl.program)}
    done = subprocess.run([sys.executable, ROOT / "scripts/manifests.py", "--check"], env=environment, capture_output=True,
                          text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
