"""Where a model comes from: the forms of ``spec.model.source``.

    Qwen/Qwen3-8B        a hub id
    /models/qwen         an absolute path inside the engine image (of this host with ``xpyd up``)
    pvc://claim/path     a folder on a PersistentVolumeClaim of the service's namespace
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


class Beside(msgspec.Struct, frozen=True):
    """A path relative to the folder of the document."""

    path: str


Source = Hub | Folder | Claim | Beside

_HUB = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*(/[A-Za-z0-9][-A-Za-z0-9_.]*)?")
_CLAIM = re.compile(r"pvc://([a-z0-9](?:[-a-z0-9.]*[a-z0-9])?)(?:/(.*))?")
FORMS = (
    "a hub id (Qwen/Qwen3-8B), an absolute path (/models/qwen), pvc://claim/path, or a path beside this document "
    "that begins with ./ or ../"
)
SOURCE_PATTERN = (
    r"^([A-Za-z0-9][-A-Za-z0-9_.]*(/[A-Za-z0-9][-A-Za-z0-9_.]*)?|/.*|[.][.]?/.*|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?)$"
)
"""The same in one expression, for the schema."""


def parse(text: str) -> Source:
    """Tell the forms apart.

    Raises:
        ValueError: it is none of them.
    """
    if text.startswith("/"):
        return Folder(path=text)
    if text.startswith(("./", "../")):
        return Beside(path=text)
    if claim := _CLAIM.fullmatch(text):
        return Claim(claim=claim[1], path=(claim[2] or "").strip("/"))
    if _HUB.fullmatch(text):
        return Hub(id=text)
    raise ValueError(f"{text!r} is not {FORMS}")
