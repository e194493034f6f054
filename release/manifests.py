"""What a cluster gets: the CRDs, ``install.yaml`` and the chart, both with images by digest.

A tag can be moved; a digest is the image. So what a release applies is what it was tested with.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

from images.tools import ROOT, ImageError, run
from images.tree import EPOCH

from release import toolbox

NAMES = ("xpyd-operator", "xpyd-sidecar")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY = re.compile(r"[a-z0-9][a-z0-9._:/-]*")
SIZE_MAX = 1 << 20
"""Bytes of a file that names images."""


class Image(NamedTuple):
    """One image of a release."""

    repository: str
    """Registry, path and name, such as registry.example/team/xpyd-operator."""
    digest: str


def images(path: Path) -> dict[str, Image]:
    """The images by name (`NAMES`), from what ``python -m images push`` or ``build`` has printed.

    Raises:
        ImageError: the file is not of that form, or one is missing, twice there or without a digest.
    """
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(SIZE_MAX))
    except (OSError, ValueError) as error:
        raise ImageError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ImageError(f"{path}: must be what `python -m images push` prints: references, each with its digest")
    found: dict[str, Image] = {}
    for name, value in document.items():
        built = value if isinstance(value, dict) else {"image": name, "digest": value}
        repository, digest = re.sub(r":[^:/]+$", "", str(built.get("image"))), str(built.get("digest"))
        short = repository.rpartition("/")[2]
        if short not in NAMES:
            continue
        if short in found:
            raise ImageError(f"{path}: {short} is named twice")
        if not REPOSITORY.fullmatch(repository) or not DIGEST.fullmatch(digest):
            raise ImageError(f"{path}: {name}: needs a repository and a digest of the form sha256:… (64 hex digits)")
        found[short] = Image(repository, digest)
    if missing := [name for name in NAMES if name not in found]:
        raise ImageError(f"{path}: names no {' and no '.join(missing)}")
    return found


def write(out: Path, wanted: dict[str, Image], version: str, kubectl: str) -> None:
    """Write crds.yaml, install.yaml and xpyd-VERSION.tgz, the chart.

    ``wanted``: from `images`. ``kubectl``: the program, whose kustomize is used.

    Raises:
        ImageError: kustomize failed, or what it made does not name an image by its digest.
    """
    (out / "crds.yaml").write_text("---\n".join(path.read_text().removeprefix("---\n")
                                                for path in sorted((ROOT / "crds").glob("*.yaml"))))
    text = f"# xpyd {version}. Apply with: kubectl apply --server-side -f install.yaml\n{_kustomized(wanted, kubectl)}"
    for name, image in wanted.items():
        if f"{image.repository}@{image.digest}" not in text:
            raise ImageError(f"install.yaml does not name {name} by its digest")
    (out / "install.yaml").write_text(text)
    (out / f"xpyd-{version}.tgz").write_bytes(chart(wanted))


def _kustomized(wanted: dict[str, Image], kubectl: str) -> str:
    """What manifests/base makes with these images."""
    with toolbox.temporary("manifests") as name:
        work = Path(name)
        for part in ("manifests/base", "crds"):
            shutil.copytree(ROOT / part, work / part)
        (work / "release").mkdir()
        shutil.copy(ROOT / "manifests/overlays/images/images.yaml", work / "release")
        entries = [{"name": key, "newName": image.repository, "digest": image.digest} for key, image in wanted.items()]
        (work / "release/kustomization.yaml").write_text(json.dumps({
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["../manifests/base"],
            "configurations": ["images.yaml"], "images": entries}))
        return run([kubectl, "kustomize", str(work / "release")])


def chart(wanted: dict[str, Image]) -> bytes:
    """The chart as an archive that Helm takes, with these images in its values; equal inputs give equal bytes.

    Raises:
        ImageError: values.yaml has no place for an image.
    """
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=EPOCH, filename="") as packed, \
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted((ROOT / "charts/xpyd").rglob("*")):
            if not path.is_file():
                continue
            content = path.read_bytes()
            if path.name == "values.yaml":
                content = _valued(content.decode(), wanted).encode()
            entry = tarfile.TarInfo(f"xpyd/{path.relative_to(ROOT / 'charts/xpyd').as_posix()}")
            entry.size, entry.mtime, entry.mode = len(content), EPOCH, 0o644
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def _valued(text: str, wanted: dict[str, Image]) -> str:
    """The chart's values with a repository and a digest for each image; everything else stays, comments too."""
    for name, image in wanted.items():
        place = re.compile(rf"^( *)repository: {re.escape(name)}$(.*?)^\1digest: \"\"$", re.MULTILINE | re.DOTALL)
        text, count = place.subn(rf'\1repository: {image.repository}\2\1digest: "{image.digest}"', text)
        if count != 1:
            raise ImageError(f"charts/xpyd/values.yaml has {count} places for {name}, not one")
    return text
