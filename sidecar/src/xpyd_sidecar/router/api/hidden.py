"""What a client's body must not be: larger than bounds in its outline (``outline_fault``), or with parameters that only
the router may send, found wherever a client may have put them.

    {"kv_transfer_params": …}                                  vLLM's own field
    {"vllm_xargs": {"kv_transfer_params": …}}                  vLLM makes SamplingParams.extra_args of it
    {"sampling_params": {"extra_args": {…}}}                   extra_args themselves (/inference/v1/generate)
    {"prompt": "what is kv_transfer_params?"}                  words of a client, which nobody obeys

A connector obeys ``extra_args["kv_transfer_params"]``: who may send it tells an engine to wait, or whom to connect to. So
the names are refused at any depth of a body, spelled with escapes or twice, but for fields that hold what a client says
or what a model is shown (``CONTENT``). A field that vLLM does not have yet is searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from xpyd_sidecar.router.api.faults import HttpFault, bad_request
from xpyd_sidecar.router.api.fields import ONLY_ROUTER, TABLE, is_null

REFUSED = {name: rule.refused for table in TABLE.values() for name, rule in table.items() if rule.refused}
"""The names, and why a client must not send them."""
CONTENT = frozenset({
    # what is asked
    "prompt", "suffix", "messages", "system", "instructions", "input", "documents", "previous_input_messages",
    # what is shown of it to a model
    "tools", "functions", "tool_choice", "response_format", "structured_outputs", "text", "chat_template",
    "chat_template_kwargs", "reasoning", "output_config", "metadata", "media_io_kwargs", "mm_processor_kwargs",
    # pooling: texts
    "query", "queries", "items", "texts", "inputs", "images", "data", "data_1", "data_2", "text_1", "text_2",
    # tokens, and answers that are read again
    "token_ids", "prompt_token_ids", "tokens", "features", "mm_payload", "generate_response", "generate_responses",
})
"""Fields of a body that vLLM takes nothing from but content: a schema in them may have a property of any name."""
MAX_SEARCHED = 64 << 10
"""Bytes of a field that is searched; a longer one that may hold one of the names is refused."""
_SHORTEST = len('{"kv_transfer_params":1}')
_NAME = b"_transfer_params"
_ESCAPES = (b"\\u005", b"\\u006", b"\\u007")
"""Begin the escapes of all letters of the names, and of what joins them."""


class _Object(list[tuple[str, Any]]):
    """A JSON object with every name as often as it stands there."""


def refuse(fields: Mapping[str, Raw]) -> None:
    """Refuse fields that only the router may send, at any depth: HttpFault, 400, ``param`` is the path of the field. A name
    whose value is null says nothing.
    """
    for name, raw in fields.items():
        if name in REFUSED:
            if not is_null(raw):
                raise _fault(name, name)
        elif len(raw) >= _SHORTEST and name not in CONTENT and may_hold(bytes(raw)):
            _search(name, bytes(raw))


def refuse_in_form(data: bytes) -> None:
    """Refuse a field of a form through which the names would reach an engine: HttpFault, 400. ``data``: any part of it."""
    for name in ("vllm_xargs", *REFUSED):
        if data.find(name.encode()) >= 0:
            words = f"{name!r} cannot be sent in a form: {ONLY_ROUTER}"
            raise bad_request(words, param=name, code="refused_field")


def refuse_form_type(content_type: bytes) -> None:
    """Refuse a form whose names an engine would decode otherwise than they are read here, or that is none (415)."""
    kind, *rest = content_type.lower().split(b";")
    charsets = [part.partition(b"=")[2].strip().strip(b'"') for part in rest if part.strip().startswith(b"charset")]
    if kind.strip() == b"application/x-www-form-urlencoded" or any(one not in {b"utf-8", b"us-ascii"} for one in charsets):
        words = f"a form is multipart/form-data in UTF-8, not {content_type.decode('latin-1')!r}"
        raise HttpFault(415, words, code="unsupported_media_type")


def may_hold(raw: bytes) -> bool:
    """Whether one of the names may stand there; twice, perhaps, of which a reader sees one."""
    return raw.find(_NAME) >= 0 or (raw.find(b"\\u00") >= 0 and any(raw.find(escape) >= 0 for escape in _ESCAPES))


def _search(name: str, raw: bytes) -> None:
    if len(raw) > MAX_SEARCHED:
        words = f"{name!r} is too long to be searched for what only the router may send: at most {MAX_SEARCHED} bytes"
        raise bad_request(words, param=name, code="refused_field")
    try:
        left: list[tuple[str, Any]] = [(name, json.loads(raw, object_pairs_hook=_Object))]
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{name!r}: {error}", param=name) from None
    while left:
        path, value = left.pop()
        if isinstance(value, _Object):
            for inner, one in value:
                if inner in REFUSED and one is not None:
                    raise _fault(inner, f"{path}.{inner}")
                left.append((f"{path}.{inner}", one))
        elif isinstance(value, list):
            left += [(f"{path}.{at}", one) for at, one in enumerate(value)]


def _fault(name: str, path: str) -> HttpFault:
    return bad_request(f"{path!r} cannot be sent by a client: {REFUSED[name]}", param=path, code="refused_field")


MAX_NAMES = 256
MAX_DEPTH = 64
"""The body's own braces are the first."""
MAX_TURNS = 32 << 10
"""Brackets that are looked at one by one: of what goes deeper than a message of a chat. Some 30 ms."""
SHORTEST = len('"":1,')
"""Bytes of a name with its value."""


_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPEN_TO_CLOSE = rb'[\[{][^"\[\]{}]*+(?:%b[^"\[\]{}]*+)*+[\]}]'
_FLAT = _OPEN_TO_CLOSE % _TEXT
"""A list or an object that holds no other."""
_HOLDS_FLAT = _OPEN_TO_CLOSE % (rb"(?:%b|%b)" % (_TEXT, _FLAT))
_MESSAGE = _OPEN_TO_CLOSE % (rb"(?:%b|%b)" % (_TEXT, _HOLDS_FLAT))
"""One of a chat is so deep: an object with a list of parts."""
_SHALLOW = re.compile(rb'[^"\[\]{},]*+(?:%b[^"\[\]{},]*+)*+' % _TEXT, re.DOTALL)
"""Up to the next bracket or comma that no string holds."""
_BY_ROOM = [re.compile(rb'[^"\[\]{}]*+(?:(?:%b)[^"\[\]{}]*+)*+' % over, re.DOTALL) for over in (
    _TEXT, _TEXT + b"|" + _FLAT, _TEXT + b"|" + _HOLDS_FLAT, _TEXT + b"|" + _MESSAGE)]
"""Up to the next bracket, but over what goes no deeper than there is room for: by how many levels are left."""


LONG = 64 << 10
"""A body of more bytes is judged by its outline."""
_FLESH = bytes(set(range(256)) - set(b'"{}[],:'))
_NO_ESCAPE = bytes(set(_FLESH) - set(b"\\/bfnrtu"))
COUNTED = 4 << 10
"""Bytes of a body whose marks are counted."""


def marks_below(body: bytes, mark: bytes, most: int) -> int:
    """How many marks are left of so many; -1: there are more. In a long body finding a few costs a tenth of counting."""
    if len(body) <= COUNTED:
        return max(-1, most - body.count(mark))
    at = body.find(mark)
    while at >= 0 <= most:
        most -= 1
        at = body.find(mark, at + 1)
    return most


def shallow(body: bytes, depth: int) -> bool:
    """Whether there are so few brackets that it cannot go deeper, whatever stands where."""
    if len(body) <= COUNTED:
        return body.count(b"{") + body.count(b"[") <= depth
    left = marks_below(body, b"{", depth)
    return left >= 0 and marks_below(body, b"[", left) >= 0


def outline_of(body: bytes) -> bytes:
    """A body without what says nothing of its outline: all that its strings hold but brackets, commas and colons, and all
    blanks, numbers and words. A long one is judged by it in a quarter of the time.

    Of escapes the backslashes go first, from the left, so that each quote which is escaped has one backslash before it;
    until then all that may stand behind one stays. As long as it is JSON there are none outside of strings.
    """
    body = body.translate(None, _NO_ESCAPE)
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return body.translate(None, _FLESH)


def outline_fault(body: bytes, names: int = MAX_NAMES, depth: int = MAX_DEPTH) -> HttpFault | None:
    """What is wrong with the outline of a body that may have so many names and go so deep: how many names its object has,
    how deep it goes and how much is deep, judged before anything is built. None: nothing, or it is no object.

    { "model": … , "messages": [ { "role": … } ] , … }
      1 name       2 names     2 3                 3 names

    Theory: ``msgspec`` makes an object for every name at the top level, and skips what is nested. So a body of names alone
    costs 25 times its size, and a nested one recursion. vLLM 0.32 knows 68 names of a chat.

    Nearly all bodies have so few brackets, and commas or colons, that they cannot be beyond the bounds, whatever stands
    where; the others are read in one pass. Whether they are JSON says who decodes them, and it reads no more names and no
    more depth than were counted here: both take a body from its beginning, and agree as long as it is JSON.
    """
    if shallow(body, depth) and (
            len(body) < SHORTEST * names or marks_below(body, b":", names) >= 0 or marks_below(body, b",", names - 1) >= 0):
        return None
    begin = _OBJECT.match(body)
    if begin is None:
        return None
    if len(body) > LONG:  # its beginning may say enough, before as much again is taken for its outline
        return outline_fault(body[:LONG], names, depth) or _judge(outline_of(body), 1, names, depth)
    return _judge(body, begin.end(), names, depth)


def _judge(body: bytes, at: int, names: int, depth: int) -> HttpFault | None:
    """See ``outline_fault``; behind the brace that begins it."""
    if depth < 1:
        return _too_deep(f"is nested more than {depth} deep")
    level, more = 1, names
    for _ in range(names + MAX_TURNS):
        skipped = (_SHALLOW if level == 1 else _BY_ROOM[min(depth - level, 3)]).match(body, at)
        assert skipped is not None  # it may be empty
        at = skipped.end() + 1
        mark = body[at - 1:at]
        if mark == b",":
            more -= 1
            if more < 1:
                return bad_request(f"the body has more than {names} names at its top level, which is the limit",
                                   code="too_many_fields")
        elif mark in {b"[", b"{"}:
            level += 1
            if level > depth:
                return _too_deep(f"is nested more than {depth} deep")
        elif mark in {b"]", b"}"}:
            level -= 1
            if level == 0:
                return None
        else:  # the end, or a string without one
            return None
    return _too_deep(f"has more than {MAX_TURNS} lists and objects that hold nested ones")


def _too_deep(what: str) -> HttpFault:
    return bad_request(f"the body {what}, which is the limit", code="nested_too_deeply")
