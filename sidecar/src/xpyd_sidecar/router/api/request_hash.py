"""The hash of a request: equal for all that ask engines for the same work.

It is made of the model, of the prompt and of how tokens are chosen, as the client wrote them. Left out is what differs
between two tries of one request, or says only how the answer is shown: ids, whose request it is, whether it is streamed.
Where a table says which fields an API has, others are left out too: the engine ignores them, so they are no way to look
new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NewType, cast

from msgspec import Raw

from xpyd_sidecar.router.api.fields import TABLE, Api, is_null

RequestHash = NewType("RequestHash", bytes)
SIZE = 16
ASIDE = frozenset({
    "request_id", "session_id", "user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt", "priority",
    "service_tier", "store", "stream", "stream_options", "stream_interval"})


def hash_of(kind: str, fields: Mapping[str, Raw]) -> RequestHash:
    """Of a request of this kind (``completions``, ``chat``, or the path of a passed one) with these fields."""
    known = TABLE.get(cast("Api", kind))
    digest = hashlib.blake2b(kind.encode(), digest_size=SIZE)
    for name in sorted(fields):
        raw = fields[name]
        if name in ASIDE or (known is not None and name not in known) or is_null(raw):
            continue
        digest.update(b"\0%b\0%d\0" % (name.encode(errors="surrogatepass"), len(raw)))
        digest.update(raw)
    return RequestHash(digest.digest())
