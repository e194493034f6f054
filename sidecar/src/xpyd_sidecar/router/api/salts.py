"""What keeps the prefixes of a tenant apart in the caches of engines: the field ``cache_salt``, by the router. Pure.

    client's cache_salt ─┐
    tenant's name ───────┴─ HMAC under a key of the service ─▶ cache_salt that engines get

The same in every router, and nothing that another tenant could write by itself. Two salts of one tenant are two, so that it
can keep its own users apart.
"""

from __future__ import annotations

import hmac
from typing import Final

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.faults import HttpFault, bad_request
from xpyd_sidecar.router.api.paths import BodyKind, Route

FIELD: Final = "cache_salt"
SALTED: Final = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/chat/completions/batch",
    "/inference/v1/generate", "/generative_scoring", "/v1/systemone", "/v1/embeddings", "/pooling", "/classify", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"})
"""Paths whose requests have such a field in vLLM."""
WITHOUT_KV: Final = frozenset({
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions/render", "/v1/chat/completions/render",
    "/v1/responses/render", "/v1/messages/render", "/cohere/v2/chat/render", "/v1/completions/derender",
    "/v1/chat/completions/derender"})
"""Paths for which engines compute nothing that could be shared."""
_text = msgspec.json.Decoder(str | None).decode


class CacheSalt:
    """Of one tenant."""

    __slots__ = ("_key", "_name")

    def __init__(self, key: bytes, tenant: str) -> None:
        """``key``: of the service."""
        self._key = key
        self._name = tenant

    def write(self, fields: dict[str, Raw]) -> None:
        """Put it into the fields of a request. Raises HttpFault: 400, the client's own is no text."""
        said = ""
        if FIELD in fields:
            try:
                said = _text(fields[FIELD]) or ""
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise bad_request(f"{FIELD!r}: {error}", param=FIELD) from None
        both = b"%b\0%b" % (self._name.encode(), said.encode(errors="surrogatepass"))
        fields[FIELD] = Raw(b'"%b"' % hmac.digest(self._key, both, "sha256").hex().encode())


def require_salted(route: Route, tenant: str) -> bool:
    """Whether requests of a path get a salt. Raises HttpFault: 403, engines would not read it, so that prefixes of this
    tenant, which is to be kept apart, could be shared.
    """
    if route.path in SALTED:
        return True
    if route.body is BodyKind.NONE or route.path in WITHOUT_KV:
        return False
    raise HttpFault(403, f"{route.path} has no {FIELD}, so tenant {tenant!r} cannot be kept apart there",
                    code="not_isolated", kind="permission_error")
