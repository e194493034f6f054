"""What a router can tell of a prompt without a tokenizer: keys of its prefixes, and about how many tokens it has.

    bytes   0    256   512   768   1024  1280 …  2048  2560 …      at most ``MAX_BYTES`` are read
    cuts         │     │     │     │     │       │     │           four to a doubling: a match is at most a fifth short

A key is the hash of everything before its cut, so equal keys mean an equal prefix, within this process alone (``hash`` is
keyed anew in each). ``first_key`` is the same in every router.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b

import msgspec

BLOCK_BYTES = 256
"""About 64 tokens of English text, 40 written as ids."""
MAX_BYTES = 64 << 10
"""What lies beyond is not looked at: a longer prompt is matched by its beginning."""
BYTES_PER_TOKEN = 4
"""Estimate for text: a token of English is about four bytes. The chat template is not counted."""

_IDS = re.compile(rb"\[[ \t\r\n]*[0-9]")


def _cuts() -> Iterator[int]:
    step, at = BLOCK_BYTES, BLOCK_BYTES
    while at <= MAX_BYTES:
        yield at
        if at == 8 * step:
            step *= 2
        at += step


CUTS: tuple[int, ...] = tuple(_cuts())


class PromptPrefix(msgspec.Struct, eq=False):
    """Keys of one prompt, made when they are first asked for."""

    _raw: bytes | memoryview
    _keys: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        """Bytes."""
        return len(self._raw)

    def first_key(self, end: int) -> int:
        """64 bits of a hash of the first ``end`` bytes, the same in every router (BLAKE2b)."""
        return key_of(memoryview(self._raw)[:min(end, MAX_BYTES)])

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Cut in bytes and key, the shortest prefix first; the whole prompt is the last, unless it is too long."""
        if self._keys is None:
            self._keys = list(self._made())
        return self._keys

    def _made(self) -> Iterator[tuple[int, int]]:
        data, size = memoryview(self._raw)[:MAX_BYTES].tobytes(), len(self._raw)
        before = key = 0
        for cut in CUTS:
            if cut > size:
                break
            key = hash((key, hash(data[before:cut])))
            before = cut
            yield cut, key
        if before < size <= MAX_BYTES:
            yield size, hash((key, hash(data[before:size])))


def key_of(data: bytes | memoryview) -> int:
    """64 bits, odd, the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") | 1


def tokens(raw: bytes | memoryview) -> int:
    """How many tokens a prompt has: exact for a list of token ids, else bytes / ``BYTES_PER_TOKEN``, rounded up."""
    return bytes(raw).count(b",") + 1 if _IDS.match(raw) else text_tokens(len(raw))


def text_tokens(size: int) -> int:
    """How many tokens so many bytes of text have, about."""
    return -(-size // BYTES_PER_TOKEN)
