"""What a router can tell of a prompt without a tokenizer: keys of its prefixes, whose conversation it is, and about how
many tokens it has.

    bytes   0    256   512   768   1024  1280 …  2048  2560 …      at most ``MAX_BYTES`` are read
    cuts         │     │     │     │     │       │     │           four to a doubling, from 256 KiB on one in ``STEP``
    ends       ╵              ╵                ╵                   of the last ``ENDS`` messages: there a turn is a prefix
                                                                   of the next one

A key is the hash of everything before its cut, and of what is rendered into the prompt beside it: so equal keys mean an
equal prefix. They are the same in all routers of a service, which say them to its engines (``contract.prefix_cuts``), and
others in other services: the hash begins with a seed of the service's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from re import compile as regex

import msgspec
from msgspec import Raw
from xxhash import xxh3_64

from xpyd_sidecar.contract import prefix_cuts
from xpyd_sidecar.contract.prefix_cuts import PromptCut
from xpyd_sidecar.router.api.fields import Api, is_null

BLOCK_BYTES = 256
"""About 64 tokens of English text, 40 written as ids."""
STEP = 64 << 10
"""Most bytes between two cuts."""
MAX_BYTES = 4 << 20
"""What lies beyond is not looked at: a longer prompt is matched by its beginning. A million tokens of text."""
ENDS = 8
"""Messages, the last ones, whose ends are cuts."""
TAIL = 64 << 10
"""Bytes at the end of a prompt in which they are looked for."""
FIRST_USER = 256 << 10
"""Bytes at its beginning in which the first user message is."""
COUNTED = 1 << 20
"""Bytes of a list of ids whose commas are counted."""
HOME_BYTES = 4 << 10
"""Of a first message, or of a prompt behind what all have in common: what a conversation is known by."""
BYTES_PER_TOKEN = 4.0
"""Of text, while nothing is known: a token of English is about four bytes. The chat template is not counted."""

_IDS = regex(rb"\[[ \t\r\n]*[0-9]")
_SPACE = b" \t\r\n"
_ASSISTANT = b'"assistant"'
_BODY: Mapping[Api, str] = {"completions": "prompt", "chat": "messages", "messages": "messages", "responses": "input"}
"""The field that grows from turn to turn."""
_BESIDE = ("cache_salt", "system", "instructions", "tools", "documents", "chat_template", "chat_template_kwargs",
           "reasoning_effort")
"""Fields that come before it in the prompt, change how it is rendered, or keep KV from being shared."""
_RENDERED = frozenset({"system", "instructions", "tools", "documents"})
"""Those of them that are part of the prompt."""
_NAMED = ("prompt_cache_key", "session_id")
"""Fields that name a conversation; ``metadata.user_id`` and ``user`` name who speaks, which is better than nothing."""


class _BodyMetadata(msgspec.Struct):
    user_id: Raw = Raw(b"")


_metadata = msgspec.json.Decoder(_BodyMetadata).decode


def _cuts() -> Iterator[int]:
    step, at = BLOCK_BYTES, BLOCK_BYTES
    while at <= MAX_BYTES:
        yield at
        if at == 8 * step and step < STEP:
            step *= 2
        at += step


CUTS: tuple[int, ...] = tuple(_cuts())


class PromptPrefix(msgspec.Struct, eq=False):
    """Keys of one prompt, made when they are first asked for."""

    _raw: bytes | memoryview
    _beside: tuple[bytes, ...] = ()
    """What comes before it in the prompt, or keeps its KV from being shared."""
    named: int = 0
    """Key of the conversation that its client names; 0: it names none."""
    _whose: bytes = b""
    """Whose conversations they are: the same words of others make another one."""
    _chat: bool = False
    _seed: int = 0
    """Of the service: see ``cut_seed``."""
    _before: int = 0
    """Bytes of what is rendered before it."""
    _keys: list[tuple[int, int]] | None = None
    _message_ends: list[int] = []
    """Where the last messages end, the whole prompt's end included; known once keys are made."""
    _cuts: str | None = None
    _home: int = 0
    path: list[tuple[int, int]] | None = None
    """For who looks it up (``PrefixCacheIndex``)."""

    def __len__(self) -> int:
        """Bytes."""
        return len(self._raw)

    def conversation_key(self, common: int) -> int:
        """What its conversation is known by, the same in every router: what its client calls it, else its first user
        message, else what comes behind the first ``common`` bytes, which all prompts have.
        """
        if not self._home:
            self._home = self.named or self._first_user() or key_of(
                memoryview(self._raw)[common:min(common + HOME_BYTES, MAX_BYTES)])
        return self._home

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Cut in bytes and key, the shortest prefix first; the whole prompt is the last, unless it is too long."""
        if self._keys is None:
            self._keys = list(self._made())
        return self._keys

    @property
    def cuts(self) -> str:
        """Its keys as engines are told them, with the share of the prompt that each stands for."""
        if self._cuts is None:
            before, whole = self._before, self._before + len(self)
            self._cuts = prefix_cuts.encode(
                [PromptCut(max(1, (before + at) * prefix_cuts.WHOLE // whole), key) for at, key in self.keys])
        return self._cuts

    def with_answer(self, cut: int) -> int:
        """How much of it an engine holds that has answered the prompt which ended at this cut, in bytes: the assistant's
        message behind it is what the engine itself has said. The cut itself where no such message follows, or no other one.
        """
        ends = self._message_ends
        at = bisect_left(ends, cut)
        if at + 2 >= len(ends) or ends[at] != cut:
            return cut
        answer = ends[at + 1]
        return answer if _ASSISTANT in memoryview(self._raw)[cut:answer].tobytes() else cut

    def messages_until(self, cut: int) -> bytes | None:
        """Its messages up to this cut, as a list of JSON; None where no message ends there, or it is no list."""
        if not self._chat or cut not in self._message_ends:
            return None
        return bytes(memoryview(self._raw)[:cut]) + b"]"

    def _made(self) -> Iterator[tuple[int, int]]:
        data, size = memoryview(self._raw)[:MAX_BYTES].tobytes(), len(self._raw)
        self._message_ends = ends = self._ends(data) if self._chat and size else [size] if size else []
        running, before, at = xxh3_64(seed=self._seed), 0, 0
        for text in self._beside:
            running.update(b"%d\0%b" % (len(text), text))
        for cut in CUTS:
            while at < len(ends) and ends[at] < cut:  # aside: a key must not depend on which ends are looked at
                aside = running.copy()
                aside.update(data[before:ends[at]])
                yield ends[at], aside.intdigest()
                at += 1
            if cut > size:
                break
            running.update(data[before:cut])
            before = cut
            yield cut, running.intdigest()
            at += at < len(ends) and ends[at] == cut

    def _ends(self, data: bytes) -> list[int]:
        """Where the last messages end, and perhaps objects in them."""
        at = max(0, len(data.rstrip(_SPACE)) - 1)  # without the list's bracket
        out, floor, mark = [len(data[:at].rstrip(_SPACE))], at - TAIL, _mark(data)
        while len(out) < ENDS and (at := data.rfind(mark, max(0, floor), at)) >= 0:
            out.append(at + 1)
        return out[::-1]

    def _first_user(self) -> int:
        if not self._chat:
            return 0
        data = memoryview(self._raw)[:FIRST_USER].tobytes()
        at = data.find(b'"user"')
        if at < 0:
            return 0
        mark = _mark(data)
        begin, end = data.rfind(mark, 0, at) + 1, data.find(mark, at)
        end = len(data.rstrip(_SPACE + b"]")) - 1 if end < 0 else end
        return key_of(b"%b\0%b" % (self._whose, data[begin:min(end, begin + HOME_BYTES)].lstrip(b" ,[{")))


def _mark(data: bytes) -> bytes:
    """What stands between two messages, by how the first one is written. Not within a string, where a quote has a backslash
    before it.
    """
    colon = data.find(b'":', 0, 256)
    return b'}, {"' if data[colon + 2:colon + 3] == b" " else b'},{"'


def cut_seed(service_key: bytes) -> int:
    """What keys of prefixes begin with in the service that has this key."""
    return key_of(b"xpyd prefix cuts\0" + service_key)


def prefix_of(api: Api, fields: Mapping[str, Raw], whose: bytes, header: bytes = b"", seed: int = 0) -> PromptPrefix:
    """Of a request with these fields. ``whose``: of which client and model. ``header``: its conversation, by its head.
    ``seed``: ``cut_seed`` of the service.
    """
    raw = fields.get(_BODY[api], Raw(b""))
    beside = tuple([bytes(fields[name]) for name in ("model", *_BESIDE) if name in fields])
    named = header or _name(fields)
    before = sum(len(raw) for name, raw in fields.items() if name in _RENDERED)
    return PromptPrefix(raw, beside, key_of(b"%b\0%b" % (whose, named)) if named else 0, whose, api != "completions",
                        seed, before)


def _name(fields: Mapping[str, Raw]) -> bytes:
    """What a request calls its conversation; empty where it does not."""
    for name in _NAMED:
        if name in fields and not is_null(fields[name]):
            return bytes(fields[name])[:HOME_BYTES]
    if "metadata" in fields and len(fields["metadata"]) <= HOME_BYTES:
        try:
            user = _metadata(fields["metadata"]).user_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            user = Raw(b"")
        if user and not is_null(user):
            return bytes(user)
    return bytes(fields["user"])[:HOME_BYTES] if "user" in fields and not is_null(fields["user"]) else b""


def key_of(data: bytes | memoryview) -> int:
    """64 bits, odd, the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") | 1


class PromptLengths:
    """How many tokens prompts have: exact for a list of token ids, unless that is very long, else by the bytes of a token,
    which are learned from what engines say.
    """

    KEEP = 0.99
    """Of what is known, at each new prompt."""
    RANGE = (1.0, 16.0)
    """Bytes of a token; what is beyond is no text (images, say)."""

    def __init__(self) -> None:
        self.bytes_per_token = BYTES_PER_TOKEN
        self._bytes, self._tokens = 64 * BYTES_PER_TOKEN * 64, 64.0 * 64

    def tokens(self, raw: bytes | memoryview) -> int:
        """About how many a prompt has, rounded up."""
        if not _IDS.match(raw):
            return -int(-len(raw) // self.bytes_per_token)
        some = bytes(memoryview(raw)[:COUNTED])
        return (some.count(b",") + 1) * len(raw) // max(1, len(some))

    def learn(self, raw: bytes | memoryview, tokens: int) -> None:
        """An engine says that a prompt has so many."""
        least, most = self.RANGE
        if tokens <= 0 or not least <= len(raw) / tokens <= most or _IDS.match(raw):
            return
        self._bytes = self.KEEP * self._bytes + len(raw)
        self._tokens = self.KEEP * self._tokens + tokens
        self.bytes_per_token = self._bytes / self._tokens
