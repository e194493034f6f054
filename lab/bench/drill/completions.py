"""What is read of a completion's request, and how engines of a drill write its answer, as vLLM does.

Tokens follow from their place behind the prompt alone, so that a stream that goes on elsewhere goes on with the same.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

VOCABULARY, FIRST = 900, 10
encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct):
    """What is read of a request."""

    prompt: list[int] | str
    max_tokens: int = 16
    model: str = ""
    stream: bool = False
    return_token_ids: bool = False
    stream_options: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def ids(self) -> list[int]:
        """Of its prompt; of a text, as many as it may have."""
        return self.prompt if isinstance(self.prompt, list) else [FIRST] * max(1, len(self.prompt) // 4)


decode_asked = msgspec.json.Decoder(Asked).decode


def ids_behind(place: int, count: int) -> list[int]:
    """So many tokens from a place of prompt and answer on."""
    return [FIRST + at % VOCABULARY for at in range(place, place + count)]


def choice_of(text: str, finish: str | None, ids: list[int] | None) -> dict[str, Any]:
    """One choice of an event, or of a whole answer. ``ids``: None where they were not asked for."""
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None,
            "prompt_token_ids": None, "token_ids": ids}


def usage_of(prompt: int, output: int) -> dict[str, int]:
    """Tokens of prompt and answer."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def body_of(asked: Asked, request: str, choices: list[dict[str, Any]], usage: dict[str, int] | None = None
            ) -> dict[str, Any]:
    """An event, or a whole answer."""
    body: dict[str, Any] = {"id": f"cmpl-{request}", "object": "text_completion", "created": 1, "model": asked.model,
                            "choices": choices}
    return body if usage is None else body | {"usage": usage}


def event(raw: bytes) -> bytes:
    """A server-sent event, in a chunk of its own."""
    data = b"data: " + raw + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def send_whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    """An answer that is no stream."""
    raw = encode(body)
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(raw))
    writer.write(head + raw)
    await writer.drain()
