"""Where a model comes from: the forms of ``spec.model.source``.

    Qwen/Qwen3-8B        a hub id
    /models/qwen         an absolute path inside the engine image (of this host with ``xpyd up``)
    pvc://claim/path     a folder on a PersistentVolumeClaim of the service's namespace
    oci://host/name:tag/path   a folder in an image, which the node pulls and mounts (a volume of the kind ``image``)
    s3://bucket/path     a bucket from which vLLM itself streams the weights; also gs:// and az://
    ./weights, ../m      a path beside the document; with ``xpyd up`` only
"""

from __future__ import annotations

import re

import msgspec


class Hub(msgspec.Struct, frozen=True):
    """A model of the hub."""

    id: str


class Folder(msgspec.Struct, frozen=True):
    """An absolute path where the engine runs."""

    path: str


class Claim(msgspec.Struct, frozen=True):
    """A folder on a PersistentVolumeClaim."""

    claim: str
    path: str
    """Relative to the root of the volume; empty: the root itself."""


class Image(msgspec.Struct, frozen=True):
    """A folder in an image."""

    reference: str
    """Registry, repository, and tag or digest, as a container's ``image`` says them."""
    path: str
    """Relative to the root of the image; empty: the root itself."""


class Bucket(msgspec.Struct, frozen=True):
    """A folder of an object store, read by vLLM (Run:ai Model Streamer)."""

    url: str


class RelativePath(msgspec.Struct, frozen=True):
    """A path relative to the folder of the document."""

    path: str


Source = Hub | Folder | Claim | Image | Bucket | RelativePath

_HUB = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*(/[A-Za-z0-9][-A-Za-z0-9_.]*)?")
_CLAIM = re.compile(r"pvc://([a-z0-9](?:[-a-z0-9.]*[a-z0-9])?)(?:/(.*))?")
_REPOSITORY = r"[A-Za-z0-9][-A-Za-z0-9.]*(:[0-9]{1,5})?(/[a-z0-9][-a-z0-9._]*)+"
_VERSION = r"(:[A-Za-z0-9_][-A-Za-z0-9_.]*(@sha256:[0-9a-f]{64})?|@sha256:[0-9a-f]{64})"
_IMAGE_PATTERN = rf"oci://{_REPOSITORY}({_VERSION}(/.*)?)?"
"""A folder follows a tag or a digest only: before one nobody could tell it from the name."""
_IMAGE = re.compile(rf"oci://(?P<name>{_REPOSITORY})((?P<version>{_VERSION})(?P<path>/.*)?)?")
_BUCKET_PATTERN = r"(s3|gs|az)://[A-Za-z0-9][-A-Za-z0-9_.]*(/[^ ?#]*)?"
_BUCKET = re.compile(_BUCKET_PATTERN)
FORMS = (
    "a hub id (Qwen/Qwen3-8B), an absolute path (/models/qwen), pvc://claim/path, an image with its registry "
    "(oci://registry.example/team/qwen:v1), a bucket (s3://bucket/path, gs:// or az://), or a path beside this document "
    "that begins with ./ or ../"
)
SOURCE_PATTERN = (
    r"^([A-Za-z0-9][-A-Za-z0-9_.]*(/[A-Za-z0-9][-A-Za-z0-9_.]*)?|/.*|[.][.]?/.*|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?"
    rf"|{_IMAGE_PATTERN}|{_BUCKET_PATTERN})$"
)
"""The same in one expression, for the schema."""
ADAPTER_FORMS = (
    "a folder as the engines see it (/adapters/sql), a hub id (org/sql-lora), or, with `xpyd up`, a path beside this "
    "document that begins with ./ or ../"
)
ADAPTER_PATTERN = r"^([A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*|/.*|[.][.]?/.*)$"
"""Where an adapter may come from. Volumes and images of its own would be another pod for each change."""


def parse(text: str) -> Source:
    """Tell the forms apart.

    Raises:
        ValueError: it is none of them.
    """
    if text.startswith("/"):
        return Folder(path=text)
    if text.startswith(("./", "../")):
        return RelativePath(path=text)
    if claim := _CLAIM.fullmatch(text):
        return Claim(claim=claim[1], path=(claim[2] or "").strip("/"))
    if image := _IMAGE.fullmatch(text):
        return Image(reference=image["name"] + (image["version"] or ""), path=(image["path"] or "").strip("/"))
    if _BUCKET.fullmatch(text):
        return Bucket(url=text)
    if _HUB.fullmatch(text):
        return Hub(id=text)
    raise ValueError(f"{text!r} is not {FORMS}")
