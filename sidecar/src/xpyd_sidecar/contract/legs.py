"""``kv_transfer_params`` of the two legs of a request: what the router tells the two connectors.

The router mints ``transfer`` and counts ``attempt``; pairing never uses a request id (vLLM adds a random suffix to those).
A client that sends ``kv_transfer_params`` itself is refused by the router, so what an engine reads here is the router's.
Beside a leg, or alone, the router may put ``prompt_token_ids`` there for a chat that goes on elsewhere: the engine's front
end takes them out and renders no prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_sidecar.contract.ids import TRANSFER_ID, Attempt, HostPort, Incarnation, InstanceName, Role, TransferId

FIELD = "kv_transfer_params"
VERSION = 1
REMOTE = "do_remote_prefill"
"""vLLM's own word for a decode leg. With it the engine's front end tells the connector of a leg that it refuses, or whose
client leaves before the engine core knows of it: a request that is aborted from the start, with the same parameters."""

REMOTE_DECODE = "do_remote_decode"
"""Its word for a prefill leg: checks of a request then allow for one token (``thinking`` of ``/v1/messages``)."""

CACHED = "cached_tokens"
"""What prefill's answer says in ``FIELD``: how many tokens of the prompt it had in its cache."""


class Peer(msgspec.Struct, frozen=True):
    """The decode instance that fetches the KV of a prefill leg."""

    instance: InstanceName
    incarnation: Incarnation
    control: HostPort


class Leg(msgspec.Struct, frozen=True):
    """One leg.

    ``remaining_s`` is a duration, not a time of day, so that clocks need not agree: how long this leg may still wait for
    its counterpart, counted from the moment the engine receives it.
    """

    xpyd: int
    """Version of this structure."""
    role: Role
    transfer: TransferId
    attempt: Attempt
    remaining_s: float
    peer: Peer | None = None
    """Set on the prefill leg, absent on the decode leg."""
    limit_s: float | None = None
    """What the router has left for the whole of this attempt, a load that makes progress included; None: as long as the
    engine allows."""


def decode(params: dict[str, Any]) -> Leg:
    """Check and convert what an engine received.

    Raises:
        ValueError: names the field that is missing or wrong.
    """
    try:
        leg = msgspec.convert(params, Leg)
    except msgspec.ValidationError as error:
        raise ValueError(f"{FIELD}: {error}") from None
    if leg.xpyd != VERSION:
        raise ValueError(f"{FIELD}.xpyd: version {leg.xpyd} is not {VERSION}")
    if not TRANSFER_ID.fullmatch(leg.transfer):
        raise ValueError(f"{FIELD}.transfer: not 32 hex digits")
    if not 1 <= leg.attempt < 1 << 32 or not leg.remaining_s > 0:
        raise ValueError(f"{FIELD}: attempt must be from 1 to 2^32 - 1 and remaining_s above 0")
    if leg.limit_s is not None and not leg.limit_s > 0:
        raise ValueError(f"{FIELD}.limit_s: must be above 0")
    if (leg.peer is None) == (leg.role is Role.PREFILL):
        raise ValueError(f"{FIELD}.peer: required on a prefill leg, not allowed on a decode leg")
    return leg


def encode(leg: Leg) -> dict[str, Any]:
    """The JSON object for the request body."""
    params: dict[str, Any] = {"xpyd": leg.xpyd, "role": leg.role.value, "transfer": leg.transfer, "attempt": leg.attempt,
                              "remaining_s": leg.remaining_s}
    if leg.limit_s is not None:
        params["limit_s"] = leg.limit_s
    if leg.peer is not None:
        params["peer"] = msgspec.structs.asdict(leg.peer)
    if leg.role is Role.DECODE:
        params[REMOTE] = True
    return params
