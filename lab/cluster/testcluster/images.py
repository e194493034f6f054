"""Container images: those of a single static program are written here; any archive is brought to the cluster's node."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testcluster.errors import ClusterError, CommandFailed
from testcluster.state import Folder

IMPORT_S = 300.0
NAME = "io.containerd.image.name"
REFERENCE = "org.opencontainers.image.ref.name"
_OCI = "application/vnd.oci.image"


def socket(folder: Folder) -> Path:
    """Where the cluster's containerd listens."""
    return folder / "node/containerd.sock"


def assemble(archive: Path, reference: str, program: Path, entrypoint: Sequence[str]) -> Path:
    """Write an OCI archive (an image layout in a tar file) with one layer that holds one program, as ``/<name>``."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    blobs = {}

    def add(data: bytes, kind: str, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"{_OCI}.{kind}", "digest": f"sha256:{digest}", "size": len(data), **more}

    layers = [add(layer, "layer.v1.tar")]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint)},
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {"schemaVersion": 2, "mediaType": f"{_OCI}.manifest.v1+json",
                "config": add(json.dumps(config).encode(), "config.v1+json"), "layers": layers}
    described = add(json.dumps(manifest).encode(), "manifest.v1+json", annotations={NAME: reference, REFERENCE: reference})
    index = {"schemaVersion": 2, "manifests": [described]}
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    partial = archive.with_name(archive.name + ".partial")
    partial.write_bytes(_tar(files, mode=0o644))
    partial.rename(archive)
    return archive


def names(archive: Path) -> list[str]:
    """The full references that an OCI archive carries.

    Raises:
        ClusterError: it is not one, or its images have no names.
    """
    try:
        with tarfile.open(archive) as tar:
            member = tar.extractfile("index.json")
            index = json.load(member) if member is not None else {}
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise ClusterError(f"{archive} is not an OCI archive: {error}") from None
    notes = [image.get("annotations") or {} for image in index.get("manifests", ())]
    found = [note.get(NAME) or note.get(REFERENCE) or "" for note in notes]
    if not found or not all("/" in name for name in found):
        raise ClusterError(f"{archive}: every image in it needs a full name such as localhost/name:tag, not {found}")
    return found


def load(folder: Folder, archive: Path) -> list[str]:
    """Import an OCI archive; the references under which pods find its images (``imagePullPolicy: Never`` or IfNotPresent).

    Raises:
        ClusterError: it is no such archive, or its images have no names.
        CommandFailed: containerd refuses it.
    """
    found = names(archive)
    ctr(folder, "images", "import", str(archive))
    return found


def ctr(folder: Folder, *arguments: str) -> str:
    """containerd's own client, in the namespace of the kubelet."""
    command = ["ctr", f"--address={socket(folder)}", "--namespace=k8s.io", *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_S,
                              check=False)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"ctr {' '.join(arguments)} did not end within {IMPORT_S:.0f} s") from None
    if done.returncode:
        raise CommandFailed(f"ctr {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    """The same bytes for the same files: no times, no owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
