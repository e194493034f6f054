"""OCI images: layers in a cache, and archives that `ctr image import` and skopeo take.

The format is that of the OCI image specification 1.0: blobs by digest, a manifest for each platform, and an index. Whoever
builds from the same files with the same zlib gets the same digests.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from images.platforms import Platform
from images.tools import ImageError
from images.tree import EPOCH, Tree

CREATED = "2020-02-01T18:40:00Z"
"""`EPOCH` in words."""
KIND = "application/vnd.oci.image"
INDEX = f"{KIND}.index.v1+json"
MANIFEST = f"{KIND}.manifest.v1+json"
REFERENCE = "org.opencontainers.image.ref.name"
NAME = "io.containerd.image.name"
LEVEL = 6


class Layer(NamedTuple):
    """A layer as it is stored."""

    file: Path
    digest: str
    """sha256 of the compressed file, in hex."""
    content: str
    """sha256 of what it unpacks to."""
    media_type: str = f"{KIND}.layer.v1.tar+gzip"


class Layers:
    """Layers by the names that their makers give them, which must say all that they are made from."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "layers"
        self.folder.mkdir(parents=True, exist_ok=True)

    def find(self, name: str) -> tuple[Layer, Tree] | None:
        """A layer and its files, or None where it was not made yet."""
        file, note = self.folder / f"{name}.tar.gz", self.folder / f"{name}.json"
        if not file.exists() or not note.exists():
            return None
        noted = json.loads(note.read_text())
        tree = Tree()
        with tarfile.open(file) as archive:
            tree.unpack(archive)
        file.touch()
        return Layer(file, noted["digest"], noted["content"]), tree

    def add(self, name: str, tree: Tree) -> Layer:
        """Store a tree as a layer."""
        data = tree.tar()
        packed = gzip.compress(data, LEVEL, mtime=0)
        layer = Layer(self.folder / f"{name}.tar.gz", sha256(packed), sha256(data))
        for path, content in ((layer.file, packed), (layer.file.with_name(f"{name}.json"), json.dumps(
                {"digest": layer.digest, "content": layer.content}).encode())):
            temporary = path.with_name(f"{path.name}.part")
            temporary.write_bytes(content)
            temporary.replace(path)
        return layer

    def prune_oldest(self, kept: int) -> None:
        """Keep the layers that were used last."""
        for path in sorted(self.folder.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)[:-kept]:
            path.unlink()
            path.with_name(f"{path.name.removesuffix('.tar.gz')}.json").unlink(missing_ok=True)


def sha256(data: bytes) -> str:
    """In hex."""
    return hashlib.sha256(data).hexdigest()


class Image:
    """Blobs of an image under construction; the manifest is the last of them."""

    def __init__(self, platform: Platform, settings: Mapping[str, Any], layers: Sequence[Layer]) -> None:
        self.files = {layer.digest: layer.file for layer in layers}
        self.blobs: dict[str, bytes] = {}
        config = {
            "created": CREATED, "architecture": platform.name, "os": "linux", "config": dict(settings),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.content}" for layer in layers]},
            "history": [{"created": CREATED, "created_by": "python -m images"} for _ in layers]}
        manifest = {
            "schemaVersion": 2, "mediaType": MANIFEST, "config": self.blob(config, f"{KIND}.config.v1+json"),
            "layers": [{"mediaType": layer.media_type, "digest": f"sha256:{layer.digest}",
                        "size": layer.file.stat().st_size} for layer in layers]}
        self.described = {**self.blob(manifest, MANIFEST), "platform": {"architecture": platform.name, "os": "linux"}}

    def blob(self, content: object, media_type: str) -> dict[str, Any]:
        """Keep a JSON object; its descriptor."""
        data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        self.blobs[sha256(data)] = data
        return {"mediaType": media_type, "digest": f"sha256:{sha256(data)}", "size": len(data)}

    def write(self, archive: Path, name: str) -> None:
        """Write an OCI archive that carries the image's name."""
        write(archive, name, self.described, {**self.blobs, **self.files})


def index(archive: Path, name: str, parts: Sequence[Path]) -> None:
    """Write an archive whose one image is an index over the images of other archives, one for each platform.

    Raises:
        ImageError: two of them are for one platform.
    """
    opened = [tarfile.open(part) for part in parts]  # noqa: SIM115 (closed below, all of them)
    try:
        blobs: dict[str, bytes | Path | tarfile.ExFileObject] = {}
        described = []
        for part in opened:
            described += [{key: value for key, value in entry.items() if key != "annotations"}
                          for entry in json.loads(_read(part, "index.json"))["manifests"]]
            for member in part.getnames():
                if member.startswith("blobs/sha256/"):
                    blobs[member.rpartition("/")[2]] = _open(part, member)
        if len({entry["platform"]["architecture"] for entry in described}) != len(described):
            raise ImageError(f"{name}: two images for one platform")
        data = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": described}, sort_keys=True,
                          separators=(",", ":")).encode()
        blobs[sha256(data)] = data
        write(archive, name, {"mediaType": INDEX, "digest": f"sha256:{sha256(data)}", "size": len(data)}, blobs)
    finally:
        for part in opened:
            part.close()


def write(archive: Path, name: str, described: Mapping[str, Any],
          blobs: Mapping[str, bytes | Path | tarfile.ExFileObject]) -> None:
    """Write an archive with one image, or none where that fails. Blobs are bytes, files, or members of an open archive."""
    entry = {**described, "annotations": {NAME: name, REFERENCE: name}}
    temporary = archive.with_suffix(".part")
    try:
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
            _add(tar, "index.json", json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]},
                                               sort_keys=True).encode())
            for digest, content in sorted(blobs.items(), key=lambda item: item[0]):
                _add(tar, f"blobs/sha256/{digest}", content)
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)


def digest_of(archive: Path) -> str:
    """The digest under which a registry has an archive's image, as ``sha256:…``."""
    with tarfile.open(archive) as tar:
        return str(json.loads(_read(tar, "index.json"))["manifests"][0]["digest"])


def _add(tar: tarfile.TarFile, path: str, content: bytes | Path | tarfile.ExFileObject) -> None:
    entry = tarfile.TarInfo(path)
    entry.mode, entry.mtime = 0o644, EPOCH
    if isinstance(content, bytes):
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    elif isinstance(content, Path):
        entry.size = content.stat().st_size
        with content.open("rb") as file:
            tar.addfile(entry, file)
    else:
        entry.size = content.seek(0, os.SEEK_END)
        content.seek(0)
        tar.addfile(entry, content)


def _open(tar: tarfile.TarFile, path: str) -> tarfile.ExFileObject:
    try:
        file = tar.extractfile(path)
    except KeyError:
        file = None
    if not isinstance(file, tarfile.ExFileObject):
        raise ImageError(f"no {path} in {tar.name!r}: it is no OCI archive")
    return file


def _read(tar: tarfile.TarFile, path: str) -> bytes:
    return _open(tar, path).read()
