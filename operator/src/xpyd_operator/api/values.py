"""Values of documents in words, for messages about them."""

from __future__ import annotations

import re
from typing import Any


def describe(data: Any) -> str:
    """A value that stands where another one is wanted."""
    match data:
        case None:
            return "empty"
        case bool():
            return "true" if data else "false"
        case str():
            return f"the text {data[:60]!r}"
        case int() | float():
            return f"the number {data}"
        case dict():
            return "an object"
        case list() | tuple():
            return "a list"
    return f"a {type(data).__name__}"


def advice(data: Any, wanted: str) -> str:
    """What to do about it where that is plain; empty elsewhere."""
    if wanted == "text" and isinstance(data, bool | int | float):
        return f'; put it in quotes: "{str(data).lower() if isinstance(data, bool) else data}"'
    if wanted.endswith("number") and isinstance(data, str) and re.fullmatch(r"-?[0-9]+", data):
        return "; write it without quotes"
    return ""
