"""Words of the API that were written otherwise before: both are accepted for good, and mean one thing.

    document, v1alpha1 or v1beta1 ── "Sidecar", "sidecar" ──▶ decoded: "sidecar"      ``walk``
    schema of both versions       ── enum: all of them; default: the word that is new in that version
    what a document states        ── "Sidecar", as it always was, so that hashes of it stay      ``render.defaults``

Nothing rewrites a document. A field says so by ``OLDER`` in its ``Meta``: each older word, and the one that it stands for
(docs/decisions/0024-words-of-the-api.md, 0033-v1beta1.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Meta
from msgspec import inspect as mi

from xpyd_operator.api.base import API_VERSION, FIRST_API_VERSION

OLDER: Final = "older"
"""Key in ``Meta.extra``."""


def older(**words: str) -> Meta:
    """For a choice: ``older(Sidecar="sidecar")``."""
    return Meta(extra={OLDER: words})


OLDER_VERSION: Final = older(**{FIRST_API_VERSION: API_VERSION})
"""Of ``apiVersion``: the version, too, is one word once it is decoded."""


def first(word: Any, older_words: Mapping[str, str]) -> Any:
    """How a decoded word was written first; anything else as it is."""
    return next((before for before, now in older_words.items() if now == word), word)


@cache
def renamed(kind: type[msgspec.Struct]) -> Mapping[str, Mapping[str, str]]:
    """Of a struct: the fields, by their names on the wire, that have older words."""
    information = mi.type_info(kind)
    assert isinstance(information, mi.StructType)
    return {field.encode_name: found for field in information.fields if (found := _older(field.type))}


def _older(kind: mi.Type) -> Mapping[str, str]:
    found: Mapping[str, str] = (kind.extra or {}).get(OLDER, {}) if isinstance(kind, mi.Metadata) else {}
    return found
