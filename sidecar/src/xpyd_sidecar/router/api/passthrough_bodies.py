"""What may be in the body of a passed request.

The engine checks the rest: it alone knows its API.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.bodies import split
from xpyd_sidecar.router.api.faults import bad_request
from xpyd_sidecar.router.api.fields import is_null
from xpyd_sidecar.router.api.hidden import may_hold, refuse
from xpyd_sidecar.router.api.lax import is_true

_KEPT = "the answer it names is kept by one engine, and requests go to any of them; send the whole conversation"
_encode = msgspec.json.Encoder().encode
_model = msgspec.json.Decoder(str | None).decode


class PassedBody(msgspec.Struct, frozen=True):
    """A JSON body."""

    model: str | None
    fields: dict[str, Raw]
    body: bytes
    """What an engine gets: the client's, or the same with each field once where one might be read that was not checked."""


def checked(path: str, body: bytes) -> PassedBody:
    """Split a JSON body into its fields, which are not decoded, and check those that are the router's.

    Raises HttpFault: 400; see ``bodies.split``, or it holds a field that a client must not send (``param`` names it).
    """
    fields = split(body)
    refuse(fields)
    if path == "/v1/responses":
        earlier = fields.get("previous_response_id")
        for name, wanted in (("previous_response_id", earlier is not None and not is_null(earlier)),
                             ("background", is_true(fields.get("background")))):
            if wanted:
                raise bad_request(f"{name!r} cannot be served: {_KEPT}", param=name, code="refused_field")
    try:
        model = _model(fields["model"]) if "model" in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"'model': {error}", param="model") from None
    return PassedBody(model, fields, _encode(fields) if may_hold(body) else body)
