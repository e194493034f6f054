"""What a prompt's KV depends on besides the model: the identity that both legs must share.

Prefill sends the digest with ANNOUNCE; decode refuses a difference, since KV of another prompt would give a fluent wrong
answer. Position matters for multimodal items, as the same image at another place gives other KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class MediaItem(NamedTuple):
    """One multimodal item of a prompt: the hash of its content and the tokens it stands for."""

    hash: str
    offset: int
    length: int


def identity(tokens: Sequence[int], media: Iterable[MediaItem] = (), lora: tuple[str, str] | None = None,
             cache_salt: str | None = None) -> bytes:
    """32 bytes over the prompt token ids, multimodal items, LoRA adapter and cache salt. ``lora``: its name, and the digest
    of its files; where nobody has looked at these, their path.

    Every part is preceded by its length, so that no two different inputs give the same bytes.
    """
    digest = hashlib.sha256(b"xpyd identity 1\n")
    ids = array("q", tokens)
    digest.update(len(ids).to_bytes(8, "little"))
    digest.update(ids.tobytes())
    for item in media:
        _text(digest, item.hash)
        digest.update(array("q", (item.offset, item.length)).tobytes())
    digest.update(b"\nlora" if lora else b"\nbase")
    for part in lora or ():
        _text(digest, part)
    digest.update(b"\nsalt" if cache_salt is not None else b"\nnone")
    if cache_salt is not None:
        _text(digest, cache_salt)
    return digest.digest()


def _text(digest: hashlib._Hash, text: str) -> None:
    raw = text.encode()
    digest.update(len(raw).to_bytes(8, "little"))
    digest.update(raw)
