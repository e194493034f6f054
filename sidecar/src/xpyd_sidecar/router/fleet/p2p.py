"""Older engines in a router: their heartbeats as members, and the legs of a request that pairs by its id.

    client ──▶ router ── X-Request-Id: ___prefill_addr_{P}___decode_addr_{D}_{hex} ──▶ P   one token
                                          P sends its KV to the address of D that it reads in the id
               P has answered: the same id ──▶ D   the whole request

Decode gets its leg when prefill has answered, as these engines expect: one that is asked earlier stops its whole engine
until the KV is there, and waits for ever if prefill fails. Without a prefill instance it cannot be asked at all, since it
finds no address in the id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from xpyd_sidecar.contract import legs, p2p
from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, ServiceName, State
from xpyd_sidecar.contract.membership import WIRE_VERSION, Heartbeat
from xpyd_sidecar.router.api.bodies import GenerationRequest, one_token
from xpyd_sidecar.router.fleet.member import BeatRefused, EngineTarget, FleetMember

MAX_GUESTS = 256
"""Nobody proves who he is on the plain port, so a stranger could fill the roster: only so far."""


class Guests:
    """Heartbeats of older engines as heartbeats of members: what is missing there is counted here."""

    def __init__(self, service: ServiceName, members: Callable[[], Iterable[FleetMember]]) -> None:
        """``members``: who is in the roster now."""
        self._service = service
        self._members = members
        self._known: dict[InstanceName, Heartbeat] = {}

    def heartbeat(self, beat: p2p.P2pBeat) -> Heartbeat:
        """The heartbeat to hand to the roster. A role that changed gets a new epoch; another ``zmq_address`` is another
        incarnation, since nothing else tells of a restart. Raises Refused: there are ``MAX_GUESTS`` others.
        """
        name = InstanceName(f"p2p:{beat.http}")
        last = self._known.get(name)
        if last is None and len(self._known) >= MAX_GUESTS:
            here = {member.name for member in self._members()}
            self._known = {name: beat for name, beat in self._known.items() if name in here}
            if len(self._known) >= MAX_GUESTS:
                raise BeatRefused(f"{MAX_GUESTS} engines with the older heartbeat are known, which is the limit")
        made = Heartbeat(
            v=WIRE_VERSION, service=self._service, instance=name, seq=0 if last is None else last.seq + 1, role=beat.role,
            epoch=1 if last is None else last.epoch + (last.role is not beat.role), state=State.READY,
            incarnation=Incarnation(beat.zmq), http=(beat.http,), control=(HostPort(beat.zmq),),
            fingerprint=beat.fingerprint, interval_s=p2p.INTERVAL_S)
        self._known[name] = made
        return made


class PairedById:
    """The legs of one request to older engines."""

    def __init__(self) -> None:
        self.request_id = b""
        """Of both legs, once prefill's is made."""
        self._given: Any = None

    def prefill(self, request: GenerationRequest, target: EngineTarget, decode: HostPort, unique: str) -> bytes:
        """Make the id anew, of 32 hex digits, and the body of prefill's leg: one token. ``decode``: the other's address."""
        self.request_id = f"___prefill_addr_{target.p2p}___decode_addr_{decode}_{unique}".encode()
        self._given = None
        fields = one_token(request)
        if p2p.wants_params(target.fingerprint):
            fields[legs.FIELD] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": unique,
                                  "remote_engine_id": None, "remote_block_ids": None}
        return _encode(fields)

    def answered(self, body: bytes) -> None:
        """Prefill's whole answer; engines that want parameters give those of decode in it."""
        try:
            self._given = msgspec.json.decode(body, type=_Answer).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError):  # decode says what it lacks
            self._given = None

    def decode(self, request: GenerationRequest, target: EngineTarget) -> bytes:
        """The body of decode's leg."""
        fields: dict[str, Any] = {name: raw for name, raw in request.fields.items() if name != legs.FIELD}
        if p2p.wants_params(target.fingerprint):
            fields[legs.FIELD] = (self._given or {}) | {"do_remote_prefill": True, "do_remote_decode": False}
        return _encode(fields)


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_encode = msgspec.json.Encoder().encode
