"""Pin again what the .in files of requirements/ ask for, by hash: ``python scripts/pins.py [NAME…]``, all or some.

Wheels of images are for Linux alone, in the versions that the tests run with, and have a lock for each platform. No index
is named, so that each machine's own settings count.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
COMPILE: Final = (str(Path(sys.executable).with_name("uv")), "pip", "compile", "--generate-hashes", "--no-emit-index-url",
                  "--no-emit-find-links")
PYTHON: Final = ("--python-version", "3.11")
EVERYWHERE: Final = (*PYTHON, "--universal")
ALONE: Final = (*EVERYWHERE, "--no-deps")
PLATFORMS: Final = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}


def _linux(platform: str) -> tuple[str, ...]:
    return (*PYTHON, "-c", "requirements/cpu.txt", "--python-platform", PLATFORMS[platform])


LOCKS: Final[Mapping[str, Sequence[str]]] = {
    "cpu": (*EVERYWHERE, "--override", "requirements/override.txt", *(f"requirements/{name}.in" for name in (
        "cpu", "sidecar", "operator", "dev"))),
    **{name: (*EVERYWHERE, f"requirements/{name}.in") for name in ("uv", "bench", "release")},
    **{name: (*ALONE, f"requirements/{name}.in") for name in (
        "bench-kv", "nixl", "stores", "suffix", "suffix-build", "vllm-next", "gpu-cu12", "gpu-cu13")},
    "gpu-engines": ("--python-version", "3.12", "--python-platform", PLATFORMS["amd64"], "--override",
                    "requirements/gpu-engines-there.txt", "requirements/gpu-engines.in"),
    "gpu": (*_linux("amd64"), "--no-emit-package", "numpy", "requirements/gpu.in"),
    **{f"{name}-{platform}": (*_linux(platform), f"requirements/{name}.in")
       for name in ("operator-image", "sidecar-image", "engine-image") for platform in PLATFORMS},
}


def main(names: Sequence[str]) -> int:
    """Write these locks; the exit code."""
    if unknown := set(names) - LOCKS.keys():
        print(f"no such lock: {', '.join(sorted(unknown))}; there are: {', '.join(LOCKS)}", file=sys.stderr)
        return 2
    for name in names or LOCKS:
        done = subprocess.run([*COMPILE, *LOCKS[name], "-o", f"requirements/{name}.txt"], cwd=ROOT, check=False,
                              stdout=subprocess.DEVNULL)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
