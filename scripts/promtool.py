"""Have Prometheus's promtool for the tests of alerts and dashboards: Debian's, unpacked into the cache, nothing installed.

Without apt-get it says so and answers 0, since those tests are then left out; with ``CI=true`` it answers 1.

    python scripts/promtool.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("XPYD_CLUSTER_CACHE") or Path.home() / ".cache/xpyd/cluster")
PROGRAM = CACHE / "promtool"
PACKAGE = "prometheus"
LIMIT_S = 600


def promtool() -> str | None:
    """Where promtool is; None where it is not."""
    return os.environ.get("PROMTOOL") or shutil.which("promtool") or (str(PROGRAM) if PROGRAM.exists() else None)


def fetch() -> str:
    """Unpack the program; what went wrong, or nothing."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "there is no apt-get"
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="promtool.partial-", dir=CACHE) as folder:
        done = _run(["apt-get", "download", "-qq", PACKAGE], folder)
        if done.returncode and os.geteuid() == 0:
            _run(["apt-get", "update", "-qq"], folder)
            done = _run(["apt-get", "download", "-qq", PACKAGE], folder)
        packages = sorted(Path(folder).glob("*.deb"))
        if done.returncode or not packages:
            return f"apt-get download {PACKAGE} failed: {done.stderr.strip()[-500:]}"
        done = _run(["dpkg-deb", "-x", str(packages[0]), folder], folder)
        if done.returncode:
            return f"dpkg-deb failed: {done.stderr.strip()[-500:]}"
        (Path(folder) / "usr/bin/promtool").rename(PROGRAM)
    return ""


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, cwd=folder,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def main() -> int:
    """Check and fetch; the exit code."""
    problem = "" if promtool() else fetch()
    if not problem:
        return 0
    print(f"promtool: {problem}; install it or name it in PROMTOOL", file=sys.stderr)
    if os.environ.get("CI") == "true":
        return 1
    print("without it the tests of alerts are left out", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
