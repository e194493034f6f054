"""How both ends of a session show that they hold the service's ``data`` key, and agree on keys that nobody else has.

    P → D   CHALLENGE  a public key of P's, made for this session
    D → P   HELLO      a public key of D's, proof = HMAC(data key, "decode" ‖ SHA-256 of all said so far, but for the proof)
            from here on both know    secret = X25519(own private key, the other's public key)
                                      keys   = HKDF-SHA256(secret ‖ data key, salt = SHA-256 of all said so far)
    P → D   WELCOME    sealed, and so is every frame that follows, in both directions

Who changes a byte of what was said changes the proof or the keys: nothing can be left out, replaced or played back.
What was recorded cannot be read by whoever learns the data key later, since private keys are gone with their session.

A frame is sealed with ChaCha20-Poly1305 (RFC 8439); its nonce is its number in its direction, so none can be left out or
come twice; what stands before it in clear is covered, too. X25519 is of RFC 7748, HKDF of RFC 5869.

Each stripe of a session begins with a name that only its two ends can make (``stripe_name``), and prefill's answer to it
(``stripe_answer``). Where KV is encrypted, what follows is sealed under keys of the stripe's own (``stripe_keys``).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

TAG_BYTES: Final = 16
"""By which a sealed frame is longer."""
FRAMES_MAX: Final = 1 << 48
"""That one key seals."""
_KEY_BYTES: Final = 32


class SealError(ValueError):
    """A frame that was not sealed by the other end, as the next one, with just these bytes."""


class Transcript:
    """All that was said in a session before it was sealed. Each part is preceded by its length."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"xpyd data link 2")

    def add(self, said: bytes | memoryview) -> None:
        """These bytes were said next."""
        self._hash.update(len(said).to_bytes(8, "little"))
        self._hash.update(said)

    def digest(self) -> bytes:
        """The hash of all that was said so far, in bytes."""
        return self._hash.digest()


def prove(data_key: bytes, transcript: Transcript) -> bytes:
    """Decode's proof that it holds the data key, for just what was said: 32 bytes."""
    return hmac.new(data_key, b"decode" + transcript.digest(), hashlib.sha256).digest()


def holds(data_key: bytes, transcript: Transcript, proof: bytes) -> bool:
    """Whether it is that proof; takes the same time either way."""
    return hmac.compare_digest(prove(data_key, transcript), proof)


class PrivateKey:
    """One end's key, for one session."""

    def __init__(self) -> None:
        self._key = X25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        """What the other end is told."""
        return self._key.public_key().public_bytes_raw()

    def shared_secret(self, public: bytes) -> bytes:
        """What only the two ends know.

        Raises:
            ValueError: the other end has told no public key, or one by which everybody would know it.
        """
        return self._key.exchange(X25519PublicKey.from_public_bytes(public))


class SessionKeys(NamedTuple):
    """What both ends derive."""

    of_prefill: bytes
    """Seals what prefill says."""
    of_decode: bytes
    stripes: bytes
    """Names stripes, and makes their keys."""


def derive(secret: bytes, data_key: bytes, transcript: Transcript) -> SessionKeys:
    """The keys of a session. ``secret``: of ``PrivateKey.shared_secret``."""
    made = HKDF(hashes.SHA256(), 3 * _KEY_BYTES, transcript.digest(), b"xpyd session keys").derive(secret + data_key)
    return SessionKeys(made[:_KEY_BYTES], made[_KEY_BYTES:2 * _KEY_BYTES], made[2 * _KEY_BYTES:])


def stripe_name(keys: SessionKeys, number: int) -> bytes:
    """What the stripe of this number begins with: 32 bytes."""
    return hmac.new(keys.stripes, number.to_bytes(4, "little"), hashlib.sha256).digest()


def stripe_answer(keys: SessionKeys, number: int) -> bytes:
    """What prefill answers there, by which decode knows whose bytes come: 32 bytes."""
    return hmac.new(keys.stripes, b"answer" + number.to_bytes(4, "little"), hashlib.sha256).digest()


def stripe_keys(keys: SessionKeys, number: int) -> bytes:
    """What the bytes of this stripe are sealed under: 32 bytes for those that decode says, 32 for those of prefill."""
    return HKDFExpand(hashes.SHA256(), 2 * _KEY_BYTES, b"xpyd stripe" + number.to_bytes(4, "little")).derive(keys.stripes)


class Sealing:
    """Seals frames of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._next = 0

    def seal(self, clear: bytes, head: bytes) -> bytes:
        """The next frame, sealed. ``head``: what stands before it in clear.

        Raises:
            SealError: the key has sealed as many as it may.
        """
        return self._cipher.encrypt(self._number(), clear, head)

    def open(self, sealed: bytes | memoryview, head: bytes) -> bytes:
        """What was sealed as the next frame.

        Raises:
            SealError: something else was, or by somebody else.
        """
        try:
            return self._cipher.decrypt(self._number(), sealed, head)
        except InvalidTag:
            raise SealError(f"frame {self._next - 1} is not what was sealed") from None

    def _number(self) -> bytes:
        if self._next >= FRAMES_MAX:
            raise SealError("the session has had as many frames as it may")
        self._next += 1
        return (self._next - 1).to_bytes(12, "little")
