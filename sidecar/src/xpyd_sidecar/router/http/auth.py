"""Who may ask: client API keys, the admin token of people, and the signed calls of the operator.

Theory: a request costs the same whether there is one key or ten thousand, and its time tells nothing. So keys are kept by
their digests, under a secret of this process: what a client brings is digested, what has the same beginning is found, and
``hmac.compare_digest`` alone says whether it is the same. Where it was found depends on a digest that nobody outside can
make or guess.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from xpyd_sidecar.contract import keys as contract
from xpyd_sidecar.contract import signing
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.reply import HttpRequest, Reply

logger = logging.getLogger(__name__)

MAX_KEYS = 10_000
_SECRET = secrets.token_bytes(32)
_SIGNATURE = signing.HEADER.lower().encode()
_BEGINNING = 16
"""Bytes of a digest that it is found by."""


class Keys:
    """Keys any of which opens something; empty: none is asked for."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._digests = {digest[:_BEGINNING]: digest for digest in map(_digest, keys)}

    def __len__(self) -> int:
        return len(self._digests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self._digests == other._digests

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, token: bytes) -> bool:
        """Whether it is one of them."""
        digest = _digest(token)
        return hmac.compare_digest(digest, self._digests.get(digest[:_BEGINNING], _NOBODYS))


def _digest(key: bytes) -> bytes:
    return sha256(_SECRET + key).digest()


_NOBODYS = bytes(32)
"""What is compared with where nothing was found."""


def read_keys(path: str) -> tuple[bytes, ...]:
    """Client keys, one per line; empty lines and those that begin with ``#`` are skipped. Raises ConfigError: the file
    cannot be read, holds no key, or a key has characters that no header can carry.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"router.api_key_file: {path}: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"router.api_key_file: {path} holds no key; leave the setting out to need none")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"router.api_key_file: {path} holds {len(keys)} keys; at most {MAX_KEYS} are allowed")
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"router.api_key_file: {path}: key {number} has characters that a header cannot carry")
    return tuple(key.encode() for key in keys)


class ClientKeys:
    """The client keys of a router, read again when their file changes. ``keys`` is empty where none is asked for.

    A file that cannot be used leaves the keys as they are, so that a slip while keys are changed locks nobody out.
    """

    def __init__(self, path: str | None) -> None:
        """Read them. Raises ConfigError: see ``read_keys``."""
        self._path = path
        self._seen = self._look()
        self.keys = Keys(() if path is None else read_keys(path))

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def look(self) -> None:
        """Take changed keys into service. What is wrong with them is logged, once."""
        seen = self._look()
        if self._path is None or seen == self._seen:
            return
        self._seen = seen
        try:
            keys = Keys(read_keys(self._path))
        except ConfigError as error:
            logger.error("the new client keys are not used: %s", error)  # noqa: TRY400 (said in full)
            return
        if keys != self.keys:
            self.keys = keys
            logger.info("the client keys were changed", extra={"keys": len(keys)})


def shown(headers: Mapping[bytes, bytes]) -> bytes:
    """What a request shows of a key: its Authorization; where it has none, ``x-api-key``, as Anthropic's clients send it,
    as if it stood there; empty: nothing.
    """
    header = headers.get(b"authorization")
    if header is not None:
        return header
    key = headers.get(b"x-api-key")
    return b"" if key is None else b"Bearer " + key


def bearer(headers: Mapping[bytes, bytes]) -> bytes:
    """The token of ``Authorization: Bearer …`` or ``x-api-key``, empty where there is none."""
    scheme, _, token = shown(headers).strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def unknown(headers: Mapping[bytes, bytes]) -> HttpFault:
    """401: what is said to who brings no key that opens anything."""
    words = "the API key is wrong" if bearer(headers) else "an API key is needed: Authorization: Bearer <key>"
    return HttpFault(401, words, kind="authentication_error", code="invalid_api_key")


class Admin:
    """Who may look at what a router knows: the operator by signed calls, people by the admin token.

    The token is good for ever, so it is taken only where nobody else reads it: over TLS, or from this very host.
    """

    def __init__(self, key: ServiceKey, instance: str) -> None:
        """``instance``: as who the operator knows this router."""
        self._token = Keys((contract.admin_token(key).encode(),))
        self._calls = signing.CallVerifier(contract.derive(key, "admin call"), instance)

    def require_call(self, request: HttpRequest) -> None:
        """Check a call that only the operator makes, with its body. Raises HttpFault: 401."""
        said = request.headers.get(_SIGNATURE)
        if said is None:
            words = "a signed call of the operator is needed"
            raise HttpFault(401, words, kind="authentication_error", code="invalid_signature")
        if refusal := self._calls.refusal(said.decode("latin-1"), request.method, request.path, request.body):
            raise HttpFault(401, refusal, kind="authentication_error", code="invalid_signature")

    def require(self, request: HttpRequest, reply: Reply, also: Keys | None = None) -> None:
        """Check who asks for an admin path. ``also``: keys that open it, too. Raises HttpFault: 401, 403."""
        headers, token = request.headers, bearer(request.headers)
        mine, theirs = token in self._token, also is not None and token in also
        said = headers.get(_SIGNATURE)
        refusal = self._calls.refusal(said.decode("latin-1"), request.method, request.path) if said is not None else ""
        if (said is not None and not refusal) or (mine and reply.private) or theirs:
            return
        if refusal and not token:
            raise HttpFault(401, refusal, kind="authentication_error", code="invalid_signature")
        if mine:
            words = "the admin token is taken over HTTPS or from this host alone, such as through kubectl port-forward"
            raise HttpFault(403, words, kind="permission_error", code="token_in_clear")
        raise unknown(headers)
