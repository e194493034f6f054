"""The images: from their inputs to archives that `ctr image import` takes."""

from __future__ import annotations

import posixpath
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from images import base, bytecode, elf, foreign, inputs, oci, wheels
from images.debian import codename
from images.foreign import Base
from images.hosts import host_paths
from images.inputs import KINDS, PREFIX, USER, Kind
from images.platforms import Platform, native
from images.tools import ImageError, locked, say
from images.tree import Tree

KEPT = 6
"""Builds of an image that are kept, the newest ones: a test may still import an earlier one."""
NEEDED = 1 << 30
"""Bytes that a build of everything takes for one platform."""
OURS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Built(TypedDict):
    """One image in what ``python -m images build`` prints."""

    image: str
    """Its name with its tag, which stays the same until an input changes."""
    archive: str
    """An OCI archive that carries this name."""
    bytes: int
    """Size of the archive."""
    digest: str
    """What a registry calls it; equal for equal inputs."""
    platforms: list[str]


def build(cache: Path, base_image: str | None = None, only: Sequence[str] = (),
          platforms: Sequence[Platform] = ()) -> dict[str, Built]:
    """Build what is not there yet; all images by name. Several platforms make an index, of what is published.

    ``base_image`` is the base of operator and sidecar, as a registry knows it; engine-cpu is always on our own. A build
    asks for it again only when another input changes: name it by digest.

    Raises:
        ImageError: names the step that failed.
    """
    wanted = tuple(platforms) or (native(),)
    kinds = [kind for kind in KINDS if (not only and (kind.published or wanted == (native(),))) or kind.name in only]
    if impossible := [kind.name for kind in kinds if not kind.published and wanted != (native(),)]:
        raise ImageError(f"{', '.join(impossible)} is for this machine's {native().name} alone")
    with locked(cache):
        return {kind.name: _built(cache, kind, base_image if kind.published else None, wanted) for kind in kinds}


def own_base(kind: Kind, platform: Platform) -> str:
    """Name of an image's default base on this machine."""
    release = codename()
    return base.name_of(release, platform, kind.packages, inputs.digest(inputs.BASE_RECIPE, release, *kind.packages))


def name_of(kind: Kind, base_names: Sequence[str], platforms: Sequence[Platform]) -> str:
    """Name and tag of an image on a base for each platform."""
    mounts = [] if kind.projects else [mount["path"] for mount in host_paths()["mounts"]]
    files = [file for platform in platforms for file in inputs.files_of(kind, platform)]
    digest = inputs.digest(files, *base_names, *(platform.name for platform in platforms), *mounts)
    apart = "index-" if len(platforms) > 1 else "" if platforms == (native(),) else f"{platforms[0].name}-"
    return f"localhost/xpyd-{kind.name}:{inputs.version()}-{apart}{digest}"


def archive_of(cache: Path, image: str) -> Path:
    """Where an image's archive is."""
    return cache / (image.rpartition("/")[2].replace(":", "-") + ".tar")


def _built(cache: Path, kind: Kind, base_image: str | None, platforms: tuple[Platform, ...]) -> Built:
    names = [base_image or own_base(kind, platform) for platform in platforms]
    image = name_of(kind, names, platforms)
    archive = archive_of(cache, image)
    if not archive.exists():
        start = time.monotonic()
        if (free := shutil.disk_usage(cache).free) < NEEDED:
            raise ImageError(f"{cache}: {free >> 20} MiB free, {NEEDED >> 20} MiB are needed")
        if len(platforms) > 1:
            parts = [_built(cache, kind, base_image, (platform,)) for platform in platforms]
            oci.index(archive, image, [Path(part["archive"]) for part in parts])
        else:
            say(f"building {image}")
            _one(cache, kind, base_image, platforms[0], image)
        _prune(cache, kind)
        say(f"{image}: {archive.stat().st_size >> 20} MiB, {time.monotonic() - start:.0f} s")
    return {"image": image, "archive": str(archive), "bytes": archive.stat().st_size, "digest": oci.digest_of(archive),
            "platforms": [platform.name for platform in platforms]}


def _one(cache: Path, kind: Kind, base_image: str | None, platform: Platform, image: str) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as name:
        work = Path(name)
        if base_image is not None:
            below = foreign.fetch(base_image, platform, work / "base")
        else:
            layer, files = base.make(oci.Layers(cache), own_base(kind, platform), platform, kind.packages)
            below = foreign.described_as((layer,), files, OURS)
        tree = Tree()
        add_user(tree, below.tree)
        if kind.projects:
            settings = inputs.settings(kind, f"/{PREFIX}/bin:{below.path}")
            _environment(tree, cache, kind, platform, below)
        else:
            paths = host_paths()
            settings = inputs.settings(kind, f"{Path(paths['python']).parent}:{below.path}")
            for mount in paths["mounts"]:
                tree.folder(mount["path"])
        elf.check(tree, platform, below.tree)
        layers = (*below.layers, oci.Layers(work).add("own", tree))
        oci.Image(platform, settings, layers).write(archive_of(cache, image), image)


def _environment(tree: Tree, cache: Path, kind: Kind, platform: Platform, below: Base) -> None:
    """Make the virtual environment of an image."""
    found = sorted(wheels.download(cache, platform, inputs.lock(kind.name, platform), below.version, below.glibc).iterdir())
    with tempfile.TemporaryDirectory(prefix="own-", dir=cache) as own:
        found += [wheels.own(cache, project, Path(own), platform) for project in kind.projects]
        environment(tree, found, below)
    if kind.extras:
        lock = inputs.lock("engine", platform)
        extras = [wheel for version in wheels.ENGINE_PYTHONS
                  for wheel in wheels.download(cache, platform, lock, version, wheels.ENGINE_GLIBC).iterdir()]
        wheels.extras(tree, f"{PREFIX}/share/xpyd/engine", extras)
    wheels.prune(cache)


def environment(tree: Tree, found: Sequence[Path], below: Base) -> None:
    """Unpack wheels into what ``python -m venv`` would have made, and compile them.

    Raises:
        ImageError: a wheel cannot be unpacked, or there is no Python to compile with.
    """
    tree.link(f"{PREFIX}/bin/python", f"/{below.python}")
    for name in ("python3", f"python{below.version}"):
        tree.link(f"{PREFIX}/bin/{name}", "python")
    home = posixpath.dirname(below.python)
    tree.file(f"{PREFIX}/pyvenv.cfg",
              f"home = /{home}\ninclude-system-site-packages = false\nversion = {below.version}\n".encode())
    for wheel in found:
        wheels.install(tree, wheel, PREFIX, below.version)
    bytecode.add(tree, [f"{PREFIX}/lib"], below.version)


def add_user(tree: Tree, below: Tree) -> None:
    """Name the user that containers run as: libraries look it up."""
    for path, line in (("etc/passwd", f"xpyd:x:{USER}:{USER}::/tmp:/usr/sbin/nologin"), ("etc/group", f"xpyd:x:{USER}:")):
        text = (below.read(path) or b"").decode().rstrip()
        if not any(entry.split(":")[2:3] == [str(USER)] for entry in text.splitlines()):
            tree.file(path, f"{text}\n{line}\n".lstrip().encode())


def _prune(cache: Path, kind: Kind) -> None:
    """Remove builds of an image that newer ones have replaced, and old bases: each platform, and the index, by itself."""
    groups: dict[str, list[Path]] = {}
    for path in cache.glob(f"xpyd-{kind.name}-*.tar"):
        apart = re.search(r"-([a-z0-9]+)-[0-9a-f]{12}\.tar$", path.name)
        group = apart[1] if apart and apart[1] in {"index", "amd64", "arm64"} else ""
        groups.setdefault(group, []).append(path)
    for paths in groups.values():
        for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-KEPT]:
            path.unlink()
    oci.Layers(cache).prune_oldest(KEPT)
