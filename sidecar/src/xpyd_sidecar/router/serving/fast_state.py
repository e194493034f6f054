"""What is known of a request on its straight course (``fast_path``)."""

from __future__ import annotations

import math

import msgspec

from xpyd_sidecar.contract.ids import Role, TransferId
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.bodies import RequestHash, hash_of
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.fleet.member import FleetMember, Pair
from xpyd_sidecar.router.http.reply import ReplyConnection
from xpyd_sidecar.router.http.wire import ResponseHead
from xpyd_sidecar.router.observing.record import LegRecord, Record
from xpyd_sidecar.router.relay.whole import Whole
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.shapes import Shape
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.upstream.call import EngineConnection


class FastState(msgspec.Struct, eq=False):
    """What is known of one request, from both legs sent to its last byte, or to another course."""

    context: RequestContext
    client: ReplyConnection
    shape: Shape
    slots: list[bytes]
    body: bytes
    picks: Selection
    pair: Pair
    transfer: TransferId
    request_id: str
    began: float
    """On the event loop's clock."""
    arrived: float
    """On the clock of records, as each ``_s``."""
    arrived_unix: float
    prompt_size: int
    asked: tuple[bytes, bytes]
    prefill: EngineConnection | None
    """None: it has answered."""
    decode: EngineConnection | None
    members: tuple[FleetMember | None, FleetMember | None] = (None, None)
    """Whose load its legs are."""
    opened_s: float = math.nan
    pending: bytes = b""
    """Of prefill's answer."""
    prefilled_s: float = math.nan
    begun_s: float = math.nan
    head: ResponseHead | None = None
    taken: tuple[tuple[Whole, bytes], ...] = ()
    """What was taken of decode's answer without reading it, and the reads."""
    name: str = ""
    """Of the answer, by its first event, as the next one."""
    created: int = 0
    prompt_tokens: int = 0
    """Of the prompt, as decode says; 0: it has not."""
    log: bytearray = bytearray()
    """As ``Position.log``."""
    stream: EventStream | None = None
    """What reads decode's answer where it was not, and what the client has of it then."""
    position: Position | None = None
    sent: int = 0
    """Bytes of the body, framing included, without those that were relayed."""
    close: bool = False
    """The client's connection ends with this answer; known once it has begun."""
    ended_s: float = math.nan

    @property
    def request(self) -> bodies.GenerationRequest:
        """What was asked, as other courses need it."""
        return self.shape.request(bodies.split(self.body), self.slots)

    def record(self) -> Record:
        """What is known of it, once it has ended."""
        position, pair = self.position, self.pair
        tokens = prompt_tokens = -1
        if position is not None:
            tokens, prompt_tokens = position.tokens, position.prompt_tokens
        elif self.prompt_tokens:
            tokens, prompt_tokens = self.log.count(b"\t"), self.prompt_tokens
        assert pair.prefill is not None
        first, ended, done = self.prefilled_s, self.ended_s, "2xx"
        legs = [LegRecord(Role.PREFILL, pair.prefill.instance, 1, self.opened_s, first, first, done),
                LegRecord(Role.DECODE, pair.decode.instance, 1, self.opened_s, self.begun_s, ended, done)]
        return Record(
            self.request_id, self.transfer, self.shape.api, True, self.arrived, self.arrived_unix, "ok", 200,
            first_at=self.begun_s, last_at=ended, tokens=tokens, prompt_tokens=prompt_tokens, prompt_size=self.prompt_size,
            attempt=1, bytes=self.sent, legs=legs)

    def handed_over(self) -> tuple[bodies.GenerationRequest, Pair]:
        """As ``InFlightRequest``'s: what ends here went the straight course."""
        return self.request, self.pair

    def request_hash(self) -> RequestHash:
        """Equal for all requests that ask for the same work."""
        return hash_of(self.shape.api, self.request.fields)
