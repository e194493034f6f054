"""What a pod of engine-cpu mounts from the host: the environment that runs this, and the interpreter it was made from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypedDict

from images.tools import ImageError

IN_THE_BASE = Path("/usr")
"""An interpreter of the distribution is in the base as well, in the same version (the base has this machine's release)."""


class Mount(TypedDict):
    """A hostPath volume, mounted read-only at the same path."""

    name: str
    path: str


class HostPaths(TypedDict):
    """What ``python -m images paths`` prints."""

    python: str
    """The interpreter that has vLLM, in the pod as on the host."""
    mounts: list[Mount]


def host_paths(prefix: str = sys.prefix, base_prefix: str = sys.base_prefix) -> HostPaths:
    """The mounts of this environment.

    Raises:
        ImageError: this is no virtual environment, or other users cannot read what would be mounted.
    """
    if prefix == base_prefix:
        raise ImageError("run this with the python of the virtual environment that has vLLM (make setup)")
    folders = {"venv": Path(prefix)}
    interpreter = Path(base_prefix).resolve()
    if interpreter != IN_THE_BASE:
        folders["python"] = interpreter
        if Path(base_prefix) != interpreter:  # the environment's links name it by another path
            folders["python-link"] = Path(base_prefix)
    for folder in folders.values():
        if any(character.isspace() for character in str(folder)):
            raise ImageError(f"{folder}: a path with spaces cannot be mounted")
        for path in (folder, folder / "bin", folder / "lib"):
            if path.stat().st_mode & 0o005 != 0o005:
                raise ImageError(f"{path}: other users cannot read it, and pods do not run as root")
    return {"python": os.path.join(prefix, "bin", "python"),
            "mounts": [{"name": name, "path": str(path)} for name, path in folders.items()]}
