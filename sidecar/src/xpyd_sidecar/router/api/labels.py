"""What a request has in common with others: labels, by which requests are alike though no two are equal.

    prompt   its beginning, up to 8, 16, 32 … bytes, up to the ends of its last messages, and all of it
    fields   each name that is set; of lists and objects the whole value, and the names in it; kinds of parts, as images
    model    an adapter has a name of its own
    path

A label is eight bytes, the same in every router: a rank, and seven of a hash (BLAKE2b). The lower the rank, the fewer
requests are meant: long beginnings of a prompt come first, then values of fields, then their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import NewType

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.bodies import ASIDE, BAD_JSON, PROMPT
from xpyd_sidecar.router.api.fields import is_null

Label = NewType("Label", bytes)
Labels = Mapping[Label, str]
"""Labels of a request, and each in words."""
LABEL_SIZE = 8
FIRST_CUT = 8
LOOK = 256 << 10
"""Bytes of a prompt, or of a field, that are looked at."""
MESSAGES = 8
"""The last messages of so many are told apart: an agent that tries again adds one or two."""
FIELDS, PARTS = 16, 8
"""Fields of a request that are looked at, and names within one, or kinds of parts of a prompt."""
MOST = 2 * FIELDS + FIELDS * PARTS + PARTS + MESSAGES + 20
_PREFIX, _VALUE, _NAME_IN, _PART, _MODEL, _NAME, _PATH = 100, 110, 111, 112, 113, 120, 130
_GRAMMARS = ("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
             "tools")
"""Of fields that are shared those that have ended engines before come first."""
_NO_LABELS = (ASIDE | {"model"} | {name for names in PROMPT.values() for name in names}) - {"tools"}
_PART_TYPE = re.compile(rb'"type"\s*:\s*"([A-Za-z_]{1,32})"')
_fields_of = msgspec.json.Decoder(dict[str, Raw]).decode
_items_of = msgspec.json.Decoder(list[Raw]).decode
_type_of = msgspec.json.Decoder(str).decode


def labels_of(kind: str, model: str | None, fields: Mapping[str, Raw], prompt: bytes | memoryview) -> dict[Label, str]:
    """The labels of a request, at most ``MOST``. ``kind``: its API or path; ``fields``: of its JSON body."""
    out = {_label(_PATH, b"", kind.encode()): f"the path of {kind}"}
    if model:
        out[_label(_MODEL, b"", model.encode(errors="surrogatepass"))] = f"the model {model}"
    out.update(_of_prompt(prompt or _passed_prompt(fields)))
    asked = [name for name, raw in fields.items() if name and name not in _NO_LABELS and not is_null(raw)]
    for name in asked[:FIELDS]:
        out.update(_of_field(name[:64], fields[name]))
    return out


def _label(rank: int, where: bytes, data: bytes | memoryview) -> Label:
    return Label(bytes((rank,)) + blake2b(where + b"\0" + data, digest_size=LABEL_SIZE - 1).digest())


def _passed_prompt(fields: Mapping[str, Raw]) -> Raw:
    """That of a request whose API the router does not know."""
    return next((fields[name] for name in ("prompt", "messages", "input") if name in fields), Raw(b""))


@lru_cache(maxsize=1024)
def _rank(size: int) -> int:
    """Of a beginning of so many bytes: four to a doubling, the longest first."""
    return max(0, _PREFIX - int(4 * math.log2(max(1, size))))


@lru_cache(maxsize=1024)
def _prefix_words(size: int) -> str:
    return f"the first {size} bytes of the prompt"


def _of_prompt(raw: bytes | memoryview) -> Iterator[tuple[Label, str]]:
    """Beginnings, each by the hash of all before its end; and kinds of parts."""
    data = bytes(memoryview(raw)[:LOOK])
    if len(data) < FIRST_CUT:
        return
    ends = {FIRST_CUT << power for power in range(20) if FIRST_CUT << power <= len(data)}
    if len(raw) <= LOOK:
        ends |= {len(data), *_message_ends(data)}
    whole, before = blake2b(digest_size=LABEL_SIZE - 1), 0
    for end in sorted(ends):
        whole.update(memoryview(data)[before:end])
        before = end
        yield Label(bytes((_rank(end),)) + whole.digest()), _prefix_words(end)
    kinds = {found.group(1) for found, _ in zip(_PART_TYPE.finditer(data), range(256), strict=False)}
    for kind in sorted(kinds)[:PARTS]:
        yield _label(_PART, b"", kind), f"parts of type {kind.decode()}"


def _message_ends(data: bytes) -> list[int]:
    """Where the last messages end, in a list of them; none where it is no list of objects."""
    if not data.lstrip()[1:].lstrip().startswith(b"{"):
        return []
    try:
        items = _items_of(data)
    except BAD_JSON:
        return []  # several fields make this prompt, one behind the other: its cuts tell enough
    ends, at = [], 0
    for item in items:
        at = data.find(bytes(item), at) + len(item)
        ends.append(at)
    return ends[-MESSAGES:]


def _of_field(name: str, raw: Raw) -> Iterator[tuple[Label, str]]:
    where, first = name.encode(errors="surrogatepass"), 0 if name in _GRAMMARS else 1
    yield _label(_NAME + first, where, b""), f"the field {name}"
    data = memoryview(raw)[:LOOK]
    if bytes(data[:1]) not in {b"{", b"["} or len(raw) > LOOK:
        return
    yield _label(_VALUE + 4 * first, where, data), f"this value of {name}"
    if bytes(data[:1]) == b"{":
        try:
            found = _fields_of(raw)
            inner = [f"{each[:64]}={_type_of(value)[:64]}" if each == "type" else each[:64]
                     for each, value in list(found.items())[:PARTS] if not is_null(value)]
        except BAD_JSON:
            return  # the engine is to refuse it
        for each in inner:
            yield _label(_NAME_IN + 4 * first, where, each.encode(errors="surrogatepass")), f"{name}.{each}"
