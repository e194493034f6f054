"""What an image is made from, and the tag that says so: equal inputs, equal tag, no build."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from images import base
from images.platforms import Platform
from images.tools import ROOT, ImageError

HERE = Path(__file__).parent
BASE_RECIPE = tuple(HERE / name for name in ("base.py", "bytecode.py", "debian.py", "elf.py", "oci.py", "tree.py"))
RECIPE = (*BASE_RECIPE, *(HERE / name for name in ("build.py", "foreign.py", "inputs.py", "platforms.py", "wheels.py")))
PROJECTS = ("sidecar", "operator", "distribution")
"""Folders of the packages that are made into wheels; what a package needs stands before it."""
USER = 65532
PREFIX = "opt/xpyd"
"""The environment in operator and sidecar."""


class Kind(NamedTuple):
    """One image."""

    name: str
    description: str
    entrypoint: tuple[str, ...]
    projects: tuple[str, ...] = ()
    """Packages of this repository, by folder; their pins are in requirements/NAME-image-PLATFORM.txt."""
    extras: bool = False
    """With what the engine's side needs, for every version of Python that it may have."""
    packages: tuple[str, ...] = base.PACKAGES
    published: bool = True


KINDS = (
    Kind("operator", "Operator of xpyd: vLLM disaggregated into prefill and decode", ("python", "-m", "xpyd_operator.kube"),
         ("sidecar", "operator")),
    Kind("sidecar", "Router and agent of xpyd, and the package that engines load", ("python", "-m", "xpyd_sidecar"),
         ("sidecar",), extras=True),
    # No compiler: vLLM runs with --enforce-eager, since torch.compile needs g++.
    Kind("engine-cpu", "Around a vLLM for CPUs that is mounted from the host; for tests",
         ("python3", "-m", "vllm.entrypoints.launchers.api_server.entry"),
         packages=(*base.PACKAGES, "libgomp1", "libnuma1", "util-linux"), published=False),
)


def settings(kind: Kind, path: str) -> dict[str, Any]:
    """What a container runtime reads; ``path``: folders of programs."""
    labels = {"title": f"xpyd-{kind.name}", "description": kind.description, "version": version(), "licenses": "Apache-2.0"}
    return {
        "Cmd": [], "Entrypoint": list(kind.entrypoint), "StopSignal": "SIGTERM", "WorkingDir": "/",
        "User": f"{USER}:{USER}",
        "Env": [f"PATH={path}", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1", "HOME=/tmp", "LANG=C.UTF-8"],
        "Labels": {f"org.opencontainers.image.{name}": value for name, value in labels.items()}}


def lock(name: str, platform: Platform) -> Path:
    """Pins for a platform: of an image, or of ``engine``, which are the extras."""
    return ROOT / "requirements" / f"{name}-image-{platform.name}.txt"


def version() -> str:
    """The version of xpyd.

    Raises:
        ImageError: the packages have different ones.
    """
    found = {project: tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["version"]
             for project in PROJECTS}
    if len(set(found.values())) != 1:
        raise ImageError(f"the packages' versions differ: {found}")
    return str(found["operator"])


def digest(files: Iterable[Path], *words: str) -> str:
    """Twelve hex digits over files (by path in the repository and content) and words."""
    total = hashlib.sha256()
    for part in (*words, *(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}"
                           for path in sorted(set(files)))):
        total.update(f"{part}\n".encode())
    return total.hexdigest()[:12]


def files_of(kind: Kind, platform: Platform) -> list[Path]:
    """Every file that goes into an image or decides how it is made."""
    files = list(RECIPE)
    for project in kind.projects:
        folder = ROOT / project
        files += [folder / "pyproject.toml", folder / "README.md", *folder.glob("hatch_build.py"), *sources(folder / "src")]
    if kind.projects:
        files.append(lock(kind.name, platform))
    return [*files, lock("engine", platform)] if kind.extras else files


def sources(folder: Path) -> list[Path]:
    """Files of a package, without what Python and the compiler leave there."""
    return [path for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"]
