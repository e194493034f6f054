r"""Values of a request as vLLM takes them: its request classes (pydantic) are lax.

    "stream": true   1   1.0   "true"   "Yes"   "on"        all are true
    "max_tokens": 16   16.0   "16"                          all are 16
    EF BB BF { … }                                          a byte order mark before the body is no fault
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

_BOM = b"\xef\xbb\xbf"
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})
_MOST = 1 << 63
_scalar = msgspec.json.Decoder(bool | float | str | None).decode
_USUAL = {b"true": True, b"false": False, b"null": None}


def unmarked(body: bytes) -> bytes:
    """A body without its byte order mark."""
    return body.removeprefix(_BOM)


def truth(raw: Raw) -> bool | None:
    """A value as a field for ``bool | None`` takes it. Raises ValueError: it takes none such."""
    plain = bytes(raw)
    if plain in _USUAL:
        return _USUAL[plain]
    value = _scalar(raw)
    if isinstance(value, str):
        word = value.lower() if value.isascii() else ""
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    elif value in (0, 1):
        return bool(value)
    raise ValueError("a boolean is expected")


def is_true(raw: Raw | None) -> bool:
    """Whether a value is true; not where it is none such."""
    try:
        return raw is not None and truth(raw) is True
    except (ValueError, RecursionError):
        return False


def whole(raw: Raw) -> int | None:
    """A value as a field for ``int`` takes it; None where it takes none such."""
    try:
        value = msgspec.json.decode(raw, type=bool | int | float | str)
        if isinstance(value, str):
            number, _, rest = value.strip().partition(".")
            return int(number) if value.isascii() and len(value) < 20 and not rest.strip("0") else None
        return int(value) if value == int(value) and abs(value) < _MOST else None
    except (ValueError, OverflowError, RecursionError):
        return None
