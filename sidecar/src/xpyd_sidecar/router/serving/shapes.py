"""Requests of one shape: those that differ in their prompt and a few plain values alone.

    {"model":"tiny","messages": [{"role":… ,"max_tokens": 8 ,"temperature":0,"stream":true}
                                 slot                    slot      └ the rest is the shape

Invariant: no rule of the tables asks for more of a value in a slot than ``_PLAIN`` does. A test holds every kept body
against the one that ``bodies`` makes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import EXACT_ALONE, FailoverMode, SamplingTerms, has_parts, text_messages
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.stream import continuation
from xpyd_sidecar.router.stream.position import Position

MAX_SHAPES = 256
MAX_BYTES = 1024
"""Of a request without its slots."""
MAX_LAYOUTS, MAX_LAYOUT = 4, 64 << 10
"""How many are kept of an API, and how long the bodies may be that they are made of."""
MISSES = 1024
"""Of so many bodies that had none, as many get one as are kept: making one costs a hundred times what it saves."""
MAX_PEERS = 4096
MAX_DIGITS = 9
MOST_DIGITS = 10 ** MAX_DIGITS - 1
Key = tuple[tuple[str, ...], tuple[bytes | None, ...]]
"""Names of fields, and their values; None for the value of a slot."""
Looked = tuple[Key, list[bytes], dict[str, Raw]]
"""A body's key, the values of its slots, and its fields."""
Params = tuple[bytes, bytes]
"""``kv_transfer_params`` of a leg as JSON: what stands before the transfer's name, and behind it."""
_MARK = secrets.token_hex(16).encode()
"""Stands for a value while a template is made; nobody can have sent it."""
_MARKED = TransferId(_MARK.decode())
_FIRST = Attempt(1)
_encode = msgspec.json.Encoder().encode
_NUMBER = b"(0|[1-9][0-9]{0,%d})" % (MAX_DIGITS - 1)
_text = msgspec.json.Decoder(str).decode


class Template:
    """A leg's body with places for slots and for what the router says of the leg."""

    __slots__ = ("_form", "_values")

    def __init__(self, request: bodies.GenerationRequest, names: list[str], role: Role) -> None:
        """``request``: as its leg asks it. ``names``: fields that are slots, in the request's order."""
        marks = {name: _MARK + b"%d." % number for number, name in enumerate(names)}
        fields = {name: Raw(marks[name]) if name in marks else raw for name, raw in request.fields.items()}
        leg = legs.Leg(legs.VERSION, role, _MARKED, Attempt(1), 1.0, _PEER if role is Role.PREFILL else None)
        body = bodies.body_of(msgspec.structs.replace(request, fields=fields), role, leg)
        own = len(names)
        params = b"".join(_MARK + b"%d." % number for number in (own, own + 1, own + 2))
        first, *rest = [part.partition(b".") for part in body.replace(_encode(legs.encode(leg)), params).split(_MARK)]
        order = [int(number) for number, _, _ in rest]
        assert order.count(own) == 1, "a leg's body without its parameters, or with them twice"
        literals = (b"".join(first), *(literal for _, _, literal in rest))
        self._form = b"%b".join([literal.replace(b"%", b"%%") for literal in literals])
        self._values = itemgetter(*order)
        """Of slots and parameters, those that are in the body, in its order."""

    def fill(self, slots: Sequence[bytes], params: Params, transfer: bytes, before: bytes = b"",
             behind: bytes = b"") -> bytes:
        """The body with these values of slots and parameters. ``transfer``: its name, which stands between the latter.

        ``before`` and ``behind``: of a head, around how many bytes the body has; then it is the whole message.
        """
        body = self._form % self._values((*slots, params[0], transfer, params[1]))
        return b"%b%d%b%b" % (before, len(body), behind, body) if before else body


class Shape:
    """What requests of one shape have in common."""

    __slots__ = ("_asked", "_names", "_templates", "api", "begins", "model", "noted", "plain", "prompt_at",
                 "shows_logprobs", "skips", "stream", "terms")

    def __init__(self, request: bodies.GenerationRequest, names: list[str], *, goes_on: bool,
                 terms: SamplingTerms = EXACT_ALONE) -> None:
        position = self.begins = continuation.position_of(request, goes_on=goes_on, terms=terms)
        """Where a client that has nothing yet is: ``anew`` for each."""
        self.terms = terms
        self.api, self.model, self.stream, self.skips = request.api, request.model, request.stream, request.skips
        self._names = names
        prompt = bodies.PROMPT[request.api][0]
        self.prompt_at = names.index(prompt) if prompt in names else -1
        """Which slot is the prompt: text, or messages of it. -1: none is."""
        self.plain = self.stream and not self.skips and self.prompt_at >= 0 and "priority" not in request.fields
        """Its requests may take the straight course."""
        self.noted = position is not None and position.way is FailoverMode.CONTINUE and not position.asked_ids
        """Token ids of its streams are noted, and the client does not see them."""
        self.shows_logprobs = position is not None and position.shows_logprobs
        self._asked = continuation.first_request(request, position)
        self._templates: tuple[Template, Template] | None = None

    def request(self, fields: dict[str, Raw], slots: Sequence[bytes]) -> Shaped:
        """A request of this shape. ``fields``: as its client sent them."""
        return Shaped(self.api, fields, self.model, self.stream, self.skips, None, self, tuple(slots))

    def position(self) -> Position | None:
        """As ``continuation.position_of``."""
        return None if self.begins is None else self.begins.anew()

    def body(self, leg: legs.Leg, slots: Sequence[bytes]) -> bytes:
        """As ``bodies.body_of`` makes it of ``continuation.first_request``."""
        return self.templates()[leg.role is Role.DECODE].fill(slots, params_of(leg), leg.transfer.encode())

    def templates(self) -> tuple[Template, Template]:
        """Of the bodies of prefill's and of decode's legs."""
        if self._templates is None:
            self._templates = (Template(self._asked, self._names, Role.PREFILL),
                               Template(self._asked, self._names, Role.DECODE))
        return self._templates


class Shaped(bodies.GenerationRequest, frozen=True):
    """A request that is like others."""

    shape: Shape | None = None
    """What is known of all of them, as a client sent it; not of what was derived from it."""
    slots: tuple[bytes, ...] = ()


def shape_of(request: bodies.GenerationRequest) -> Shape | None:
    """The shape of a request; None where it is not known."""
    return request.shape if isinstance(request, Shaped) else None


class BodyLayout:
    """Where the slots of bodies are that are written alike: what stands between them is the same, byte for byte.

        {"model":"tiny","messages": [{"role":… ,"max_tokens": 8 ,"temperature":0,"stream":true}
        └──────── between[0] ──────┘ the long one └ between[1] ┘ └──────── between[2] ────────┘

    A body in which other whole values stand in these places is read as the one that was looked at, so nothing but those
    values has to be. The short ones are numbers, found from both ends. The long one is read as what it nearly always is,
    a text or messages of text, in one call: so it is whole, plain, and not deep.
    """

    __slots__ = ("_behind", "_first", "_most", "_numbers", "_read", "_tail", "shape")

    def __init__(self, shape: Shape, between: list[bytes], long: int, *, text: bool) -> None:
        """``long``: which slot is the one that is no number; ``text``: it is a string, no messages."""
        head, tail = between[:long + 1], between[long + 1:]
        head[-1] += b'"' if text else b"["
        tail[0] = (b'"' if text else b"]") + tail[0]
        self.shape = shape
        self._read: Callable[[bytes], object] = _text if text else text_messages
        self._first, self._behind = head[0], tail[0]
        self._numbers = re.compile(b"".join(_NUMBER + re.escape(part) for part in head[1:])).match if head[1:] else None
        self._tail = re.compile(b"".join(_NUMBER + re.escape(part) for part in tail[1:]) + rb"\Z").match
        self._most = sum(map(len, tail)) + MAX_DIGITS * len(tail)

    def slots(self, body: bytes) -> list[bytes] | None:
        """Those of a body; None: it is not written like this."""
        start = len(self._first)
        before: tuple[bytes, ...] = ()
        at = body.rfind(self._behind, -self._most)
        if at < start or not body.startswith(self._first):
            return None
        if self._numbers is not None:
            found = self._numbers(body, start, at)
            if found is None:
                return None
            start, before = found.end(), found.groups()
        tail = self._tail(body, at + len(self._behind))
        if tail is None:
            return None
        value = body[start - 1:at + 1]
        try:
            self._read(value)
        except bodies.BAD_JSON:
            return None
        return [*before, value, *tail.groups()]


def layout_of(body: bytes, shape: Shape, found: Looked) -> BodyLayout | None:
    """The layout of a body that was looked at. None: it has several long slots, or they cannot be found by their names.

    Each slot gets another value, to see that the body is still read alike, with these values in these places.
    """
    key, slots, _ = found
    names = _slot_names(key)
    long = [at for at, name in enumerate(names) if _PLAIN[name] is not _plain_number]
    if len(long) != 1:
        return None
    between: list[bytes] = []
    marks: list[bytes] = []
    start = 0
    for number, (name, value) in enumerate(zip(names, slots, strict=True)):
        at = body.find(b'"%b":' % name.encode(), start) + len(name) + 3
        at += len(body[at:]) - len(body[at:].lstrip(b" \t\r\n"))
        if not body.startswith(value, at):
            return None
        between.append(body[start:at])
        start = at + len(value)
        marks.append(b"%d" % (MOST_DIGITS - number) if number != long[0] else
                     b'["%b"]' % _MARK if value[0] == ord("[") else b'"%b"' % _MARK)
    between.append(body[start:])
    again = looked(b"".join(part for pair in zip(between, [*marks, b""], strict=True) for part in pair))
    if again is None or again[:2] != (key, marks):
        return None
    return BodyLayout(shape, between, long[0], text=names[long[0]] != "messages")


class Shapes:
    """Shapes that were seen lately."""

    def __init__(self, *, goes_on: bool, terms: Callable[[], SamplingTerms] = lambda: EXACT_ALONE) -> None:
        """``goes_on``: streams go on elsewhere, on these terms."""
        self._terms = terms
        self._judged = terms()
        self._doubted = False
        """The terms may be others now."""
        self._goes_on = goes_on
        self._known: dict[tuple[Api, Key], Shape | None] = {}
        self._layouts: dict[Api, list[BodyLayout]] = {}
        """Of the shapes, the latest first."""
        self._missed = 0
        self._latest: tuple[bytes, Looked | None] | None = None
        """What ``known`` has just looked at in vain: ``parse`` will ask for it next."""

    def known(self, api: Api, body: bytes) -> tuple[Shape, list[bytes]] | None:
        """Shape and slots of a body whose shape is known; None of others, also where it is no request."""
        if self._doubted:
            self._judge()
        layouts = self._layouts.get(api, ())
        for layout in layouts:
            slots = layout.slots(body)
            if slots is not None:
                return layout.shape, slots
        found = looked(body)
        shape = None if found is None else self._known.get((api, found[0]))
        if found is None or shape is None:
            self._latest = body, found
            return None
        self._missed += 1
        if self._missed % MISSES <= MAX_LAYOUTS and len(body) <= MAX_LAYOUT:
            made = layout_of(body, shape, found)
            if made is not None:
                self._layouts[api] = [made, *layouts][:MAX_LAYOUTS]
        return shape, found[1]

    def parse(self, api: Api, body: bytes) -> bodies.GenerationRequest:
        """As ``bodies.parse``; with its shape from the third request of one on, since most that are rare come once."""
        latest, self._latest = self._latest, None
        found = latest[1] if latest is not None and latest[0] is body else looked(body)
        if found is None:
            return bodies.parse(api, body)
        if self._doubted:
            self._judge()
        key, slots, fields = found
        shape = self._known.get((api, key))
        if shape is not None:
            return shape.request(fields, slots)
        request = bodies.checked(api, fields)
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        again = (api, key) in self._known
        self._known[api, key] = (Shape(request, _slot_names(key), goes_on=self._goes_on, terms=self._judged)
                                 if again else None)
        return request

    def doubt(self) -> None:
        """The terms may be others from now on: they are looked at before a shape is asked for."""
        self._doubted = True

    def _judge(self) -> None:
        self._doubted, terms = False, self._terms()
        if terms is not self._judged:
            self._judged = terms
            self._known.clear()
            self._layouts.clear()
            self._missed = 0


def looked(body: bytes, most: int = MAX_BYTES) -> Looked | None:
    """What a shape is found by: bodies with equal keys differ in the values of their slots alone.

    None: it is no request (``bodies.parse`` says why), or has more than ``most`` bytes beside its slots.
    """
    try:
        fields = bodies.split(body)
    except HttpFault:
        return None
    names = tuple(fields)
    if sum(map(len, names)) > most:
        return None
    values: list[bytes | None] = list(map(bytes, fields.values()))
    slots: list[bytes] = []
    size = len(body)
    for at, plain in _may_be_slots(names):
        value = values[at]
        if value is not None and plain(value):
            slots.append(value)
            size -= len(value)
            values[at] = None
    return None if size > most else ((names, tuple(values)), slots, fields)


@lru_cache(maxsize=MAX_SHAPES)
def _may_be_slots(names: tuple[str, ...]) -> list[tuple[int, Callable[[bytes], bool]]]:
    return [(at, _PLAIN[name]) for at, name in enumerate(names) if name in _PLAIN]


def _slot_names(key: Key) -> list[str]:
    return [name for name, value in zip(*key, strict=True) if value is None]


def _plain_number(value: bytes) -> bool:
    return len(value) <= MAX_DIGITS and value.isdigit()


def _plain_text(value: bytes) -> bool:
    return value[0] == ord('"')


def _plain_messages(value: bytes) -> bool:
    return value[0] == ord("[") and not has_parts(value)


_PLAIN: dict[str, Callable[[bytes], bool]] = {
    "max_tokens": _plain_number, "max_completion_tokens": _plain_number, "seed": _plain_number, "prompt": _plain_text,
    "user": _plain_text, "messages": _plain_messages}
"""Fields that may be slots, and what their values must be then: a short whole number, a string, messages of text alone."""


def params_of(leg: legs.Leg) -> Params:
    """``kv_transfer_params`` of a leg, as JSON."""
    peer = leg.peer
    who = None if peer is None else (peer.instance, peer.incarnation, peer.control)
    return params(leg.remaining_s, who, leg.limit_s, leg.attempt)


@lru_cache(maxsize=MAX_PEERS)
def params(remaining_s: float, who: tuple[InstanceName, Incarnation, HostPort] | None, limit_s: float | None,
           attempt: Attempt = _FIRST) -> Params:
    """The same of what a leg says. ``who``: where a prefill leg sends to; None: it is a decode leg."""
    role, peer = (Role.DECODE, None) if who is None else (Role.PREFILL, legs.Peer(*who))
    leg = legs.Leg(legs.VERSION, role, _MARKED, attempt, remaining_s, peer, limit_s)
    before, mark, behind = _encode(legs.encode(leg)).partition(_MARK)
    assert mark, "parameters without the transfer's name"
    return before, behind


_PEER = legs.Peer(InstanceName("p"), Incarnation("i"), HostPort("c"))
