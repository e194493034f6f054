"""What may be in the body of a passed request.

Belongs here: fields that only the router may send, and those that need what one engine alone keeps. The engine checks the
rest: it alone knows its API.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from xpyd_sidecar.routing.bodies import BAD_JSON, refuse_smuggled
from xpyd_sidecar.routing.faults import bad_request
from xpyd_sidecar.routing.fields import ONLY_ROUTER, is_null

_OURS = ("kv_transfer_params", "ec_transfer_params")
_KEPT = "the answer it names is kept by one engine, and requests go to any of them; send the whole conversation"
_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_model = msgspec.json.Decoder(str | None).decode


class Asked(msgspec.Struct, frozen=True):
    """A JSON body."""

    model: str | None
    fields: dict[str, Raw]


def checked(path: str, body: bytes) -> Asked:
    """Split a JSON body into its fields, which are not decoded, and check those that are the router's.

    A body that is no object is the engine's to refuse, but for one reason: what the router cannot read it cannot check.

    Raises:
        Fault: 400; it is no JSON object, or holds a field that a client must not send (``param`` names it).
    """
    try:
        fields = _decode(body)
    except BAD_JSON as error:
        raise bad_request(f"the body is not a JSON object: {error}", code="invalid_json") from None
    for name in _OURS:
        if name in fields and not is_null(fields[name]):
            raise bad_request(f"{name!r} cannot be sent by a client: {ONLY_ROUTER}", param=name, code="refused_field")
    refuse_smuggled(fields)
    if path == "/v1/responses":
        for name in ("previous_response_id", "background"):
            if name in fields and fields[name] not in (Raw(b"null"), Raw(b"false")):
                raise bad_request(f"{name!r} cannot be served: {_KEPT}", param=name, code="refused_field")
    try:
        return Asked(_model(fields["model"]) if "model" in fields else None, fields)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"'model': {error}", param="model") from None


def refuse_in_form(data: bytes) -> None:
    """Refuse a field of a form through which the names above would reach an engine. ``data``: any part of it.

    Raises:
        Fault: 400.
    """
    for name in (b"vllm_xargs", *(name.encode() for name in _OURS)):
        if data.find(name) >= 0:
            words = f"{name.decode()!r} cannot be sent in a form: {ONLY_ROUTER}"
            raise bad_request(words, param=name.decode(), code="refused_field")
