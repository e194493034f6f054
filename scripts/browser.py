"""Have a browser for the tests of pages: Debian's Chromium and its driver, installed with apt-get where that is possible.

Without root or apt-get it says so and answers 0, since those tests are then left out; with ``CI=true`` it answers 1, since
there they must run.

    PYTHONPATH=tests/support python scripts/browser.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from chromium import missing

LIMIT_S = 600


def install(packages: list[str]) -> str:
    """Install packages; what went wrong, or nothing."""
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq", "--no-install-recommends", *packages]
    words = f"install them: apt-get install {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return words
    print(f"installing from the distribution: {' '.join(packages)}", flush=True)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(step, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False)
        if done.returncode:
            last = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-20:])
            return f"{' '.join(step)} failed; {words}\n{last}"
    return "" if not missing() else f"still missing after the installation: {', '.join(missing())}"


def main() -> int:
    """Check and install; the exit code."""
    packages = missing()
    problem = install(packages) if packages else ""
    if not problem:
        return 0
    must = os.environ.get("CI") == "true"
    print(f"browser: {', '.join(packages)} missing; {problem}", file=sys.stderr)
    if not must:
        print("without a browser the tests of pages are left out", file=sys.stderr)
    return 1 if must else 0


if __name__ == "__main__":
    sys.exit(main())
