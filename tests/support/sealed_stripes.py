"""Records of an encrypted stripe as the protocol says, by another library: what the loops in C are held against."""

from __future__ import annotations

import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
TAG = 16
RECORD = 64 << 10
REKEY_AFTER = 1 << 16
HEADER = struct.Struct("<IIQ")
KEYS = bytes(range(64))
"""Of one stripe: what decode says, and what prefill says."""


class RecordSealing:
    """One direction of one stripe."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self.count = 0

    def seal(self, clear: bytes) -> bytes:
        """The next record."""
        nonce = self._nonce()  # by which the cipher may be another one
        return self._cipher.encrypt(nonce, clear, None)

    def open(self, record: bytes) -> bytes:
        """What the next record holds; ``InvalidTag``: it is another one."""
        nonce = self._nonce()
        return self._cipher.decrypt(nonce, record, None)

    def _nonce(self) -> bytes:
        if self.count and self.count % REKEY_AFTER == 0:
            self._key = self._cipher.encrypt(b"\xff" * 12, bytes(KEY_BYTES), None)[:KEY_BYTES]
            self._cipher = AESGCM(self._key)
        self.count += 1
        return (self.count - 1).to_bytes(12, "little")


def of_decode(keys: bytes = KEYS) -> RecordSealing:
    """What decode says: requests."""
    return RecordSealing(keys[:KEY_BYTES])


def of_prefill(keys: bytes = KEYS) -> RecordSealing:
    """What prefill says: headers, and bytes."""
    return RecordSealing(keys[KEY_BYTES:])


def answer(sealing: RecordSealing, serial: int, data: bytes) -> list[bytes]:
    """The records in which prefill answers a request."""
    return [sealing.seal(HEADER.pack(serial, 0, len(data))),
            *(sealing.seal(data[at:at + RECORD]) for at in range(0, len(data), RECORD))]


def records_of(size: int) -> list[int]:
    """Bytes of each record behind the header of a piece."""
    return [min(RECORD, size - at) + TAG for at in range(0, size, RECORD)]
