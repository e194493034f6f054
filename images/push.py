"""Images to a registry."""

from __future__ import annotations

from pathlib import Path

from images import inputs
from images.build import Built
from images.buildah import Buildah
from images.tools import ImageError, locked, say


def check(registry: str) -> str:
    """A destination, ready for names: a host with an optional port and path.

    Raises:
        ImageError: it is something else.
    """
    name = registry.rstrip("/")
    if not name or "://" in name or any(character.isspace() for character in name):
        raise ImageError(f"{registry!r} is no registry: give its host and path, as in registry.example:5000/team")
    return name


def push(cache: Path, built: dict[str, Built], registry: str, tag: str, insecure: bool) -> dict[str, str]:
    """Push what is published as ``REGISTRY/xpyd-NAME:TAG``; the references with their digests.

    ``registry`` is from `check`. ``insecure`` allows plain HTTP. The credentials are those of `buildah login`.

    Raises:
        ImageError: the registry is unreachable or refuses.
    """
    pushed = {}
    for kind in inputs.KINDS:
        if not kind.published or kind.name not in built:
            continue
        with locked(cache):
            buildah, image = Buildah(cache), built[kind.name]["image"]
            if image not in buildah.images():
                buildah.call("pull", "-q", f"oci-archive:{built[kind.name]['archive']}")
            name = f"{registry}/xpyd-{kind.name}:{tag}"
            note = cache / "pushed-digest"
            say(f"pushing {name}")
            buildah.call("push", "-q", "--digestfile", str(note), *(["--tls-verify=false"] if insecure else []), image,
                         f"docker://{name}")
            pushed[name] = note.read_text().strip()
            note.unlink()
    return pushed
