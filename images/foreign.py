"""A base of somebody else (--base): what a build must know of it is read from its files, without running anything of it."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

from images.oci import Layer
from images.platforms import Platform
from images.tools import ImageError, need, run, say
from images.tree import Tree

OLDEST = (3, 11)
GLIBC = re.compile(rb"GNU C Library [^\n]*version (\d+\.\d+)")
LIBRARIES = ("lib", "usr/lib", "lib64", "usr/lib64")
PACKED = {"gzip": "r:gz", "tar": "r:"}


class Base(NamedTuple):
    """What images are built on."""

    layers: tuple[Layer, ...]
    tree: Tree
    python: str
    """Path of python3 in it."""
    version: str
    glibc: str
    path: str
    """Folders of programs, as in PATH."""


def fetch(reference: str, platform: Platform, folder: Path) -> Base:
    """A base from a registry, or from where skopeo's reference says (``oci-archive:FILE``), with its layers in a folder.

    Raises:
        ImageError: it cannot be had, is not for this platform, or lacks python3 or glibc.
    """
    need("skopeo", "skopeo")
    source = reference if re.match(r"[a-z-]+:(//|/|\.)", reference) else f"docker://{reference}"
    say(f"taking {reference} for {platform.name}")
    run(["skopeo", "--override-os", "linux", "--override-arch", platform.name, "copy", "-q", source, f"oci:{folder}:base"])
    manifest = _blob(folder, json.loads((folder / "index.json").read_text())["manifests"][0]["digest"])
    config = _blob(folder, manifest["config"]["digest"])
    if config.get("architecture") != platform.name:
        raise ImageError(f"{reference} is for {config.get('architecture')}, not for {platform.name}")
    tree, layers = Tree(), []
    for described, content in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        kind = described["mediaType"].rpartition(".")[2]
        file = folder / "blobs/sha256" / described["digest"].partition(":")[2]
        mode = PACKED.get(kind.rpartition("+")[2])
        if mode is None:
            raise ImageError(f"{reference} has a layer that is packed as {kind}; gzip is known")
        with tarfile.open(file, mode) as archive:  # type: ignore[call-overload]
            tree.unpack(archive, whiteouts=True)
        layers.append(Layer(file, file.name, content.partition(":")[2], described["mediaType"]))
    env = dict(word.partition("=")[::2] for word in config.get("config", {}).get("Env") or ())
    return described_as(tuple(layers), tree, env.get("PATH", "/usr/local/bin:/usr/bin:/bin"))


def described_as(layers: tuple[Layer, ...], tree: Tree, path: str) -> Base:
    """What is in a tree.

    Raises:
        ImageError: it lacks python3 or glibc, or the one that it has is too old.
    """
    python = next((f"{folder.strip('/')}/python3" for folder in path.split(":")
                   if tree.kind(f"{folder.strip('/')}/python3") == "file"), "")
    version = tree.resolve(python).rpartition("/python")[2] if python else ""
    if not re.fullmatch(r"3\.\d+", version):
        raise ImageError(f"the base has no python3 in {path}")
    if tuple(int(number) for number in version.split(".")) < OLDEST:
        raise ImageError(f"the base has Python {version}: 3.11 or later is needed")
    return Base(layers, tree, python, version, glibc_of(tree), path)


def glibc_of(tree: Tree) -> str:
    """Version of glibc, as "2.36"; nothing where there is none."""
    folders = [*LIBRARIES, *(f"{folder}/{name}" for folder in LIBRARIES for name in tree.names(folder)
                             if name.endswith("-linux-gnu"))]
    for folder in folders:
        if (found := GLIBC.search(tree.read(f"{folder}/libc.so.6") or b"")) is not None:
            return found[1].decode()
    return ""


def _blob(folder: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "blobs" / digest.replace(":", "/")).read_text())
    return found
