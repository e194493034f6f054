"""Requests of one shape: those that differ in their prompt and a few plain values alone.

    {"model":"tiny","messages": [{"role":… ,"max_tokens": 8 ,"temperature":0,"stream":true}
                                 slot                    slot      └ the rest is the shape

Belongs here: finding a request's shape, and keeping what the tables say of it and the bodies that they make of it. Does not
belong here: the tables (``fields``, ``ways``) and the bodies (``bodies``); everything kept here was made by them.

Invariant: no rule of the tables asks for more of a value in a slot than ``_PLAIN`` does. A test holds every kept body
against the one that ``bodies`` makes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
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
from xpyd_sidecar.routing.ways import Way, has_parts

MAX_SHAPES = 256
MAX_BYTES = 1024
"""Of a request without its slots."""
MAX_PEERS = 4096
KINDS = {"max_tokens": 1, "max_completion_tokens": 1, "seed": 1, "prompt": 2, "user": 2, "messages": 3}
"""Fields that may be slots."""
Key = tuple[str | bytes, ...]
Keyed = Callable[[str, dict[str, Raw], dict[str, int], int, int], tuple[Key | None, list[str], list[Raw]]]
Params = tuple[bytes, bytes]
"""``kv_transfer_params`` of a leg as JSON: what stands before the transfer's name, and behind it."""
_MARK = secrets.token_hex(16).encode()
"""Stands for a value while a template is made; nobody can have sent it."""
_MARKED = TransferId(_MARK.decode())
_FIRST = Attempt(1)
_encode = msgspec.json.Encoder().encode


class Template:
    """A leg's body with places for slots and for what the router says of the leg."""

    __slots__ = ("_params_at", "_parts", "_slots_at")

    def __init__(self, request: bodies.Request, names: list[str], role: Role) -> None:
        """``request``: as its leg asks it. ``names``: fields that are slots, in the request's order."""
        marks = {name: _MARK + b"%d." % number for number, name in enumerate(names)}
        fields = {name: Raw(marks[name]) if name in marks else raw for name, raw in request.fields.items()}
        leg = legs.Leg(legs.VERSION, role, _MARKED, Attempt(1), 1.0, _PEER if role is Role.PREFILL else None)
        body = bodies.body_of(msgspec.structs.replace(request, fields=fields), role, leg)
        params = _encode(legs.encode(leg))
        first, *rest = body.replace(params, _MARK + b"%d." % len(names)).split(_MARK)
        self._parts: list[Raw | bytes] = [first]
        self._slots_at: list[tuple[int, int]] = []
        """Where a slot's value stands in the parts, and which slot."""
        self._params_at = 0
        """Where the three parts of the parameters stand."""
        for part in rest:
            number, _, piece = part.partition(b".")
            at = len(self._parts)
            if int(number) < len(names):
                self._slots_at.append((at, int(number)))
                self._parts += [b"", piece]
            else:
                assert not self._params_at, "a leg's body with its parameters twice"
                self._params_at = at
                self._parts += [b"", b"", b"", piece]
        assert self._params_at, "a leg's body without its parameters"

    def fill(self, slots: Sequence[Raw | bytes], params: Params, transfer: bytes) -> bytes:
        """The body."""
        parts, at = self._parts.copy(), self._params_at
        for place, number in self._slots_at:
            parts[place] = slots[number]
        parts[at], parts[at + 2] = params
        parts[at + 1] = transfer
        return b"".join(parts)


class Shape:
    """What requests of one shape have in common."""

    __slots__ = ("_api", "_asked", "_decode", "_names", "_prefill", "asked_ids", "choices", "lasts", "model",
                 "noted", "shows_logprobs", "skips", "stream", "wants_usage", "way")

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
        self.lasts = position is not None and position.lasts
        self.noted = self.way is Way.CONTINUE and not self.asked_ids
        """Token ids of its streams are noted, and the client does not see them."""
        self._asked = continuation.first_request(request, position)
        self._prefill: Template | None = None
        self._decode: Template | None = None

    def position(self) -> Position | None:
        """As ``continuation.position_of``."""
        if self.way is None:
            return None
        return Position(self._api, self.way, asked_ids=self.asked_ids, wants_usage=self.wants_usage, choices=self.choices,
                        shows_logprobs=self.shows_logprobs, lasts=self.lasts)

    def body(self, leg: legs.Leg, slots: Sequence[Raw | bytes]) -> bytes:
        """As ``bodies.body_of`` makes it of ``continuation.first_request``."""
        return self.template(leg.role).fill(slots, params_of(leg), leg.transfer.encode())

    def template(self, role: Role) -> Template:
        """Of the bodies of a role's legs."""
        if role is Role.DECODE:
            if self._decode is None:
                self._decode = Template(self._asked, self._names, role)
            return self._decode
        if self._prefill is None:
            self._prefill = Template(self._asked, self._names, role)
        return self._prefill


class Shapes:
    """Shapes that were seen lately."""

    def __init__(self, *, goes_on: bool, by: Keyed | None = None) -> None:
        """``goes_on``: streams go on elsewhere. ``by``: what does as ``keyed`` does."""
        self._keyed = by or keyed
        self._goes_on = goes_on
        self._known: dict[Key, Shape | None] = {}
        self._looked: tuple[bytes, _Split] | None = None
        """The body that ``known`` has just looked at in vain: ``parse`` will ask for it next."""

    def known(self, api: Api, body: bytes) -> bodies.Request | None:
        """As ``parse``, where its shape is known; None elsewhere, also where it is no request."""
        try:
            split = _split(self._keyed, api, body)
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
        split = looked[1] if looked is not None and looked[0] is body else _split(self._keyed, api, body)
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
    key: Key | None
    """All but the slots; None where that is too much to be kept."""
    names: list[str]
    slots: list[Raw]


def _of(api: Api, shape: Shape, split: _Split) -> bodies.Request:
    return bodies.Request(api, split.fields, shape.model, shape.stream, shape.skips, None, shape, tuple(split.slots))


def _split(keyed: Keyed, api: Api, body: bytes) -> _Split:
    fields = bodies.split(body)
    return _Split(fields, *keyed(api, fields, KINDS, len(body), MAX_BYTES))


def keyed(api: str, fields: dict[str, Raw], kinds: dict[str, int], size: int,
          most: int) -> tuple[Key | None, list[str], list[Raw]]:
    """All of a body of ``size`` bytes but its slots (None where that is more than ``most`` bytes), their names and values.

    ``kinds``: what may stand in slots: a short whole number, a string, messages of text alone.
    """
    values: list[str | bytes] = []
    names: list[str] = []
    slots: list[Raw] = []
    for name, raw in fields.items():
        kind = kinds.get(name)
        if kind is not None and _PLAIN[kind](raw):
            values.append(name)
            names.append(name)
            slots.append(raw)
            size -= len(raw)
        else:
            values.append(bytes(raw))
    return (api, *fields, *values) if size <= most else None, names, slots


def _plain_number(raw: Raw) -> bool:
    return len(raw) < 10 and bytes(raw).isdigit()


def _plain_text(raw: Raw) -> bool:
    return memoryview(raw)[0] == ord('"')


def _plain_messages(raw: Raw) -> bool:
    return memoryview(raw)[0] == ord("[") and not has_parts(raw)


_PLAIN: dict[int, Callable[[Raw], bool]] = {1: _plain_number, 2: _plain_text, 3: _plain_messages}


def params_of(leg: legs.Leg) -> Params:
    """``kv_transfer_params`` of a leg, as JSON."""
    peer = leg.peer
    who = None if peer is None else (peer.instance, peer.incarnation, peer.control)
    return _params(leg.role is Role.DECODE, leg.attempt, leg.remaining_s, who)


class FirstPair:
    """The parameters of first legs of a straight course (``Straight.start``)."""

    def __init__(self, left_s: float) -> None:
        left = round(left_s, 3)
        self._left = left
        self.decode = _params(True, _FIRST, left, None)
        self._known: dict[int, tuple[Target, Params]] = {}
        """By the identity of decode's target, which is the same object until the roster changes."""

    def prefill(self, decode: Target) -> Params:
        """Of the prefill leg that sends to a decode instance."""
        known = self._known.get(id(decode))
        if known is not None and known[0] is decode:
            return known[1]
        if len(self._known) >= MAX_PEERS:
            self._known.clear()
        made = _params(False, _FIRST, self._left, (decode.instance, decode.incarnation, decode.control))
        self._known[id(decode)] = decode, made
        return made


@lru_cache(maxsize=MAX_PEERS)
def _params(decode: bool, attempt: Attempt, remaining_s: float,
            who: tuple[InstanceName, Incarnation, HostPort] | None) -> Params:
    leg = legs.Leg(legs.VERSION, Role.DECODE if decode else Role.PREFILL, _MARKED, attempt, remaining_s,
                   None if who is None else legs.Peer(*who))
    before, mark, behind = _encode(legs.encode(leg)).partition(_MARK)
    assert mark, "parameters without the transfer's name"
    return before, behind


_PEER = legs.Peer(InstanceName("p"), Incarnation("i"), HostPort("c"))
