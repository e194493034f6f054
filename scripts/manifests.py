"""Render manifests/base into manifests/install.yaml, and wrap the alerts in a PrometheusRule; with --check, say whether the
files are what they would be.

Needs kubectl, whose kustomize is used: the one of $KUBECTL, of the path, or that of the test cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "manifests/install.yaml"
OBSERVABILITY = ROOT / "manifests/observability"
HEAD = "# Made by `make generate` from manifests/base; do not edit. Apply with: kubectl apply --server-side -f\n"
RULE = """\
# Made by `make generate` from alerts.yaml; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: xpyd
  labels:
    app.kubernetes.io/name: xpyd-operator
spec:
"""
CACHE = Path(os.environ.get("XPYD_CLUSTER_CACHE") or Path.home() / ".cache/xpyd/cluster")


def kubectl() -> str | None:
    """Where kubectl is; None where it is not."""
    return os.environ.get("KUBECTL") or shutil.which("kubectl") or built("kubectl")


def built(name: str) -> str | None:
    """Where a program of the test cluster is; None where it was not built yet."""
    found = sorted(CACHE.glob(f"*-*/bin/{name}"), key=lambda path: path.lstat().st_mtime)
    return str(found[-1]) if found else None


def rule(*, check: bool) -> bool:
    """Whether the PrometheusRule is, or was already with ``check``, what the alerts say."""
    target = OBSERVABILITY / "prometheusrule.yaml"
    text = RULE + textwrap.indent((OBSERVABILITY / "alerts.yaml").read_text(), "  ")
    if not check:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        sys.stderr.write("manifests: manifests/observability/prometheusrule.yaml is not what alerts.yaml says: "
                         "run `make generate`\n")
        return False
    return True


def main(arguments: list[str]) -> int:
    """The exit code: 1 a file is not up to date, 2 it cannot be told."""
    wrapped = rule(check=arguments == ["--check"])
    program = kubectl()
    if program is None and arguments == ["--check"]:
        sys.stdout.write("left out: manifests/install.yaml against manifests/base (no kubectl yet; test-kube builds one)\n")
        return 0 if wrapped else 1
    if program is None:
        sys.stderr.write("manifests: there is no kubectl: install it, name it in KUBECTL, or build one "
                         "(python -m lab cluster-build)\n")
        return 2
    done = subprocess.run([program, "kustomize", str(ROOT / "manifests/base")], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"manifests: {done.stderr}")
        return 2
    text = HEAD + done.stdout
    if arguments != ["--check"]:
        TARGET.write_text(text)
        return 0
    if not TARGET.exists() or TARGET.read_text() != text:
        sys.stderr.write("manifests: manifests/install.yaml is not what manifests/base says: run `make generate`\n")
        return 1
    return 0 if wrapped else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
