"""Canaries: whether an instance answers a request of the router's own, while another one answers the same.

    outliers ──SendCanary──▶ a few tokens of the suspect, and of the other ──▶ ended(result, detail, answered)

A canary is a stream of ``TOKENS`` tokens, which must come to its end: who answers it has a core that steps, which
``GET /health`` does not show. It is no load of anybody, and no client's request. It ends within its time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.process.patience import Alarm
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.api.paths import PATHS
from xpyd_sidecar.router.fleet.member import FleetMember
from xpyd_sidecar.router.fleet.outliers import CanaryResult
from xpyd_sidecar.router.http.wire import request_bytes
from xpyd_sidecar.router.stream.events import ABORT
from xpyd_sidecar.router.upstream.call import Sink, UpstreamCall
from xpyd_sidecar.router.upstream.pool import EnginePool

PROMPT: Final = "canary"
TOKENS: Final = 4
REQUEST_ID: Final = b"xpyd-canary-"
MOST_SERVERS: Final = 16
"""Of one instance, that are asked."""
_ERROR: Final = b'data: {"error"'
_REFERENCE: Final = -1
"""Tag of the other instance's call; those of the suspect's servers count from 0."""
Ended = Callable[[CanaryResult, str, bool], None]
"""How it ended, what was wrong in words, and whether the other instance answered."""


class Canaries:
    """Those of one router that are open."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.open: set[Canary] = set()

    def send(self, suspect: FleetMember, reference: FleetMember | None, patience_s: float, ended: Ended) -> None:
        """Ask. ``ended`` is called once, within ``patience_s``, unless all are closed before."""
        canary = Canary(self, patience_s, ended)
        self.open.add(canary)
        canary.ask(suspect, reference)

    def close(self) -> None:
        """Ask nobody any more; nobody hears of it."""
        for canary in list(self.open):
            canary.drop()


class Canary(Sink):
    """One of them."""

    def __init__(self, canaries: Canaries, patience_s: float, ended: Ended) -> None:
        self._canaries = canaries
        self._pool = canaries.pool
        self._patience_s = patience_s
        self._ended = ended
        self._calls: dict[int, UpstreamCall] = {}
        self._failed = ""
        self._answered = False
        self._alarm = Alarm(self._pool.loop, self._pool.loop.time() + patience_s, self._on_time)

    def ask(self, suspect: FleetMember, reference: FleetMember | None) -> None:
        """Send them all; an instance whose ranks have several servers is asked at each."""
        asked = dict(enumerate(list(dict.fromkeys(suspect.http))[:MOST_SERVERS]))
        calls = [(tag, address, suspect.model) for tag, address in asked.items()]
        calls += [(_REFERENCE, reference.http[0], reference.model)] if reference is not None else []
        for tag, address, _ in calls:
            self._calls[tag] = UpstreamCall(self._pool, address, self, tag=tag)
        for tag, address, model in calls:
            self._pool.send(self._calls[tag], partial(_request, address, model))

    def drop(self) -> None:
        """It is over."""
        self._alarm.cancel()
        self._canaries.open.discard(self)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()

    def _end(self, result: CanaryResult, detail: str = "") -> None:
        self.drop()
        self._ended(result, detail, self._answered)

    def _on_time(self) -> None:
        if self._failed:
            self._end(CanaryResult.FAILED, self._failed)
        elif self._calls.keys() - {_REFERENCE}:
            self._end(CanaryResult.SILENT, f"it did not answer a canary within {self._patience_s:.1f} s")
        else:
            self._end(CanaryResult.ANSWERED)

    def _heard(self, tag: int, wrong: str) -> None:
        """A call is over. ``wrong``: in words; empty: it was answered."""
        del self._calls[tag]
        if tag == _REFERENCE:
            self._answered = not wrong
        elif wrong:
            self._failed = wrong
        waits = self._calls.keys() - {_REFERENCE}
        if self._failed and _REFERENCE not in self._calls:
            self._end(CanaryResult.FAILED, self._failed)
        elif not self._failed and not waits:
            self._end(CanaryResult.ANSWERED)

    # ---- call.Sink

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        """An answer. What an engine thinks of the request is not asked: it answers."""
        assert call.head is not None
        status = call.head.status
        wrong = f"a canary was answered {status}" if status >= 500 else ""
        if status < 300 and (_ERROR in body or ABORT in body):
            wrong = "a canary was broken off"
        self._heard(call.tag, wrong)

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        """No answer."""
        if kind is FailureKind.LACKING:
            self._end(CanaryResult.UNMADE)
        else:
            self._heard(call.tag, f"a canary failed: {reason.said}")


def _request(address: HostPort, model: str) -> bytes:
    fields = {"model": model} if model else {}
    body = json.dumps({**fields, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}).encode()
    name = REQUEST_ID + secrets.token_hex(8).encode()
    return request_bytes(b"POST", PATHS["completions"], address, [(b"x-request-id", name)], body)
