"""Is this machine fit for xpyd's demo and tests? Says what will be installed and how large, before anything is.

Runs on the system's Python with the standard library alone. Exit code 1 names everything that is missing at once.

    python3 scripts/preflight.py VENV      VENV: folder of the virtual environment (it may exist)
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

GIB = 1 << 30
DISK_NEEDED = 9 * GIB
"""The environment takes 6.1 GiB; the rest is room for the download cache, logs and models."""
MEMORY_NEEDED = 6 * GIB
"""Two engines with 1 GiB of KV each, beside a plain one, plus the interpreters."""
PACKAGES = {"numa": "libnuma1", "gomp": "libgomp1"}
"""Shared libraries that vLLM's CPU build loads, and the Debian packages that hold them."""


def cpu_flags() -> set[str]:
    """Instruction sets of the first processor; empty where /proc does not tell."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def memory_available() -> int:
    """Bytes that can be had without swapping, the cgroup's limit respected."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            available = min(available, int(text))
    return available


def missing_libraries() -> list[str]:
    """Debian packages to install."""
    return [package for library, package in PACKAGES.items() if ctypes.util.find_library(library) is None]


def missing_build_tools() -> list[str]:
    """Debian packages that compiling xpyd's own parts needs; none where XPYD_PLAIN=1 asks for Python alone."""
    if os.environ.get("XPYD_PLAIN") == "1":
        return []
    compiler = shlex.split(os.environ.get("CC") or "cc")[0]
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return [*([] if shutil.which(compiler) else ["gcc", "libc6-dev"]),
            *([] if headers else [f"python3.{sys.version_info.minor}-dev"])]


def install(packages: list[str]) -> str:
    """Install with apt-get where that is possible, else say how; the text of what is still wrong, or nothing."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    words = f"install them: {' '.join(command)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return words
    print(f"installing from the distribution: {' '.join(packages)}", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], [*command, "-qq"]):
        if subprocess.run(step, env=environment, check=False).returncode:
            return f"{' '.join(step)} failed; {words}"
    return ""


def faults(venv: Path) -> list[str]:
    """Everything that stands in the way, each with what would be right."""
    found = []
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return [f"{sys.platform} on {platform.machine()}: the pinned engine build is for Linux on x86-64"]
    if sys.version_info < (3, 11):
        found.append(f"Python {platform.python_version()}: 3.11 or later is needed")
    if find_spec("ensurepip") is None and not (venv / "bin" / "python").exists():
        problem = install([f"python3.{sys.version_info.minor}-venv"])
        if problem:
            found.append(f"the module venv is missing; {problem}")
    if "avx2" not in cpu_flags():
        found.append("the processor lacks AVX2, which vLLM's CPU build needs")
    packages = missing_libraries()
    if packages and (problem := install(packages)):
        found.append(f"missing libraries: {', '.join(packages)}; {problem}")
    tools = missing_build_tools()
    if tools and (problem := install(tools)):
        found.append(f"xpyd's compiled parts cannot be built, which need {', '.join(tools)}; {problem}; or set "
                     f"XPYD_PLAIN=1, for Python alone, which is slow and has no link tcp")
    where = venv.parent if venv.parent.exists() else Path.cwd()
    free = shutil.disk_usage(where).free
    if free < DISK_NEEDED and not (venv / "bin" / "xpyd").exists():
        found.append(f"{free / GIB:.1f} GiB free in {where}: {DISK_NEEDED / GIB:.0f} GiB are needed")
    if (memory := memory_available()) < MEMORY_NEEDED:
        found.append(f"{memory / GIB:.1f} GiB of memory available: {MEMORY_NEEDED / GIB:.0f} GiB are needed")
    return found


def main() -> int:
    """Check, report, and answer with an exit code."""
    venv = Path(sys.argv[1]).absolute()
    found = faults(venv)
    for fault in found:
        print(f"preflight: {fault}", file=sys.stderr)
    if found:
        return 1
    fastest = "AVX-512" if "avx512f" in cpu_flags() else "AVX2"
    print(f"preflight: ok (Linux x86-64, {fastest}, {os.cpu_count()} cores, {memory_available() / GIB:.0f} GiB of memory)")
    if not (venv / "bin" / "xpyd").exists():
        print(f"will install into {venv}: requirements/cpu.txt, pinned by hash (vLLM for CPU, torch, tools; about 6.1 GiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
