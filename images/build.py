"""The images: from their inputs to archives that `ctr image import` takes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from images import base, inputs, wheels
from images.buildah import Buildah
from images.hosts import host_paths
from images.inputs import KINDS, Kind
from images.tools import ROOT, ImageError, locked, say

KEPT = 6
"""Builds of an image that are kept, the newest ones: a test may still import an earlier one."""
NEEDED = 2 << 30
"""Bytes that a build of everything takes, the base's tree included."""


class Built(TypedDict):
    """One image in what ``python -m images build`` prints."""

    image: str
    """Its name with its tag, which stays the same until an input changes."""
    archive: str
    """An OCI archive that carries this name."""
    bytes: int
    """Size of the archive."""


def build(cache: Path, base_image: str | None = None, only: Sequence[str] = ()) -> dict[str, Built]:
    """Build what is not there yet; all images by name.

    ``base_image`` is the base of operator and sidecar, as a registry knows it; engine-cpu is always on our own. A build
    asks for it again only when another input changes: name it by digest.

    Raises:
        ImageError: names the step that failed.
    """
    kinds = [kind for kind in KINDS if not only or kind.name in only]
    with locked(cache):
        return {kind.name: _one(cache, kind, base_image if kind.published else None) for kind in kinds}


def own_base() -> str:
    """Name of the default base on this machine."""
    release = base.codename()
    return f"localhost/xpyd-base:{release}-{inputs.digest(inputs.BASE_RECIPE, release)}"


def name_of(kind: Kind, base_name: str) -> str:
    """Name and tag of an image on a base."""
    mounts = [] if kind.projects else [mount["path"] for mount in host_paths()["mounts"]]
    tag = f"{inputs.version()}-{inputs.digest(inputs.files_of(kind), base_name, *mounts)}"
    return f"localhost/xpyd-{kind.name}:{tag}"


def archive_of(cache: Path, image: str) -> Path:
    """Where an image's archive is."""
    return cache / (image.rpartition("/")[2].replace(":", "-") + ".tar")


def _one(cache: Path, kind: Kind, base_image: str | None) -> Built:
    base_name, pull = base_image or own_base(), base_image is not None
    image = name_of(kind, base_name)
    archive = archive_of(cache, image)
    if not archive.exists():
        start = time.monotonic()
        buildah = Buildah(cache)
        buildah.sweep()
        if (free := shutil.disk_usage(cache).free) < NEEDED:
            raise ImageError(f"{cache}: {free >> 20} MiB free, {NEEDED >> 20} MiB are needed")
        if not pull and base_name not in buildah.images():
            base.make(buildah, base_name, cache)
        say(f"building {image}")
        with tempfile.TemporaryDirectory(prefix="context-", dir=cache) as context:
            arguments = {"BASE": base_name, "VERSION": inputs.version()}
            shutil.copy(inputs.HERE / "assemble.py", context)
            if not kind.projects:
                paths = host_paths()
                arguments["VENV"] = str(Path(paths["python"]).parent.parent)
                arguments["MOUNTS"] = " ".join(mount["path"] for mount in paths["mounts"])
            else:
                _fill(Path(context), cache, kind, *buildah.python_of(base_name, pull=pull))
            buildah.bud(image, inputs.HERE / f"Containerfile.{kind.name}", Path(context), arguments, pull=pull)
        buildah.export(image, archive)
        _prune(cache, buildah, kind, None if pull else base_name)
        say(f"{image}: {archive.stat().st_size >> 20} MiB, {time.monotonic() - start:.0f} s")
    return {"image": image, "archive": str(archive), "bytes": archive.stat().st_size}


def _fill(context: Path, cache: Path, kind: Kind, python: str, glibc: str) -> None:
    """Put into a build's folder what its Containerfile copies, for a base with these versions."""
    requirements = ROOT / "requirements" / f"{kind.name}-image.txt"
    shutil.copy(requirements, context / "requirements.txt")
    shutil.copytree(wheels.download(cache, requirements, python, glibc), context / "wheels")
    shutil.copytree(wheels.download(cache, inputs.PIP, python, glibc), context / "pip")
    for project in kind.projects:
        wheels.own(project, context / "own")
    if kind.extras is not None:
        for version in wheels.ENGINE_PYTHONS:
            folder = wheels.download(cache, kind.extras, version, wheels.ENGINE_GLIBC)
            shutil.copytree(folder, context / "extras", dirs_exist_ok=True)
    wheels.prune(cache)


def _prune(cache: Path, buildah: Buildah, kind: Kind, base_name: str | None) -> None:
    """Remove builds of an image that newer ones have replaced, and bases but for the one that was just used."""
    archives = sorted(cache.glob(f"xpyd-{kind.name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for path in archives[:-KEPT]:
        path.unlink()
    kept = {path.name for path in cache.glob("xpyd-*.tar")}
    stored = [name for name in buildah.images() if name.startswith("localhost/xpyd-")]
    bases = [name for name in stored if name.startswith("localhost/xpyd-base:")]
    buildah.remove([name for name in stored if name not in bases and archive_of(cache, name).name not in kept])
    if base_name is not None:
        buildah.remove([name for name in bases if name != base_name])
