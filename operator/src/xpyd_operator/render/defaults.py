"""What a document states: its fields without those that have their default."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import structs


def without_defaults(part: Any) -> Any:
    """Structs as dictionaries by their names on the wire. A default that is written out is the same as one that is
    not.
    """
    if isinstance(part, msgspec.Struct):
        return {
            field.encode_name: without_defaults(value)
            for field in _fields(type(part))
            if (value := getattr(part, field.name)) != _default(field)
        }
    if isinstance(part, tuple | list):
        return [without_defaults(one) for one in part]
    if isinstance(part, dict):
        return {key: without_defaults(one) for key, one in part.items()}
    return part


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[structs.FieldInfo, ...]:
    return structs.fields(kind)


def _default(field: structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default  # NODEFAULT where there is none, which no value equals
