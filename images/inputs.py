"""What an image is made from, and the tag that says so: equal inputs, equal tag, no build."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from images.tools import ROOT, ImageError

HERE = Path(__file__).parent
RECIPE = tuple(HERE / name for name in ("assemble.py", "build.py", "buildah.py", "wheels.py"))
BASE_RECIPE = tuple(HERE / name for name in ("base.py", "Containerfile.base"))


class Kind(NamedTuple):
    """One image."""

    name: str
    projects: tuple[str, ...] = ()
    """Packages of this repository, by folder; their pins are in requirements/NAME-image.txt."""
    extras: Path | None = None
    """Requirements of the engine's side, for every version of Python that it may have."""
    published: bool = True


PIP = ROOT / "requirements" / "pip.txt"
KINDS = (
    Kind("operator", ("sidecar", "operator")),
    Kind("sidecar", ("sidecar",), ROOT / "requirements" / "engine-image.txt"),
    Kind("engine-cpu", published=False),
)


def version() -> str:
    """The version of xpyd.

    Raises:
        ImageError: the two packages have different ones.
    """
    found = {project: tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["version"]
             for project in ("operator", "sidecar")}
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


def files_of(kind: Kind) -> list[Path]:
    """Every file that goes into an image or decides how it is made."""
    files = [*RECIPE, HERE / f"Containerfile.{kind.name}"]
    for project in kind.projects:
        folder = ROOT / project
        files += [folder / "pyproject.toml", *folder.glob("hatch_build.py"), *sources(folder / "src")]
    if kind.projects:
        files += [PIP, ROOT / "requirements" / f"{kind.name}-image.txt"]
    return files if kind.extras is None else [*files, kind.extras]


def sources(folder: Path) -> list[Path]:
    """Files of a package, without what Python and the compiler leave there."""
    return [path for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"]
