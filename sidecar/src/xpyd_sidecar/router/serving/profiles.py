"""What follows from a request's fields beside its prompt: worked out once for all requests that differ in that alone.

    {"model":"tiny","messages": [{"role":… ,"max_tokens":8,"temperature":0,"stream":true}
    └──────────────┘            prompt      └───────────────────────────────────────────┘ the rest says how it is served

Invariant: no rule of the tables asks more of a prompt than ``_PLAIN`` does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Role
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import EXACT_ALONE, SamplingTerms, has_parts
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.priority import OWN, PriorityBand, clamp_field
from xpyd_sidecar.router.api.salts import CacheSalt
from xpyd_sidecar.router.stream import continuation

MAX_PROFILES = 256
MAX_BYTES = 1024
"""Of a request without its prompt; the profile of a longer one is not remembered."""
Key = tuple[str | bytes, ...]
"""The API, the names of the fields, and the values of all but the prompt."""
_MARK = secrets.token_hex(16).encode()
"""Stands for a prompt while a template is made; nobody can have sent it."""
_ALIKE = legs.Leg(legs.VERSION, Role.DECODE, bodies.TRANSFER, Attempt(1), 1.0)


class RequestProfile:
    """How a request is served, as far as its fields beside the prompt say."""

    __slots__ = ("_asked", "_templates", "begins", "known", "model", "skips", "speaks", "stream", "terms")

    def __init__(self, request: bodies.GenerationRequest, *, goes_on: bool, speaks: bool,
                 terms: SamplingTerms = EXACT_ALONE) -> None:
        """``goes_on``: streams go on elsewhere, on these terms. ``speaks``: clients may get prefill's token."""
        self.model, self.stream, self.skips = request.model, request.stream, request.skips
        self.terms = terms
        self.begins = continuation.position_of(request, goes_on=goes_on, terms=terms)
        """Where a client that has nothing yet is: ``fresh_copy`` for each. None: its stream is not followed."""
        self.speaks = speaks and continuation.speaks_first(request, self.begins)
        """Its client gets prefill's token."""
        self.known = False
        """Another request had it before."""
        self._asked: bodies.GenerationRequest | None = None
        self._templates: tuple[_Template, _Template] | None = None

    def keep(self, request: bodies.GenerationRequest) -> None:
        """Others may have it: keep what legs ask for ``request``, which it was made of, without its prompt and its body."""
        of = bodies.PROMPT[request.api][0]
        fields = {name: Raw(_MARK if name == of else bytes(raw)) for name, raw in request.fields.items()}
        self._asked = continuation.first_request(msgspec.structs.replace(request, fields=fields), self.begins)

    def body(self, prompt: Raw, leg: legs.Leg, cuts: str = "") -> bytes:
        """The body of a leg of a request with this profile, which is ``known``, as ``bodies.body_of`` makes it."""
        asked = self._asked
        assert asked is not None, "a profile that was not kept"
        if self._templates is None:
            self._templates = _template(asked, Role.PREFILL), _template(asked, Role.DECODE)
        before, between = self._templates[leg.role is Role.DECODE]
        return b"%b%b%b%b}" % (before, prompt, between, bodies.params_of(leg, asked.api, cuts))


_Template = tuple[bytes, bytes]
"""What stands before the prompt, and between it and the leg's parameters."""


def _template(asked: bodies.GenerationRequest, role: Role) -> _Template:
    leg = msgspec.structs.replace(_ALIKE, role=role)
    body = bodies.body_of(asked, role, leg)
    before, mark, behind = body.partition(_MARK)
    between, params, end = behind.partition(bodies.params_of(leg, asked.api))
    assert mark, "a leg's body without its prompt"
    assert params, "a leg's body without its parameters"
    assert end == b"}", "a leg's body whose parameters are not the last"
    return before, between


class Profiles:
    """Profiles that were seen lately."""

    def __init__(self, *, goes_on: bool, speaks: bool, terms: Callable[[], SamplingTerms] = lambda: EXACT_ALONE) -> None:
        """See ``RequestProfile``. ``terms``: those that are now."""
        self._goes_on = goes_on
        self._speaks = speaks
        self._terms = terms
        self._judged = terms()
        self._doubted = False
        """The terms may be others now."""
        self._known: dict[Key, RequestProfile] = {}

    def parse(self, api: Api, body: bytes, band: PriorityBand = OWN,
              salt: CacheSalt | None = None) -> tuple[bodies.GenerationRequest, RequestProfile]:
        """A request and its profile. ``band``: of its priority. ``salt``: what keeps its prefixes apart. Raises HttpFault,
        as ``bodies.parse``; 400, the priority is no whole number, or a salt no text.
        """
        if self._doubted:
            self._judge()
        fields = bodies.split(body)
        clamp_field(fields, band)
        if salt is not None:
            salt.write(fields)
        key = _key(api, fields, len(body))
        profile = None if key is None else self._known.get(key)
        if profile is not None:
            profile.known = True
            return bodies.GenerationRequest(api, fields, profile.model, profile.stream, profile.skips), profile
        request = bodies.read_fields(api, fields)
        profile = RequestProfile(request, goes_on=self._goes_on, speaks=self._speaks, terms=self._judged)
        if key is not None:
            if len(self._known) >= MAX_PROFILES:
                self._known.clear()
            profile.keep(request)
            self._known[key] = profile
        return request, profile

    def invalidate(self) -> None:
        """The terms may be others from now on."""
        self._doubted = True

    def _judge(self) -> None:
        self._doubted, terms = False, self._terms()
        if terms is not self._judged:
            self._judged = terms
            self._known.clear()


def _key(api: Api, fields: Mapping[str, Raw], size: int) -> Key | None:
    """What a profile is found by. None: it is not remembered."""
    of = bodies.PROMPT[api][0]
    prompt = fields.get(of)
    if prompt is None or size - len(prompt) > MAX_BYTES or not _PLAIN[of](prompt):
        return None
    others = dict(fields)
    del others[of]
    return (api, *fields, *map(bytes, others.values()))


def _text(prompt: Raw) -> bool:
    return _STRING(prompt) is not None


def _text_messages(prompt: Raw) -> bool:
    return _LIST(prompt) is not None and not has_parts(prompt)


_STRING, _LIST = re.compile(rb'"').match, re.compile(rb"\[").match
_PLAIN: dict[str, Callable[[Raw], bool]] = {"prompt": _text, "messages": _text_messages}
"""Whether a prompt is like most: text, or messages of text alone."""
