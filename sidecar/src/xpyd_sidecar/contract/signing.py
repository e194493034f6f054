"""Signed calls: the operator asks routers and agents over the pods' network, and sends nothing that could be used again.

    X-Xpyd-Signature: v1 <time> <nonce> <mac>
    mac = HMAC-SHA256(key of the purpose, "xpyd call 1" ‖ method ‖ path ‖ instance ‖ SHA-256 of the body ‖ time ‖ nonce)

each part on a line of its own; time in unix seconds, nonce 32 hex digits, mac 64. ``instance`` is who is called, so that a
call is of no use elsewhere. A receiver MUST refuse what is more than 60 s off its clock and what it has seen; it keeps
nonces for 120 s, as long as any of them can be good for, and refuses everything while it keeps 4,096.

An answer that is acted on has ``v1 <mac>`` in the same header, over "xpyd answer 1", the call's header and the SHA-256 of
the answer's body: nobody else can answer in the receiver's place.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

HEADER: Final = "X-Xpyd-Signature"
AWAY_S: Final = 60.0
"""How far the caller's clock may be from ours."""
KEPT_S: Final = 120.0
NONCES_MAX: Final = 4096
_FORM: Final = re.compile(r"v1 ([0-9]{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class SignedCall(NamedTuple):
    """The parts of an HTTP call that its signature covers."""

    method: str
    path: str
    """Without a query."""
    instance: str
    body: bytes = b""


def sign(key: bytes, call: SignedCall, *, now: float | None = None) -> str:
    """The header's value for one call. ``key``: of the purpose (``keys.derive``)."""
    at, nonce = str(int(time.time() if now is None else now)), secrets.token_hex(16)
    return f"v1 {at} {nonce} {_mac(key, call, at, nonce)}"


def sign_answer(key: bytes, said: str, body: bytes) -> str:
    """The header's value for the answer to a call whose header was ``said``."""
    return f"v1 {_digest(key, 'xpyd answer 1', said, hashlib.sha256(body).hexdigest())}"


def answers(key: bytes, said: str, signature: str, body: bytes) -> bool:
    """Whether ``signature`` is that of the answer ``body`` to the call whose header was ``said``, under ``key``."""
    right = sign_answer(key, said, body)
    return hmac.compare_digest(signature.encode(errors="surrogateescape"), right.encode())


class CallVerifier:
    """Verifies signed calls to the instance of this name, and accepts each of them once."""

    def __init__(self, key: bytes, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._instance = instance
        self._clock = clock
        self._seen: OrderedDict[str, float] = OrderedDict()
        """Nonce → when it may be forgotten, oldest first."""

    def refusal(self, said: str, method: str, path: str, body: bytes = b"") -> str:
        """Why the call is not taken, in words; empty where it is, and then never again."""
        found = _FORM.fullmatch(said)
        if found is None:
            return "the signature has not the form 'v1 time nonce mac'"
        at, nonce, mac = found.groups()
        if not hmac.compare_digest(mac, _mac(self._key, SignedCall(method, path, self._instance, body), at, nonce)):
            return f"the signature is wrong for {method} {path} of {self._instance}"
        now = self._clock()
        if abs(now - int(at)) > AWAY_S:
            return f"the call is {now - int(at):.0f} s old by this clock, {AWAY_S:g} s are allowed: are the clocks right?"
        self._forget(now)
        if nonce in self._seen:
            return "the call was taken already"
        if len(self._seen) >= NONCES_MAX:
            return f"more than {NONCES_MAX} calls within {KEPT_S:g} s"
        self._seen[nonce] = now + KEPT_S
        return ""

    def _forget(self, now: float) -> None:
        while self._seen:
            nonce, until = next(iter(self._seen.items()))
            if now <= until <= now + KEPT_S:  # later than that: the clock was set back
                return
            del self._seen[nonce]


def _mac(key: bytes, call: SignedCall, at: str, nonce: str) -> str:
    body = hashlib.sha256(call.body).hexdigest()
    return _digest(key, "xpyd call 1", call.method, call.path, call.instance, body, at, nonce)


def _digest(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode(errors="surrogateescape"), hashlib.sha256).hexdigest()
