"""Byte code of Python files, made on this machine for any platform: it is the same everywhere for one version of Python.

It is complete and never checked again (unchecked-hash): the root file system of a container is read-only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from images.tools import ImageError, need, run
from images.tree import Tree

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"
LIMIT_S = 10
SETTINGS = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"), "")
"""What would change what is made, or where, is not set."""


def compiler(version: str) -> str:
    """A Python of this version on this machine, the distribution's before others.

    Raises:
        ImageError: there is none.
    """
    for program in (f"/usr/bin/python{version}", sys.executable if version == OURS else "", f"python{version}"):
        if program and (found := shutil.which(program)) is not None and _works(found):
            return found
    try:
        need(f"/usr/bin/python{version}", f"python{version}")
    except ImageError:
        raise ImageError(f"the base has Python {version}, and its byte code is made by the same version: install "
                         f"python{version} on this machine") from None
    return f"/usr/bin/python{version}"


def _works(program: str) -> bool:
    """Whether a name starts a Python: some are switches between versions, of which this one is not there."""
    try:
        return subprocess.run([program, "-c", ""], capture_output=True, check=False, timeout=LIMIT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def add(tree: Tree, folders: Iterable[str], version: str) -> None:
    """Compile every module below folders, which may be patterns (``usr/lib/python3.*``).

    Raises:
        ImageError: one is no Python of this version, or there is no such Python.
    """
    wanted = tuple(folders)
    named = [path for path, _ in tree if path.endswith(".py") and any(fnmatch(path, f"{folder}/*") for folder in wanted)]
    sources = {path: data for path in named if (data := tree.read(path)) is not None}
    if not sources:
        return
    with tempfile.TemporaryDirectory(prefix="xpyd-bytecode-") as name:
        work = Path(name)
        for path, data in sources.items():
            place = work / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        # One process, in order of names, with one seed for hashes: so equal files have equal byte code.
        run([compiler(version), "-P", "-S", "-W", "ignore", "-m", "compileall", "-q", "-f", "-j", "1", "-s", name,
             "-p", "/", "--invalidation-mode", "unchecked-hash",
             *sorted({str(work / path.split("/")[0]) for path in sources})],
            env={**SETTINGS, "PYTHONHASHSEED": "0"})
        for made in sorted(work.rglob("*.pyc")):
            tree.file(str(made.relative_to(work)), made.read_bytes())
