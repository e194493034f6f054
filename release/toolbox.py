"""The tools of a release, pinned by hash, in an environment of their own: the repository's environment has none of them."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from images.tools import ROOT, default_cache, locked, run, say

LOCK = ROOT / "requirements/release.txt"
KEPT = 2
"""Environments kept, the newest ones: each is some 500 MiB, most of which is the compiler."""
INSTALL_S = 900.0


def python(cache: Path | None = None) -> Path:
    """The interpreter of an environment with what requirements/release.txt pins; it is made where it is not there yet.

    ``cache``: the folder that holds it (default: beside that of images).

    Raises:
        ImageError: it cannot be installed.
    """
    cache = cache or default_cache().parent / "release"
    key = hashlib.sha256(f"{sys.executable} {sys.version}\n".encode() + LOCK.read_bytes()).hexdigest()[:16]
    folder = cache / f"tools-{key}"
    with locked(cache):
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            say(f"installing {LOCK.relative_to(ROOT)} into {folder}")
            run([sys.executable, "-m", "venv", str(folder)])
            run([str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
                 "--require-hashes", "--only-binary=:all:", "-r", str(LOCK)], timeout_s=INSTALL_S)
        (folder / "whole").touch()
        _prune(cache)
    return folder / "bin/python"


def _prune(cache: Path) -> None:
    """Remove all but the newest environments; one that was never finished counts as the oldest."""
    def used(folder: Path) -> float:
        whole = folder / "whole"
        return whole.stat().st_mtime if whole.exists() else 0.0

    for folder in sorted(cache.glob("tools-*"), key=used)[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def script(name: str, words: list[str], tools: Path, timeout_s: float = 300.0) -> str:
    """Run a Python program of the tools; what it wrote to standard output.

    ``name``: a program of the environment, such as ``auditwheel``. ``tools``: from `python`.

    Raises:
        ImageError: it failed; the message has its last lines.
    """
    return run([str(tools.with_name(name)), *words], timeout_s=timeout_s)


def temporary(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed after use."""
    return tempfile.TemporaryDirectory(prefix=f"xpyd-release-{prefix}-")
