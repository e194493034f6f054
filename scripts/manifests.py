"""Render manifests/base into manifests/install.yaml; with --check, say whether the file is what it would be.

Needs kubectl, whose kustomize is used: the one of $KUBECTL, of the path, or that of the test cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "manifests/install.yaml"
HEAD = "# Made by `make manifests` from manifests/base; do not edit. Apply with: kubectl apply --server-side -f\n"
CACHE = Path(os.environ.get("XPYD_CLUSTER_CACHE") or Path.home() / ".cache/xpyd/cluster")


def kubectl() -> str | None:
    """Where kubectl is; None where it is not."""
    built = sorted(CACHE.glob("kube-*/bin/kubectl"))
    return os.environ.get("KUBECTL") or shutil.which("kubectl") or (str(built[-1]) if built else None)


def main(arguments: list[str]) -> int:
    """The exit code: 1 the file is not up to date, 2 it cannot be told."""
    program = kubectl()
    if program is None and arguments == ["--check"]:
        sys.stdout.write("left out: manifests/install.yaml against manifests/base (no kubectl yet; test-kube builds one)\n")
        return 0
    if program is None:
        sys.stderr.write("manifests: there is no kubectl: install it, name it in KUBECTL, or run `make cluster-up`\n")
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
        sys.stderr.write("manifests: manifests/install.yaml is not what manifests/base says: run `make manifests`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
