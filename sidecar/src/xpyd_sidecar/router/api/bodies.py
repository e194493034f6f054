"""One request, split into fields that are never decoded, its hash, and the two bodies that are derived from it.

A prompt of any size is skipped over, not read: splitting costs 41 µs for 128 KB. Re-encoding also does away with repeated
names, so that router and engine can never read two different values of one field. A body's outline is judged before
anything is built of it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NewType, TypeVar, cast

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs, prefix_cuts
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.router.api.faults import bad_request
from xpyd_sidecar.router.api.fields import DIALECTS, FORCED, TABLE, Api, OnPrefill, is_null, is_true, strip_mark, truth
from xpyd_sidecar.router.api.hidden import may_hold, outline_fault, refuse
from xpyd_sidecar.router.api.priority import OWN, PriorityBand, clamp_field
from xpyd_sidecar.router.api.salts import CacheSalt
from xpyd_sidecar.router.api.surrogates import lone_surrogate

EMPTY = Raw(b"")
PROMPT_IDS = "prompt_token_ids"
_CUTS = prefix_cuts.FIELD.encode()
_ENDINGS = frozenset({"add_generation_prompt", "continue_final_message"})
"""Fields that say how a chat's messages end."""
PROMPT: dict[Api, tuple[str, ...]] = {
    "completions": ("prompt",), "chat": ("messages",), "messages": ("system", "tools", "messages"),
    "responses": ("instructions", "tools", "input")}
"""Fields that hold most of the prompt, in the order in which it is made of them."""
RequestHash = NewType("RequestHash", bytes)
HASH_SIZE = 16
MAX_PEERS = 4096
TRANSFER = TransferId(secrets.token_hex(16))
"""Stands for a transfer's name while parameters are made; nobody can have sent it."""
ASIDE = frozenset({
    "request_id", "session_id", "user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt", "priority",
    "service_tier", "store", "stream", "stream_options", "stream_interval"})
"""Fields that a request's hash is not made of."""
_KEPT = "what it names is kept by one engine, and requests go to any of them; send the whole conversation"
_T = TypeVar("_T")
_V = TypeVar("_V")
_FIRST_TOKEN = ("temperature", "logit_bias", "allowed_token_ids", "repetition_penalty", "ignore_eos", "stop_token_ids",
                "skip_special_tokens")
"""Fields that choose or show the first token of a greedy answer."""
_WATCHED = {api: {name: rule.skips for name, rule in table.items() if rule.skips} for api, table in TABLE.items()}
"""Fields that may keep a request from being split, and what says so."""
_NOT_KEPT = {api: frozenset(name for name, rule in table.items() if rule.leg is not OnPrefill.KEEP)
             for api, table in TABLE.items()}
_WHERE_GIVEN = {api: [(name, Raw(rule.value)) for name, rule in table.items()
                      if rule.leg is OnPrefill.SET and rule.value and not rule.always] for api, table in TABLE.items()}
"""Fields that prefill's leg sets where the client sent them."""
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode
_model = msgspec.json.Decoder(str | None).decode


class GenerationRequest(msgspec.Struct, frozen=True):
    """A client's request, split into fields that were never decoded."""

    api: Api
    fields: dict[str, Raw]
    model: str | None
    stream: bool
    skips: str
    """Not empty: the field that makes it skip prefill."""
    prompt_ids: Raw | None = None
    """Token ids (a JSON list) that stand for the rendered messages of a chat."""

    @property
    def prompt(self) -> Raw:
        """The most of it, as the client wrote it; empty where there is none."""
        first, *more = PROMPT[self.api]
        found = self.fields.get(first, EMPTY)
        return Raw(b"".join([found, *(self.fields.get(name, EMPTY) for name in more)])) if more else found


def parse(api: Api, body: bytes) -> GenerationRequest:
    """Split a body into its fields. Raises HttpFault, as ``split`` and ``read_fields``."""
    return read_fields(api, split(body))


def split(body: bytes) -> dict[str, Raw]:
    """The fields of a body. Raises HttpFault: 400; it has too many names, goes too deep, or is no JSON object."""
    body = strip_mark(body)
    fault = outline_fault(body)
    if fault is not None:
        raise fault
    try:
        return _decode_fields(body)
    except BAD_JSON as error:
        half = lone_surrogate(body)
        why = str(error) if half is None else (
            f"{half[1].decode()} at byte {half[0]} is half of a surrogate pair: a character was cut in two")
        raise bad_request(f"the body is not a JSON object: {why}", code="invalid_json") from None


def read_fields(api: Api, fields: dict[str, Raw]) -> GenerationRequest:
    """A request of these fields. Raises HttpFault: 400, one is refused or has the wrong type (``param`` names it)."""
    refuse(fields)
    skips = _skips(api, fields)
    model = _read(_model, "model", fields["model"]) if "model" in fields else None
    if model == "":
        raise bad_request("'model' must not be empty", param="model")
    stream = "stream" in fields and bool(_read(truth, "stream", fields["stream"]))
    return GenerationRequest(api, fields, model, stream, skips)


def _skips(api: Api, fields: dict[str, Raw]) -> str:
    return next((name for name, raw in fields.items()
                 if (ask := _WATCHED[api].get(name)) is not None and not is_null(raw) and _read(ask, name, fields)), "")


class PassedBody(msgspec.Struct, frozen=True):
    """The JSON body of a passed request. The engine checks the rest of it: it alone knows its API."""

    model: str | None
    fields: dict[str, Raw]
    body: bytes
    """What an engine gets: the client's, or the same with each field once where one might be read that was not checked."""


def passed_body(path: str, body: bytes, band: PriorityBand = OWN, salt: CacheSalt | None = None, *,
           anew: bool = False) -> PassedBody:
    """Split a JSON body into its fields, which are not decoded, and check those that are the router's. ``band``: of its
    priority. ``salt``: what keeps its prefixes apart. ``anew``: its client may not ask for everything, so engines get each
    field once, as it was judged.

    Raises HttpFault: 400; see ``split``, or it holds a field that a client must not send, or a priority that is no whole
    number (``param`` names it).
    """
    fields = split(body)
    refuse(fields)
    clamped = clamp_field(fields, band)
    if salt is not None:
        salt.write(fields)
    if path == "/v1/responses":
        for name in ("previous_response_id", "conversation", "background"):
            given = fields.get(name)
            if given is not None and (is_true(given) if name == "background" else not is_null(given)):
                raise bad_request(f"{name!r} cannot be served: {_KEPT}", param=name, code="refused_field")
    model = _read(_model, "model", fields["model"]) if "model" in fields else None
    return PassedBody(model, fields, _encode(fields) if anew or clamped or salt is not None or may_hold(body) else body)


def in_dialect(api: Api, asked: PassedBody) -> GenerationRequest:
    """A passed request that generates, as prefill and decode share it."""
    return GenerationRequest(api, asked.fields, asked.model, is_true(asked.fields.get("stream")), _skips(api, asked.fields))


def hash_of(kind: str, fields: Mapping[str, Raw]) -> RequestHash:
    """The hash of a request of this kind (``completions``, ``chat``, or the path of a passed one): equal for all that ask
    engines for the same work.

    It is made of the model, of the prompt and of how tokens are chosen, as the client wrote them. Left out is what differs
    between two tries of one request, or says only how the answer is shown: ids, whose request it is, whether it is
    streamed. Where a table says which fields an API has, others are left out too: the engine ignores them, so they are no
    way to look new.
    """
    known = TABLE.get(cast("Api", kind))
    digest = hashlib.blake2b(kind.encode(), digest_size=HASH_SIZE)
    for name in sorted(fields):
        raw = fields[name]
        if name in ASIDE or (known is not None and name not in known) or is_null(raw):
            continue
        digest.update(b"\0%b\0%d\0" % (name.encode(errors="surrogatepass"), len(raw)))
        digest.update(raw)
    return RequestHash(digest.digest())


def body_of(request: GenerationRequest, role: Role, leg: legs.Leg | None, cuts: str = "") -> bytes:
    """The body of a leg. ``leg`` is None where decode also prefills; ``cuts``: what the prompt's prefixes are called
    (``PromptPrefix.cuts``).
    """
    if role is Role.DECODE:
        return decode_body(request, leg, cuts)
    if leg is None:
        raise OurFault("a prefill leg without parameters")
    return prefill_body(request, leg, cuts)


def prefill_body(request: GenerationRequest, leg: legs.Leg, cuts: str = "") -> bytes:
    """The prefill leg: one token, and where its KV goes. Of a dialect it has vLLM's own word for one as well: its checks
    of a request then allow for one token.
    """
    body = one_token(request)
    body[legs.FIELD] = _params(request, leg, cuts)
    return _encode(body)


def first_token_body(request: GenerationRequest, leg: legs.Leg, cuts: str = "") -> bytes:
    """A prefill leg whose token is shown: chosen and written as decode's first one is."""
    body = one_token(request)
    for name in _FIRST_TOKEN:
        if name in request.fields:
            body[name] = request.fields[name]
    if "min_tokens" in request.fields and bytes(request.fields["min_tokens"]) not in {b"0", b"null"}:
        body["min_tokens"] = Raw(b"1")
    body["stream"] = body["return_token_ids"] = Raw(b"true")
    body[legs.FIELD] = _params(request, leg, cuts)
    return _encode(body)


def may_end_with_answer(request: GenerationRequest) -> bool:
    """Whether a chat's template can be given fewer of its messages: the request says nothing of how they end."""
    return request.fields.keys().isdisjoint(_ENDINGS)


def pulled_body(request: GenerationRequest, messages: bytes, leg: legs.Leg) -> bytes:
    """A leg over the first messages of a chat, rendered as they are within it, for one token that nobody reads."""
    body = one_token(request)
    body["messages"] = Raw(messages)
    body["add_generation_prompt"] = Raw(b"false")
    body[legs.FIELD] = Raw(params_of(leg, request.api))
    return _encode(body)


def one_token(request: GenerationRequest) -> dict[str, Raw]:
    """The fields of a request for one token, with every one dropped that one token contradicts."""
    api, dropped = request.api, _NOT_KEPT[request.api]
    body = {name: raw for name, raw in request.fields.items() if name not in dropped}
    body.update({name: value for name, value in _WHERE_GIVEN[api] if name in request.fields})
    body.update(FORCED[api])
    return body


def decode_body(request: GenerationRequest, leg: legs.Leg | None, cuts: str = "") -> bytes:
    """The decode leg: the client's request; ``leg`` is None where decode also prefills."""
    body = dict(request.fields)
    body.pop(legs.FIELD, None)
    if leg is not None or request.prompt_ids is not None or cuts:
        body[legs.FIELD] = _params(request, leg, cuts)
    return _encode(body)


def _params(request: GenerationRequest, leg: legs.Leg | None, cuts: str) -> Raw:
    params = b"{}" if leg is None else params_of(leg, request.api, cuts)
    if leg is None and cuts:
        params = b'{"%b":"%b"}' % (_CUTS, cuts.encode())
    if request.prompt_ids is None:
        return Raw(params)
    # The engine takes prompt_token_ids out before connectors see the rest (vLLM renderers/online_renderer.py).
    return Raw(_encode({**_decode_fields(params), PROMPT_IDS: request.prompt_ids}))


def params_of(leg: legs.Leg, api: Api, cuts: str = "") -> bytes:
    """``kv_transfer_params`` of a leg, as JSON; with what the prompt's prefixes are called, where ``cuts`` says it."""
    decodes = leg.role is Role.DECODE
    who = leg.peer, decodes, not decodes and api in DIALECTS
    before, behind = _around_transfer(leg.attempt, leg.remaining_s, leg.limit_s, who)
    if cuts:
        return b'%b%b%b,"%b":"%b"}' % (before, leg.transfer.encode(), behind[:-1], _CUTS, cuts.encode())
    return before + leg.transfer.encode() + behind


@lru_cache(maxsize=MAX_PEERS)
def _around_transfer(attempt: Attempt, remaining_s: float, limit_s: float | None,
                     who: tuple[legs.Peer | None, bool, bool]) -> tuple[bytes, bytes]:
    """A leg's parameters as JSON, before and behind its transfer's name: first legs between two engines differ in nothing
    else. ``who``: whom prefill sends to; whether it is decode's leg; whether vLLM's own word for a prefill leg is said.
    """
    peer, decodes, marked = who
    role = Role.DECODE if decodes else Role.PREFILL
    params = legs.encode(legs.Leg(legs.VERSION, role, TRANSFER, attempt, remaining_s, peer, limit_s))
    if marked:
        params[legs.REMOTE_DECODE] = True
    before, mark, behind = _encode(params).partition(TRANSFER.encode())
    assert mark, "parameters without the transfer's name"
    return before, behind


def _read(read: Callable[[_T], _V], name: str, given: _T) -> _V:
    try:
        return read(given)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise bad_request(f"{name!r}: {error}", param=name) from None
