"""buildah with a storage of its own, so that whatever else it has on this machine stays untouched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from images.tools import need, run

ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
"""chroot needs neither a container runtime nor cgroups."""
EPOCH = "1580601600"
"""Time of everything that a build adds, so that equal inputs make equal images (the one that wheels are made with)."""
SCRIPT = "import json, platform, sys; print(json.dumps([*sys.version_info[:2], *platform.libc_ver()]))"


class Buildah:
    """One storage. Use it with the cache's lock held: `sweep` removes every working container in it."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def call(self, *arguments: str) -> str:
        """One command's standard output.

        Raises:
            ImageError: it failed; with what it said.
        """
        need("buildah", "buildah")
        folders = ["--root", str(self._cache / "storage"), "--runroot", str(self._cache / "run")]
        return run(["buildah", *folders, *arguments], env=ENVIRONMENT)

    def sweep(self) -> None:
        """Remove working containers that an interrupted build has left."""
        if self.containers():
            self.call("rm", "--all")

    def containers(self) -> list[str]:
        """Working containers by id."""
        return self.call("containers", "--quiet", "--noheading").split()

    def images(self) -> list[str]:
        """Names with tags of what is stored."""
        listed: list[dict[str, Any]] = json.loads(self.call("images", "--json") or "[]")
        return [name for image in listed for name in image.get("names") or ()]

    def bud(self, image: str, containerfile: Path, context: Path, arguments: Mapping[str, str], *, pull: bool) -> None:
        """Build ``image`` from a Containerfile; ``pull`` asks a registry for a base that is not stored."""
        words = ["bud", "--layers=false", "--force-rm", "--format", "oci", "--timestamp", EPOCH, "-q"]
        words.append("--pull" if pull else "--pull-never")
        for key, value in arguments.items():
            words += ["--build-arg", f"{key}={value}"]
        self.call(*words, "--file", str(containerfile), "--tag", image, str(context))

    def python_of(self, image: str, *, pull: bool) -> tuple[str, str]:
        """Versions of python3 and of glibc in an image, as "3.11" and "2.36".

        Raises:
            ImageError: it has no python3, or cannot be had.
        """
        container = self.call("from", "--pull" if pull else "--pull-never", image).strip()
        try:
            major, minor, library, version = json.loads(self.call("run", container, "--", "python3", "-c", SCRIPT))
        finally:
            self.call("rm", container)
        return f"{major}.{minor}", version if library == "glibc" else ""

    def export(self, image: str, archive: Path) -> None:
        """Write an OCI archive that carries the image's name."""
        temporary = archive.with_suffix(".part")
        temporary.unlink(missing_ok=True)
        try:
            self.call("push", "-q", image, f"oci-archive:{temporary}:{image}")
            temporary.replace(archive)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, images: Sequence[str]) -> None:
        """Forget images."""
        if images:
            self.call("rmi", "--force", *images)
