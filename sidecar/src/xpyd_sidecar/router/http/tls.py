"""TLS on the client port, with a certificate that may be renewed while the router runs.

A connection keeps the certificate that it began with; handshakes from now on get the new one. New files are first tried in
a context of their own: a pair that does not fit (half of it was written) leaves the old one in service.
"""

from __future__ import annotations

import logging
import os
import ssl

from xpyd_sidecar.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often the files are looked at."""

_Seen = tuple[tuple[int, int, int], ...]
_NONE: _Seen = ()


class Certificate:
    """A certificate and its key from files; ``context`` is what a server listens with."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        """Read the files. Raises ConfigError: names the one that cannot be used, or says that they do not fit."""
        self._files = {"tls_cert_file": cert_file, "tls_key_file": key_file}
        try:
            self._seen = self._look()
            self.context = self._load(_context())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{error}") from None

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        cert, key = self._files.values()
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except ssl.SSLError as error:
            words = {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate"}
            why = words.get(error.reason or "", f"not a certificate and its key in PEM ({error.reason or error})")
            raise ValueError(f"router.tls_cert_file, router.tls_key_file: {cert}, {key}: {why}") from None
        return context

    def _look(self) -> _Seen:
        found = []
        for field, path in self._files.items():
            try:
                with open(path, "rb") as file:
                    stat = os.fstat(file.fileno())
            except OSError as error:
                raise ValueError(f"router.{field}: {path}: {error.strerror}") from None
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def look(self) -> bool:
        """Take new files into service; whether there were some. What is wrong with them is logged, once."""
        before, seen = self._seen, _NONE
        try:
            seen = self._seen = self._look()
            if seen == before:
                return False
            self._load(_context())
            self._load(self.context)
        except (OSError, ValueError) as error:
            self._seen = seen
            if seen != before:
                what = "the new certificate is not used" if seen else "the certificate cannot be read again"
                logger.error("%s: %s", what, error)  # noqa: TRY400 (said in full)
            return False
        logger.info("the certificate was renewed")
        return True


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _no_passphrase() -> str:
    raise ValueError("router.tls_key_file: a key with a passphrase cannot be used")
