"""Which of our kinds a document is meant to be."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Any

from xpyd_operator.api.base import GROUP


class DocumentKind(StrEnum):
    """What a document is meant to be."""

    SERVICE = "DisaggService"
    POOL = "DisaggPool"
    OTHER = "other"


def recognize(value: Any) -> DocumentKind:
    """The kind that a document is meant to be, misspelled or not; OTHER for a proper object of another group."""
    if not isinstance(value, dict):
        return DocumentKind.SERVICE
    version, kind = value.get("apiVersion"), value.get("kind")
    names = [str(DocumentKind.SERVICE), str(DocumentKind.POOL)]
    close = difflib.get_close_matches(kind, names, 1, 0.75) if isinstance(kind, str) else []
    foreign = isinstance(version, str) and isinstance(kind, str) and GROUP.partition(".")[0] not in version
    if foreign and not close:
        return DocumentKind.OTHER
    return DocumentKind.POOL if close == [str(DocumentKind.POOL)] else DocumentKind.SERVICE
