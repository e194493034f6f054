"""The challenge of a data link: both ends show that they hold the service's ``data`` key, without sending it.

    P → D   CHALLENGE  nonce_p
    D → P   HELLO      nonce_d, HMAC(key, "decode"  ‖ nonces ‖ incarnations)
    P → D   WELCOME             HMAC(key, "prefill" ‖ nonces ‖ incarnations)

The side's name in the text keeps one proof from being played back as the other; fresh nonces keep it from being replayed.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, Literal, NamedTuple

from xpyd_sidecar.contract.ids import Incarnation

NONCE_BYTES: Final = 32


class Terms(NamedTuple):
    """What both proofs cover."""

    prefill_nonce: bytes
    decode_nonce: bytes
    prefill: Incarnation
    decode: Incarnation


def prove(key: bytes, side: Literal["prefill", "decode"], terms: Terms) -> bytes:
    """32 bytes that only a holder of ``key`` can make."""
    parts = (b"xpyd data link 1", side.encode(), terms.prefill_nonce, terms.decode_nonce, terms.prefill.encode(),
             terms.decode.encode())
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(key, text, hashlib.sha256).digest()


def holds(key: bytes, side: Literal["prefill", "decode"], terms: Terms, proof: bytes) -> bool:
    """Whether ``proof`` is the one of ``side``; takes the same time either way."""
    return hmac.compare_digest(prove(key, side, terms), proof)
