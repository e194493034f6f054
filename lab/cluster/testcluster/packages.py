"""The distribution's part of a full cluster: installed with apt-get where it is missing; starts and replaces nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import Missing

CNI_PLUGINS = Path("/usr/lib/cni")
COMMANDS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mount": "mount",
    "sysctl": "procps",
    "conntrack": "conntrack",
    f"{CNI_PLUGINS}/bridge": "containernetworking-plugins",
}
"""What a node needs; command (or path): the package that has it."""
POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked by Debian's packages before they start a service; 101 means no."""
DEADLINE_S = 600.0


def missing() -> list[str]:
    """Packages to install."""
    return sorted({package for command, package in COMMANDS.items() if shutil.which(command) is None})


def ensure() -> None:
    """Install what is missing.

    A package that would remove another one (as Debian's containerd would remove that of Docker) is not installed.

    Raises:
        Missing: this is not possible; says what to install by hand.
    """
    packages = missing()
    if not packages:
        return
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "--no-remove", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Missing(f"these packages of the distribution are missing: {' '.join(packages)}")
    with _no_services():
        _run(["apt-get", "update", "-qq"])
        _run(command)
    if still := missing():
        raise Missing(f"{' '.join(command)} went well, but commands of these packages are missing: {' '.join(still)}")


def _run(command: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise Missing(f"{' '.join(command)} did not end within {DEADLINE_S:.0f} s") from None
    if done.returncode:
        raise Missing(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-2000:]}")


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """No package starts its service meanwhile. A policy that the host has stays as it is."""
    try:
        descriptor = os.open(POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:
        yield
        return
    with os.fdopen(descriptor, "w") as file:
        file.write("#!/bin/sh\nexit 101\n")
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
