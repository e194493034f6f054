"""Which of our kinds a document is meant to be."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Any

from xpyd_operator.api.base import GROUP


class Kind(StrEnum):
    """What a document is meant to be."""

    SERVICE = "DisaggService"
    POOL = "DisaggPool"
    OTHER = "other"


def recognize(value: Any) -> Kind:
    """The kind that a document is meant to be, misspelled or not; OTHER for a proper object of another group."""
    if not isinstance(value, dict):
        return Kind.SERVICE
    version, kind = value.get("apiVersion"), value.get("kind")
    names = [str(Kind.SERVICE), str(Kind.POOL)]
    close = difflib.get_close_matches(kind, names, 1, 0.75) if isinstance(kind, str) else []
    foreign = isinstance(version, str) and isinstance(kind, str) and GROUP.partition(".")[0] not in version
    if foreign and not close:
        return Kind.OTHER
    return Kind.POOL if close == [str(Kind.POOL)] else Kind.SERVICE
