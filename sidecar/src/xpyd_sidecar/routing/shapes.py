"""Requests of one shape: those that differ in their prompt and a few plain values alone.

    {"model":"tiny","messages": [{"role":… ,"max_tokens": 8 ,"temperature":0,"stream":true}
                                 slot                    slot      └ the rest is the shape

Belongs here: finding a request's shape, and keeping what the tables say of it and the bodies that they make of it. Does not
belong here: the tables (``fields``, ``ways``) and the bodies (``bodies``); everything kept here was made by them.

Invariant: no rule of the tables asks for more of a value in a slot than ``_plain`` does. A test holds every kept body
against the one that ``bodies`` makes.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.routing import bodies, continuation
from xpyd_sidecar.routing.faults import Fault
from xpyd_sidecar.routing.fields import Api
from xpyd_sidecar.routing.pick import Target
from xpyd_sidecar.routing.position import Position
from xpyd_sidecar.routing.ways import has_parts

_NUMBERS = frozenset({"max_tokens", "max_completion_tokens", "seed"})
_TEXTS = frozenset({"prompt", "user"})
_SLOTS = _NUMBERS | _TEXTS | {"messages"}
MAX_SHAPES = 256
MAX_BYTES = 1024
"""Of a request without its slots."""
_MARK = secrets.token_hex(16).encode()
"""Stands for a value while a template is made; nobody can have sent it."""
_MARKED = TransferId(_MARK.decode())
_FIRST = Attempt(1)
_encode = msgspec.json.Encoder().encode


class Template:
    """A leg's body with places for slots and for what the router says of the leg."""

    __slots__ = ("_format", "_slots")

    def __init__(self, request: bodies.Request, names: list[str], role: Role) -> None:
        """``request``: as its leg asks it. ``names``: fields that are slots, in the request's order."""
        marks = {name: _MARK + b"%d." % number for number, name in enumerate(names)}
        fields = {name: Raw(marks[name]) if name in marks else raw for name, raw in request.fields.items()}
        leg = legs.Leg(legs.VERSION, role, _MARKED, Attempt(1), 1.0, _PEER if role is Role.PREFILL else None)
        body = bodies.body_of(msgspec.structs.replace(request, fields=fields), role, leg)
        params = _encode(legs.encode(leg))
        first, *rest = body.replace(params, _MARK + b"%d." % len(names)).split(_MARK)
        pieces, self._slots = [first], []
        for part in rest:
            number, _, piece = part.partition(b".")
            self._slots.append(int(number))
            pieces.append(piece)
        assert self._slots.count(len(names)) == 1, "a leg's body without its parameters, or with them twice"
        self._format = b"%b".join(piece.replace(b"%", b"%%") for piece in pieces)

    def fill(self, slots: tuple[Raw | bytes, ...], params: bytes) -> bytes:
        """The body. ``params``: of ``params_of``."""
        values = (*slots, params)
        return self._format % tuple([values[number] for number in self._slots])


class Shape:
    """What requests of one shape have in common."""

    __slots__ = ("_api", "_asked", "_decode", "_names", "_prefill", "asked_ids", "choices", "model", "shows_logprobs",
                 "skips", "stream", "wants_usage", "way")

    def __init__(self, request: bodies.Request, names: list[str], *, goes_on: bool) -> None:
        position = continuation.position_of(request, goes_on=goes_on)
        self._api = request.api
        self._names = names
        self.model, self.stream, self.skips = request.model, request.stream, request.skips
        self.way = None if position is None else position.way
        self.asked_ids = position is not None and position.asked_ids
        self.wants_usage = position is not None and position.wants_usage
        self.shows_logprobs = position is not None and position.shows_logprobs
        self.choices = 0 if position is None else position.choices
        self._asked = continuation.first_request(request, position)
        self._prefill: Template | None = None
        self._decode: Template | None = None

    def position(self) -> Position | None:
        """As ``continuation.position_of``."""
        if self.way is None:
            return None
        return Position(self._api, self.way, asked_ids=self.asked_ids, wants_usage=self.wants_usage, choices=self.choices,
                        shows_logprobs=self.shows_logprobs)

    def body(self, leg: legs.Leg, slots: tuple[Raw | bytes, ...]) -> bytes:
        """As ``bodies.body_of`` makes it of ``continuation.first_request``."""
        return self._template(leg.role).fill(slots, params_of(leg))

    def first_pair(self, transfer: TransferId, decode: Target, left_s: float,
                   slots: tuple[Raw | bytes, ...]) -> tuple[bytes, bytes]:
        """``body`` of the first prefill leg and of the decode leg that it sends to."""
        name, left = transfer.encode(), round(left_s, 3)
        who = (decode.instance, decode.incarnation, decode.control)
        return (self._template(Role.PREFILL).fill(slots, _params(False, _FIRST, left, who) % name),
                self._template(Role.DECODE).fill(slots, _params(True, _FIRST, left, None) % name))

    def _template(self, role: Role) -> Template:
        if role is Role.DECODE:
            if self._decode is None:
                self._decode = Template(self._asked, self._names, role)
            return self._decode
        if self._prefill is None:
            self._prefill = Template(self._asked, self._names, role)
        return self._prefill


class Shapes:
    """Shapes that were seen lately."""

    def __init__(self, *, goes_on: bool) -> None:
        """``goes_on``: streams go on elsewhere."""
        self._goes_on = goes_on
        self._known: dict[tuple[str | bytes, ...], Shape | None] = {}
        self._looked: tuple[bytes, _Split] | None = None
        """The body that ``known`` has just looked at in vain: ``parse`` will ask for it next."""

    def known(self, api: Api, body: bytes) -> bodies.Request | None:
        """As ``parse``, where its shape is known; None elsewhere, also where it is no request."""
        try:
            split = _split(api, body)
        except Fault:  # ``parse`` says what is wrong
            return None
        shape = None if split.key is None else self._known.get(split.key)
        if shape is None:
            self._looked = body, split
            return None
        return _of(api, shape, split)

    def parse(self, api: Api, body: bytes) -> bodies.Request:
        """As ``bodies.parse``; with its shape from the third request of one on, since most that are rare come once."""
        looked, self._looked = self._looked, None
        split = looked[1] if looked is not None and looked[0] is body else _split(api, body)
        if split.key is None:
            return bodies.checked(api, split.fields)
        shape = self._known.get(split.key)
        if shape is not None:
            return _of(api, shape, split)
        request = bodies.checked(api, split.fields)
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        again = split.key in self._known
        self._known[split.key] = Shape(request, split.names, goes_on=self._goes_on) if again else None
        return request


class _Split(msgspec.Struct):
    """A body, looked at."""

    fields: dict[str, Raw]
    key: tuple[str | bytes, ...] | None
    """All but the slots; None where that is too much to be kept."""
    names: list[str]
    slots: list[Raw]


def _of(api: Api, shape: Shape, split: _Split) -> bodies.Request:
    return bodies.Request(api, split.fields, shape.model, shape.stream, shape.skips, None, shape, tuple(split.slots))


def _split(api: Api, body: bytes) -> _Split:
    fields = bodies.split(body)
    key: list[str | bytes] = [api]
    names: list[str] = []
    slots: list[Raw] = []
    size = len(body)
    for name, raw in fields.items():
        key.append(name)
        if name in _SLOTS and _plain(name, raw):
            names.append(name)
            slots.append(raw)
            size -= len(raw)
        else:
            key.append(bytes(raw))
    return _Split(fields, tuple(key) if size <= MAX_BYTES else None, names, slots)


def _plain(name: str, raw: Raw) -> bool:
    """Whether a value may stand in a slot: a string, messages of text, a short whole number."""
    if name in _NUMBERS:
        return len(raw) < 10 and bytes(raw).isdigit()
    first = memoryview(raw)[0]
    return first == ord('"') if name in _TEXTS else first == ord("[") and not has_parts(raw)


def params_of(leg: legs.Leg) -> bytes:
    """``kv_transfer_params`` of a leg, as JSON."""
    peer = leg.peer
    who = None if peer is None else (peer.instance, peer.incarnation, peer.control)
    return _params(leg.role is Role.DECODE, leg.attempt, leg.remaining_s, who) % leg.transfer.encode()


@lru_cache(maxsize=4096)
def _params(decode: bool, attempt: Attempt, remaining_s: float,
            who: tuple[InstanceName, Incarnation, HostPort] | None) -> bytes:
    leg = legs.Leg(legs.VERSION, Role.DECODE if decode else Role.PREFILL, _MARKED, attempt, remaining_s,
                   None if who is None else legs.Peer(*who))
    return _encode(legs.encode(leg)).replace(b"%", b"%%").replace(_MARK, b"%b")


_PEER = legs.Peer(InstanceName("p"), Incarnation("i"), HostPort("c"))
