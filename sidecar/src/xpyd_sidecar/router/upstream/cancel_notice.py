"""Tells a decode engine that a leg which it may never have known will not come.

The router takes a decode leg back by closing its connection. An engine whose core has the request aborts it, and its
connector lets go of what prefill sends. But the leg may not have got so far: the front end had not read it yet, or had not
begun to generate, or it refused the body before vLLM looked at what it is for. Then no connector knows that it will not
come, and prefill keeps its copies until ``claim_s`` is over.

So such a leg is said farewell: a request with its ``kv_transfer_params`` that every vLLM refuses, since it asks for -1
tokens. vLLM tells the connector of a decode leg that it refuses (``contract.legs.REMOTE``), which then drops the transfer.
An engine that did know the leg takes it for a repetition.
"""

from __future__ import annotations

import json
import logging
from asyncio import AbstractEventLoop
from functools import partial
from typing import Final

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.http.patience import Alarm
from xpyd_sidecar.router.http.wire import request_bytes
from xpyd_sidecar.router.upstream.call import Sink, UpstreamCall
from xpyd_sidecar.router.upstream.pool import EnginePool

logger = logging.getLogger(__name__)

PATH: Final = b"/v1/completions"
ANSWER_S: Final = 5.0
OPEN_MAX: Final = 256
"""Farewells without an answer. Beyond it none is said: ``claim_s`` is there for those."""


class Farewells(Sink):
    """Those of one router process."""

    def __init__(self, loop: AbstractEventLoop, pool: EnginePool) -> None:
        self._loop = loop
        self._pool = pool
        self._open: set[UpstreamCall] = set()

    def __len__(self) -> int:
        return len(self._open)

    def say(self, target: EngineTarget, leg: legs.Leg) -> None:
        """Take ``leg`` back from the engine at ``target``. Returns at once; what the engine answers does not matter."""
        if len(self._open) >= OPEN_MAX:
            return
        body = json.dumps({"prompt": [0], "max_tokens": -1, legs.FIELD: legs.encode(leg)}).encode()
        headers = [] if target.dp_rank is None else [(b"x-data-parallel-rank", b"%d" % target.dp_rank)]
        call = self._pool.call(target.http, request_bytes(b"POST", PATH, target.http, headers, body), self)
        self._open.add(call)
        Alarm(self._loop, self._loop.time() + ANSWER_S, partial(self._late, call))

    def _late(self, call: UpstreamCall) -> None:
        if call in self._open:
            self._open.discard(call)
            call.cancel()

    # ---- call.Sink

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        """The refusal."""
        self._open.discard(call)
        if call.head is not None and call.head.status < 300:
            logger.warning("%s took a request for -1 tokens: %s", call.address, body[:200].decode(errors="replace"))

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        """An engine that is gone needs no farewell."""
        self._open.discard(call)
        logger.debug("no farewell to %s: %s %s", call.address, kind, reason.full)
