"""Wheels for a base: the pinned ones from the package index by hash, and the two packages of this repository.

The host downloads, with its own settings of pip (index, proxy, certificates); builds inside the image need no network.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from images.tools import ROOT, ImageError, run, say

ENGINE_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Those that vLLM 0.32 supports: the engine's image may have any of them."""
ENGINE_GLIBC = "2.28"
"""torch's builds need as much."""
KEPT = 16
"""Downloads kept in the cache, the newest ones."""


def platforms(glibc: str) -> list[str]:
    """Platform tags that a glibc of this version can load, newest first (PEP 600).

    Raises:
        ImageError: it is no glibc of a version that wheels are made for.
    """
    major, _, minor = glibc.partition(".")
    if major != "2" or not minor.isdecimal() or int(minor) < 17:
        raise ImageError(f"the base's C library is {glibc or 'not glibc'}: wheels need glibc 2.17 or later")
    machine = platform.machine()
    return [f"manylinux_2_{number}_{machine}" for number in range(int(minor), 16, -1)] + [f"manylinux2014_{machine}"]


def download(cache: Path, requirements: Path, python: str, glibc: str) -> Path:
    """A folder with the wheels that ``requirements`` pins, for one version of Python; from the cache when it has them.

    Raises:
        ImageError: pip cannot get one, or its hash differs.
    """
    key = hashlib.sha256(f"{python} {glibc} {platform.machine()} ".encode() + requirements.read_bytes()).hexdigest()[:16]
    folder = cache / "wheels" / key
    if not folder.exists():
        say(f"downloading {requirements.name} for Python {python}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
        try:
            tags = [word for tag in platforms(glibc) for word in ("--platform", tag)]
            run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--require-hashes",
                 "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *tags,
                 "--dest", str(temporary), "-r", str(requirements)])
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    folder.touch()
    return folder


def prune(cache: Path) -> None:
    """Keep the newest downloads."""
    folders = [path for path in (cache / "wheels").glob("*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(path)


def own(project: str, folder: Path) -> None:
    """Build the wheel of ``operator`` or ``sidecar`` into a folder.

    Raises:
        ImageError: the build failed.
    """
    run([sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT / project)],
        env={"SOURCE_DATE_EPOCH": "1580601600"})
