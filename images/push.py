"""Images to a registry, or to an OCI layout in a folder."""

from __future__ import annotations

from pathlib import Path

from images import inputs
from images.build import Built
from images.buildah import Buildah
from images.tools import ImageError, locked, say


def push(cache: Path, built: dict[str, Built], registry: str, tag: str, insecure: bool) -> dict[str, str]:
    """Push what is published as ``REGISTRY/xpyd-NAME:TAG``; the references with their digests.

    ``registry`` is a host with an optional path, or ``oci:FOLDER``. ``insecure`` allows plain HTTP. The credentials are
    those of `buildah login`.

    Raises:
        ImageError: the registry is named wrongly, unreachable or refuses.
    """
    folder = registry.removeprefix("oci:") if registry.startswith("oci:") else None
    registry = registry.rstrip("/")
    if not registry or (folder is None and ("://" in registry or any(character.isspace() for character in registry))):
        raise ImageError(f"{registry!r} is no registry: give its host and path, as in registry.example:5000/team")
    pushed = {}
    for kind in inputs.KINDS:
        if not kind.published or kind.name not in built:
            continue
        with locked(cache):
            buildah, image = Buildah(cache), built[kind.name]["image"]
            if image not in buildah.images():
                buildah.call("pull", "-q", f"oci-archive:{built[kind.name]['archive']}")
            name = f"{registry.removeprefix('oci:')}/xpyd-{kind.name}:{tag}"
            note = cache / "pushed-digest"
            say(f"pushing {name}")
            buildah.call("push", "-q", "--digestfile", str(note), *(["--tls-verify=false"] if insecure else []), image,
                         f"docker://{name}" if folder is None else f"oci:{name}")
            pushed[name] = note.read_text().strip()
            note.unlink()
    return pushed
