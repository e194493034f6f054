"""Images to a registry, by skopeo: what is there in the end has the digests that were built."""

from __future__ import annotations

from pathlib import Path

from images import inputs
from images.build import Built
from images.tools import ImageError, locked, need, run, say


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

    ``registry`` is from `check`. ``insecure`` allows plain HTTP. The credentials are those of `skopeo login`.

    Raises:
        ImageError: the registry is unreachable or refuses.
    """
    need("skopeo", "skopeo")
    pushed = {}
    for kind in inputs.KINDS:
        if not kind.published or kind.name not in built:
            continue
        with locked(cache):
            name = f"{registry}/xpyd-{kind.name}:{tag}"
            say(f"pushing {name} for {', '.join(built[kind.name]['platforms'])}")
            # The archive is our own: what this machine thinks of others' signatures has no say in it.
            run(["skopeo", "--insecure-policy", "copy", "-q", "--all", "--preserve-digests",
                 *(["--dest-tls-verify=false"] if insecure else []), f"oci-archive:{built[kind.name]['archive']}",
                 f"docker://{name}"])
            pushed[name] = built[kind.name]["digest"]
    return pushed
