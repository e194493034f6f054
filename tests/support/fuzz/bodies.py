"""Bodies of requests against json: their outline, and the key of their profile.

    byte 0      bounds of the outline
    the rest    a body
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

from xpyd_sidecar.router.api import bodies, hidden
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.serving import profiles

MODULES: tuple[str, ...] = ()
"""Nothing of it is compiled: outcomes alone lead on."""
MOST = (1024, 4096, 5000, 40, 0, 100)
BODY = (b'{"model":"m","messages":[{"role":"user","content":"\\"hi\\" \xc3\xa9"}],"max_tokens":8,"stream":true,'
        b'"temperature":0.7,"stream_options":{"include_usage":true},"stop":["a","\\u00e9"],"n":null}')
TOKENS = (
    b'"prompt":', b'"messages":', b'"max_tokens":', b'"max_completion_tokens":', b'"seed":', b'"user":',
    b'"model":"m",', b'"a":1,', b'"\\u0061":', b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'\\"', b"\\u0000",
    b"\\ud83d\\ude00", b"\\uDEAD", b"\\u12", b"\\x", b" ", b"\n", b"\t", b"\x00", b"\x0b", b"\x1f", b"\x7f",
    b"\xc3\xa9", b"\xe2\x82\xac", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xff",
    b"null", b"true", b"false", b"nul", b"-", b"-0", b"0", b"01", b"1.5", b"1.", b"1e3", b".5", b"NaN", b"123456789",
    b"1234567890", b'"image_url"', b'"input_audio"', b'"file"', b'"thinking"', b'"refusal"', b'"video_url"',
    b"[" * 17 + b"]" * 17, b'{"a":' * 15 + b"1" + b"}" * 15, b'"' + b"long " * 60 + b'"', BODY,
)
_known: dict[Hashable, dict[str, object]] = {}
MAX_KNOWN = 100_000


def check(data: bytes) -> Hashable:
    """The outline is that of what ``json`` reads; equal keys of profiles differ in the prompt alone."""
    most, body = MOST[(data[0] if data else 0) % len(MOST)], data[1:]
    names, depth = most % 7, most % 11
    judged = outline(body, names, depth)
    try:
        read = json.loads(body, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, _Pairs):
        assert judged == _outline(read, names, depth), body
    try:
        fields = bodies.split(body)
    except HttpFault:
        return isinstance(read, _Pairs), judged
    assert hidden.outline_fault(body) is None, body
    apis = ("chat", "completions")
    keys = [profiles._key(api, fields, len(body)) for api in apis]
    if isinstance(read, _Pairs):  # json takes less than msgspec in rare texts, such as halves of surrogates, and NaN more
        assert dict.fromkeys(name for name, _ in read).keys() == fields.keys(), body
        for api, key in zip(apis, keys, strict=True):
            rest = {name: json.loads(bytes(raw)) for name, raw in fields.items() if name != bodies.PROMPT[api][0]}
            if key is not None and len(_known) < MAX_KNOWN:
                assert repr(_known.setdefault(key, rest)) == repr(rest), body
    return [key is not None for key in keys].count(True), len(fields), judged


def outline(body: bytes, names: int, depth: int) -> str:
    """Which bound a body meets first: ``names``, ``depth``, ``turns``, or none of them (``within``)."""
    fault = hidden.outline_fault(body, names, depth)
    if fault is None:
        return "within"
    return "names" if fault.code == "too_many_fields" else "depth" if "nested more" in fault.message else "turns"


class _Pairs(list[tuple[str, Any]]):
    """An object with each name as often as it stands there."""


def _depth(value: object) -> int:
    inner = [one for _, one in value] if isinstance(value, _Pairs) else value if isinstance(value, list) else ()
    return isinstance(value, list) + max(map(_depth, inner), default=0)


def _outline(read: _Pairs, names: int, depth: int) -> str:
    """Which bound is met first, from the beginning on."""
    if depth < 1:
        return "depth"
    for number, (_, value) in enumerate(read):
        if number and number >= names:
            return "names"
        if _depth(value) + 1 > depth:
            return "depth"
    return "within"


def seeds() -> list[bytes]:
    """Bodies that clients send."""
    return [bytes([most]) + body for most in range(3) for body in (
        BODY, b'{"prompt":"hi","max_tokens":5}',
        b' { "prompt" : "a\\nb" , "temperature" : -0.7 } \n', b"{}", b"",
        b'{"prompt":[1,2,3],"seed":1,"user":"u","logit_bias":{"1":2}}',
        b'{"messages":[{"content":[{"type":"image_url"}]}]}')]
