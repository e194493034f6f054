"""The body of an answer over HTTP: all of it, or none."""

from __future__ import annotations

import aiohttp


class AnswerTooLong(aiohttp.ClientPayloadError):
    """A body has more bytes than are taken."""


async def read_whole(content: aiohttp.StreamReader, most: int) -> bytes:
    """All of a body, in however many pieces it comes (``StreamReader.read`` gives the first one alone).

    Raises:
        AnswerTooLong: it has more than ``most`` bytes.
        aiohttp.ClientError, OSError: it did not come whole.
    """
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > most:
            raise AnswerTooLong(f"answer longer than {most} bytes")
    return bytes(body)
