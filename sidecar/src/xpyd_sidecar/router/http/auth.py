"""Who may ask: client API keys, also those of tenants, the admin token of people, and the signed calls of the operator.

Theory: a request costs the same whether there is one key or ten thousand, and its time tells nothing. So keys are kept by
their digests, under a secret of this process: what a client brings is digested, what has the same beginning is found, and
``hmac.compare_digest`` alone says whether it is the same. Where it was found depends on a digest that nobody outside can
make or guess. Keys of tenants are known by digests alone (``contract.tenants``), of which the same digests are kept.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256

from xpyd_sidecar.contract import keys as contract
from xpyd_sidecar.contract import signing, tenants
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.reply import HttpRequest, Reply

logger = logging.getLogger(__name__)

MAX_KEYS = 10_000
_SECRET = secrets.token_bytes(32)
_SIGNATURE = signing.HEADER.lower().encode()
MAX_FILE = 16 << 20
"""Bytes of a file of client keys."""
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

    def shown_by(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request shows one of them."""
        return bearer(headers) in self


class TenantKeys:
    """Keys of tenants, any of which opens to its own."""

    def __init__(self, those: Sequence[Tenant], pepper: bytes) -> None:
        """``pepper``: of the service, for digests that are not plain."""
        self.tenants = tuple(those)
        self._pepper = pepper
        self._plain: dict[bytes, tuple[bytes, Tenant]] = {}
        self._peppered: dict[bytes, tuple[bytes, Tenant]] = {}
        for one in those:
            for said in one.digests:
                is_plain, raw = tenants.digest_bytes(said)
                digest = _digest(raw)
                (self._plain if is_plain else self._peppered)[digest[:_BEGINNING]] = digest, one
        self._known: dict[bytes, Tenant] = {}
        """By a header that brought a key: those that ask are few, and ask again."""

    def __len__(self) -> int:
        return len(self.tenants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TenantKeys) and self.tenants == other.tenants

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, token: bytes) -> bool:
        """Whether it is the key of a tenant."""
        return self.find(token) is not None

    def find(self, token: bytes) -> Tenant | None:
        """Whose key it is; None: nobody's. A plain digest is of no use to a key that could have been guessed from it."""
        made, found = tenants.was_made(token), None
        for known, raw in ((self._plain, tenants.plain(token)),
                           (self._peppered, tenants.digest_with_pepper(self._pepper, token))):
            digest = _digest(raw)
            right, whose = known.get(digest[:_BEGINNING], (_NOBODYS, None))
            if hmac.compare_digest(digest, right) and (made or known is self._peppered):
                found = whose
        return found

    def shown_by(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request shows one of them."""
        return self.tenant_of(headers) is not None

    def tenant_of(self, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """The tenant whose key a request shows; None: nobody's."""
        header = shown_key(headers)
        one = self._known.get(header)
        if one is None and (one := self.find(bearer(headers))) is not None:
            if len(self._known) >= MAX_KEYS:
                self._known.clear()
            self._known[header] = one
        return one


def _digest(key: bytes) -> bytes:
    return sha256(_SECRET + key).digest()


_NOBODYS = bytes(32)
"""What is compared with where nothing was found."""


def read_clients(path: str, pepper: bytes = b"") -> Keys | TenantKeys:
    """What a file of client keys says: keys by line, or a document of tenants. ``pepper``: of the service. Raises
    ConfigError: the file cannot be used.
    """
    text = _text(path)
    if not tenants.is_document(text):
        return Keys(_lines(path, text))
    try:
        return TenantKeys(tenants.decode(text), pepper)
    except tenants.DocumentFault as error:
        raise ConfigError(f"router.api_key_file: {path}: {error}") from None


def read_keys(path: str) -> tuple[bytes, ...]:
    """Client keys, one per line; empty lines and those that begin with ``#`` are skipped. Raises ConfigError: the file
    cannot be read, holds no key, or a key has characters that no header can carry.
    """
    return _lines(path, _text(path))


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE + 1)
        if len(raw) > MAX_FILE:
            raise ConfigError(f"router.api_key_file: {path} is larger than {MAX_FILE >> 20} MiB")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"router.api_key_file: {path}: {error}") from None


def _lines(path: str, text: str) -> tuple[bytes, ...]:
    lines = text.splitlines()
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

    def __init__(self, path: str | None, pepper: bytes = b"") -> None:
        """Read them. Raises ConfigError: see ``read_clients``."""
        self._path = path
        self._pepper = pepper
        self._seen = self._look()
        self.keys: Keys | TenantKeys = Keys() if path is None else read_clients(path, pepper)
        self.changed: Callable[[], None] = lambda: None
        """Told when there are other ones."""

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Whose they are, where a document says it."""
        return self.keys.tenants if isinstance(self.keys, TenantKeys) else ()

    def tenant(self, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """Whose key a request shows that was let in; None where keys have no tenants, or none has it any more."""
        return self.keys.tenant_of(headers) if isinstance(self.keys, TenantKeys) else None

    def name(self, headers: Mapping[bytes, bytes]) -> str:
        """What the client of a request that was let in is known by: its tenant's name, else its key; empty: no key is
        asked for.
        """
        if self._path is None:
            return ""
        if isinstance(self.keys, TenantKeys):
            one = self.tenant(headers)
            return "" if one is None else one.name
        return _token(shown_key(headers))

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def reload(self) -> None:
        """Take changed keys into service. What is wrong with them is logged, once."""
        seen = self._look()
        if self._path is None or seen == self._seen:
            return
        self._seen = seen
        try:
            keys = read_clients(self._path, self._pepper)
        except ConfigError as error:
            logger.error("the new client keys are not used: %s", error)  # noqa: TRY400 (said in full)
            return
        if keys != self.keys:
            self.keys = keys
            self.changed()
            of = "tenants" if isinstance(keys, TenantKeys) else "keys"
            logger.info("the client keys were changed", extra={of: len(keys)})


def shown_key(headers: Mapping[bytes, bytes]) -> bytes:
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
    scheme, _, token = shown_key(headers).strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


@lru_cache(maxsize=1024)
def _token(header: bytes) -> str:  # remembered: it brought a known key, and those are few
    return bearer({b"authorization": header}).decode("latin-1")


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
