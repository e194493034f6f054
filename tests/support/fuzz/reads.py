"""Inputs that are streams of an engine: options, the bytes, and where they are cut into reads.

    byte 0      1 chats · 2 a client without chunks · 4 token ids are shown · 8 bytes as they are · 16 [DONE] and the last
                chunk behind them · 32, 64 what a test makes of them
    byte 1, 2   how many cuts (0 to 3; with 128 of the first anywhere, else behind chunks), and which
    the rest    chunks' payloads, with a byte 0 between them; or with 8 the stream itself

Payloads are framed here, since a stream whose sizes are wrong is refused before anything else of it is looked at.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.relay import fast
from xpyd_sidecar.router.stream.events import END
from xpyd_sidecar.router.stream.position import Position

CHAT, UNFRAMED, IDS, RAW, ENDED, ONE, TWO = (1 << bit for bit in range(7))
PROMPT = b'"prompt_token_ids":[7,8]'
COMPLETION = (b'data: {"id":"c","object":"x","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,'
              b'"finish_reason":null,"stop_reason":null,"token_ids":[15],"prompt_token_ids":null}]}\n\n')
FIRST_COMPLETION = COMPLETION.replace(b'"prompt_token_ids":null', PROMPT)
LAST_COMPLETION = COMPLETION.replace(b'"finish_reason":null', b'"finish_reason":"stop"')
ROLE = (b'data: {"id":"c","object":"x","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant",'
        b'"content":""},"logprobs":null,"finish_reason":null,"token_ids":null}],' + PROMPT + b"}\n\n")
DELTA = (b'data: {"id":"c","object":"x","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"a"},'
         b'"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[7,9]}]}\n\n')
LAST_DELTA = DELTA.replace(b'"finish_reason":null', b'"finish_reason":"length"')
EMPTY_DELTA = DELTA.replace(b'{"content":"a"}', b"{}")
USAGE = (b'data: {"id":"c","object":"x","created":1,"model":"m","choices":[],"usage":{"total_tokens":9,"details":'
         b'{"cached":null}}}\n\n')
TOKENS = (
    b"\x00", b"\r\n", b"\n\n", b"\n\n\r\n", b"data: ", b"data: {", b'data: {"id":"c"}\n\n', b"data: [DONE]\n\n",
    b": a comment\n\n", b'data: {"error":{"message":"dead","code":500}}\n\n', b'data: {"error":{"code":400}}\n\n',
    b'"id":"c",', b'"id":"d",', b'"id":"",', b'"object":"x",', b'"created":1,', b'"created":-1,',
    b'"created":999999999999999999,', b'"model":"m",', b'"choices":[', b'"choices":[]', b'"usage":null',
    b'"usage":{"a":{"b":{"c":{"d":1}}}}', b'"system_fingerprint":null', b'"service_tier":"x"', b'"prompt_text":null',
    b'"index":0,', b'"index":1,', b'"text":"a",', b'"text":null,', b'"delta":{},', b'"delta":{"content":"a"},',
    b'"delta":{"role":"assistant","content":""},', b'"reasoning":"r"', b'"reasoning_content":null', b'"refusal":null',
    b'"tool_calls":[]', b'"logprobs":null,', b'"logprobs":{},', b'"finish_reason":null,', b'"finish_reason":"stop",',
    b'"finish_reason":"abort"', b'"stop_reason":7,', b'"stop_reason":"s",', b'"token_ids":[1]', b'"token_ids":[1,2,3]',
    b'"token_ids":[]', b'"token_ids":null', b'"prompt_token_ids":[7,8],', b'"prompt_token_ids":null',
    b'"prompt_logprobs":null,', b"null", b"true", b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"\\u00e9",
    b"\\ud83d\\ude00", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"\x7f", b"e\r\n", b"0\r\n\r\n",
    b"1a;x=1\r\n", b"0x", b"+", b"0", b"_", b"AF", b"ffffffff\r\n", b";x", COMPLETION, DELTA, END,
)

LEARNED = ("_prefix", "_middle", "_last", "_lead", "_shown")
Guess = tuple[bytes, bytes]


class Given(NamedTuple):
    """What an input says."""

    flags: int
    reads: list[bytes]

    @property
    def api(self) -> Literal["completions", "chat"]:
        """Of the stream."""
        return "chat" if self.flags & CHAT else "completions"


def given(data: bytes) -> Given:
    """Read an input."""
    flags, cuts, which = data[:3].ljust(3, b"\0")
    raw = data[3:] if flags & RAW else b"".join(chunk_of(part) for part in data[3:].split(b"\0") if part)
    if flags & ENDED:
        raw += END
    dice = random.Random(cuts << 8 | which)
    ends = range(1, len(raw)) if cuts & 128 else [at + 4 for at in range(len(raw) - 4) if raw.startswith(b"\n\n\r\n", at)]
    at = sorted(dice.sample(ends, min(len(ends), cuts & 3)))
    return Given(flags, [part for part in (raw[i:j] for i, j in zip([0, *at], [*at, len(raw)], strict=True)) if part])


def made(flags: int, *events: bytes, cuts: bytes = b"\0\0") -> bytes:
    """An input."""
    return bytes([flags]) + cuts + b"\0".join(events)


def seeds() -> list[bytes]:
    """Streams of both APIs, whole and in several reads."""
    completion = (FIRST_COMPLETION, COMPLETION, COMPLETION, LAST_COMPLETION)
    chat = (ROLE, DELTA, EMPTY_DELTA, DELTA, LAST_DELTA, USAGE)
    framed = [made(flags | more, *events, cuts=cuts)
              for flags, events in ((0, completion), (CHAT, chat))
              for more in (ENDED, 0, ENDED | UNFRAMED, ENDED | IDS, ENDED | ONE, ENDED | TWO, ENDED | ONE | TWO)
              for cuts in (b"\0\0", b"\1\7", b"\3\1", b"\x83\2")]
    return framed + [made(flags | RAW | more, b"".join(map(chunk_of, events)) + END, cuts=cuts)
                     for flags, events in ((0, completion), (CHAT, chat))
                     for more in (0, ONE, TWO, UNFRAMED) for cuts in (b"\0\0", b"\2\1")]


def to_learn(api: Literal["completions", "chat"], event: bytes,
             guess: Guess | None) -> tuple[Guess | None, tuple[bytes, ...] | None]:
    """What is guessed of the next stream, and what is to be learned of an event (``LEARNED``); None: it says too little.

    ``guess``: what stood between text and ids, and behind them, in the stream before.
    """
    key = {"completions": b'"text":', "chat": b'"delta":'}[api]
    text = event.find(key) + len(key)
    if text < len(key) or b'"prompt_token_ids":[' in event[:text]:
        return guess, None
    stop = event.find(b',"logprobs":null,"finish_reason":null,', text)
    ids = event.find(b'"token_ids":[', stop) + len(b'"token_ids":[')
    close = event.find(b"]", ids)
    middle, rest = event[stop:ids], event[close + 1:] + b"\n\n"
    if (b'"prompt_token_ids":[' not in event and min(stop, close, ids - 13) >= 0 and middle.count(b"[") == 1
            and len(rest) <= 16):
        guess = middle, rest
    if guess is None:
        return None, None
    prefix, (middle, rest) = event[:text], guess
    return guess, (prefix, middle, b"]" + rest + b"\r\n", prefix, middle[:-1] + b"null" + rest)


def forget() -> None:
    """What was learned of streams before is what is usual: how malformed events are read depends on it."""
    for event, chat in ((COMPLETION.replace(b',"prompt_token_ids":null', b""), False), (DELTA, True)):
        fast.Scanner().learn(event, 0, len(event) - 2, chat, bytearray())


def known(position: Position) -> tuple[object, ...]:
    """All that a position can tell. The last is words where ids that are no numbers were noted as any others."""
    try:
        have: object = position.have()
    except (ValueError, OverflowError) as error:
        have = str(error)
    return (position.id, position.created, position.model, position.prompt, position.roles, position.finished,
            position.usage_sent, position.tokens, position.prompt_tokens, position.tail(), have)
