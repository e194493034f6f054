"""Cuts of a prompt: what a router calls its prefixes, and how an engine finds each of them in its cache.

    router   hashes the prompt's bytes up to each cut                 key, and the share of the prompt before the cut
    engine   knows the prompt's tokens, and a hash of each full block  share of the tokens → the last full block before it

So routers and engines speak of the same prefix, and no router needs a tokenizer. Keys are the same in all routers of a
service, and those of other services are other ones (``prompt.cut_seed``).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

FIELD: Final = "xpyd_cuts"
"""In ``kv_transfer_params``, beside a leg or alone."""
WHOLE: Final = 1 << 16
"""The share of a whole prompt."""
MOST: Final = 128
"""Cuts of one prompt."""
_CUT: Final = struct.Struct(">HQ")


class PromptCut(NamedTuple):
    """One prefix of a prompt."""

    share: int
    """How much of the prompt it is, in ``1 / WHOLE``: 1 to ``WHOLE``."""
    key: int
    """64 bits."""


def encode(cuts: Iterable[PromptCut]) -> str:
    """As it stands in a request to an engine: base64 of 10 bytes a cut, the share less one and the key, big-endian."""
    return base64.b64encode(b"".join([_CUT.pack(cut.share - 1, cut.key) for cut in cuts])).decode("ascii")


def decode(text: object) -> Iterator[PromptCut]:
    """The cuts that ``encode`` wrote, in its order.

    Raises:
        ValueError: it is not what ``encode`` writes, or has more than ``MOST`` cuts.
    """
    if not isinstance(text, str):
        raise ValueError(f"{FIELD}: not a text but {type(text).__name__}")  # noqa: TRY004 (as of all bad words of a request)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{FIELD}: {error}") from None
    if len(raw) % _CUT.size or len(raw) > MOST * _CUT.size:
        raise ValueError(f"{FIELD}: {len(raw)} bytes are not at most {MOST} cuts of {_CUT.size}")
    return (PromptCut(share + 1, key) for share, key in _CUT.iter_unpack(raw))
