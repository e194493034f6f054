"""Bodies of requests (``_shape.c``) against msgspec and json: outline, shape and slots, and messages of them.

    byte 0      how many bytes a shape may have
    the rest    a body
"""

from __future__ import annotations

import json
from collections.abc import Hashable

from xpyd_sidecar.proxy import intake
from xpyd_sidecar.routing import bodies, outline, shapes

MODULES = ("xpyd_sidecar.proxy._shape",)
MOST = (shapes.MAX_BYTES, 4096, 5000, 40, 0, 100)
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
_known: dict[shapes.Key, shapes.Key] = {}
MAX_KNOWN = 100_000


def check(data: bytes) -> Hashable:
    """What is found is what msgspec finds, it is strict JSON, and equal shapes differ in their slots alone."""
    most, body = MOST[(data[0] if data else 0) % len(MOST)], data[1:]
    found, plain = intake.looked(body, most), shapes.looked(body, most)
    judged = intake.judged(body, most % 7, most % 11)
    assert judged == outline.judged(body, most % 7, most % 11), body
    if found is None:
        return plain is not None, judged
    assert plain is not None, body
    key, slots = found
    assert slots == plain[1], body
    assert isinstance(key, bytes)
    if len(_known) < MAX_KNOWN:
        assert _known.setdefault(key, plain[0]) == plain[0], body
    fields = json.loads(body, object_pairs_hook=list)
    names = [name for name, _ in fields]
    assert len(set(names)) == len(names), body
    assert names == list(bodies.split(body)), body
    pieces = key.split(b"\0")
    assert len(pieces) == len(slots) + 1, body
    form: list[bytes | int] = [pieces[0]]
    for number, piece in enumerate(pieces[1:]):
        form += (number, piece)
    args = (b"content-length: ", b"\r\n\r\n", tuple(form), tuple(slots))
    made = intake.message(*args)
    assert made == shapes.message(*args) == b"content-length: %d\r\n\r\n%b" % (len(body), body)
    assert intake.judged(body, outline.MAX_NAMES, outline.MAX_DEPTH) == outline.Outline.WITHIN, body
    return len(slots), len(names), judged


def seeds() -> list[bytes]:
    """Bodies that clients send."""
    return [bytes([most]) + body for most in range(3) for body in (
        BODY, b'{"prompt":"hi","max_tokens":5}',
        b' { "prompt" : "a\\nb" , "temperature" : -0.7 } \n', b"{}", b"",
        b'{"prompt":[1,2,3],"seed":1,"user":"u","logit_bias":{"1":2}}',
        b'{"messages":[{"content":[{"type":"image_url"}]}]}')]
