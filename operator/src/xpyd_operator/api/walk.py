"""From untyped data towards a struct, with every fault and its path.

``msgspec.convert`` stops at the first fault and calls it by its own names; this walk follows the same type information
(``msgspec.inspect``), collects all faults, and puts a stand-in where a value cannot be used, so that the rest can still be
looked at. What the walk lets pass, ``msgspec.convert`` accepts.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as mi

from xpyd_operator.api import durations, gone
from xpyd_operator.api.base import RIGHT
from xpyd_operator.errors import Fault

_UNUSABLE: Any = object()


class Walk:
    """One walk over one document."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        """Whether unknown fields are faults or warnings."""
        self.faults: list[Fault] = []
        self.warnings: list[Fault] = []
        self.formless = False
        """Whether something has a stand-in; what has unknown fields alone can be looked at without them."""

    def convert(self, kind: type[msgspec.Struct], data: Any, path: str) -> dict[str, Any]:
        """Data that ``msgspec.convert`` accepts; equal to ``data`` but for unknown fields when there is no fault."""
        information = _type_info(kind)
        value = self._any(information, data, path)
        result: dict[str, Any] = _stand_in(information) if value is _UNUSABLE else value
        return result

    def _fault(self, path: str, message: str) -> Any:
        self.formless = True
        self.faults.append(Fault(path or "document", message))
        return _UNUSABLE

    def _any(self, kind: mi.Type, data: Any, path: str, extra: dict[str, Any] | None = None) -> Any:
        extra = extra or {}
        match kind:
            case mi.Metadata():
                return self._any(kind.type, data, path, extra | (kind.extra or {}))
            case mi.UnionType():
                return self._union(kind, data, path, extra)
            case mi.StructType():
                return self._struct(kind, data, path)
            case mi.VarTupleType():
                return self._list(kind, data, path, extra)
            case mi.DictType():
                return self._dict(kind, data, path, extra)
            case mi.LiteralType():
                return self._literal(kind, data, path, extra)
            case mi.BoolType():
                return data if isinstance(data, bool) else self._wrong(path, data, "true or false")
            case mi.IntType():
                return self._int(kind, data, path)
            case mi.FloatType():
                return self._float(kind, data, path)
            case mi.StrType():
                return self._str(kind, data, path, extra)
            case mi.AnyType():
                return data
        raise TypeError(f"{path}: no rule for {kind!r}")  # a struct uses a type that this walk does not know

    def _wrong(self, path: str, data: Any, wanted: str) -> Any:
        return self._fault(path, f"must be {wanted}, not {_describe(data)}{_advice(data, wanted)}")

    def _struct(self, kind: mi.StructType, data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            return self._wrong(path, data, f"a section with fields ({_names(kind)})")
        known = {field.encode_name: field for field in kind.fields}
        result: dict[str, Any] = {}
        for name, value in data.items():
            here = join(path, str(name))
            field = known.get(name)
            if field is None:
                self._unknown(here, str(name), known)
            elif value is not None:
                converted = self._any(field.type, value, here)
                if converted is not _UNUSABLE:
                    result[name] = converted
                elif field.required:
                    result[name] = _stand_in(field.type)
        for name, field in known.items():
            if field.required and name not in result:
                self._missing(field, join(path, name))
                result[name] = _stand_in(field.type)
        return result

    def _unknown(self, path: str, name: str, known: dict[str, mi.Field]) -> None:
        what, hint = "unknown field", gone.SETTINGS.get(path, "")
        if hint:
            what = "this setting is gone"
        else:
            lower = {other.lower(): other for other in known}
            close = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), lower, 1, 0.7)
            hint = f"did you mean {lower[close[0]]}?" if close else f"known here: {', '.join(known)}"
        if self.strict:
            self.faults.append(Fault(path, f"{what}; {hint}"))
        else:
            self.warnings.append(Fault(path, f"{what}, ignored; {hint}"))

    def _missing(self, field: mi.Field, path: str) -> None:
        inner = field.type.type if isinstance(field.type, mi.Metadata) else field.type
        values = ""
        if isinstance(inner, mi.LiteralType):
            values = f" ({' or '.join(map(str, inner.values))})"
        elif isinstance(inner, mi.StructType):
            values = f" (with {', '.join(part.encode_name for part in inner.fields if part.required)})"
        kind = (field.type.extra or {}).get("kind") if isinstance(field.type, mi.Metadata) else None
        right = f"; {RIGHT[kind]}" if kind else ""
        if not any(fault.path == path for fault in self.faults):
            self._fault(path, f"required{values}{right}")

    def _list(self, kind: mi.VarTupleType, data: Any, path: str, extra: dict[str, Any]) -> Any:
        if not isinstance(data, list | tuple):
            return self._wrong(path, data, "a list (one item per line, each beginning with '- ')")
        if (most := extra.get("max_items")) is not None and len(data) > most:
            return self._fault(path, f"has {len(data)} items, at most {most} are allowed")
        items = [self._any(kind.item_type, item, f"{path}[{index}]") for index, item in enumerate(data)]
        result = [_stand_in(kind.item_type) if item is _UNUSABLE else item for item in items]
        if key := extra.get("merge_key"):
            self._unique(result, key, path)
        return result

    def _unique(self, items: list[Any], key: str, path: str) -> None:
        seen: dict[str, int] = {}
        for index, item in enumerate(items):
            name = item.get(key) if isinstance(item, dict) else None
            if name in seen:
                self._fault(f"{path}[{index}].{key}", f"{name!r} is also item {seen[name]}; each may stand once")
            elif name:
                seen[name] = index

    def _dict(self, kind: mi.DictType, data: Any, path: str, extra: dict[str, Any]) -> Any:
        if not isinstance(data, dict):
            return self._wrong(path, data, "an object (key: value)")
        if (most := extra.get("max_properties")) is not None and len(data) > most:
            return self._fault(path, f"has {len(data)} keys, at most {most} are allowed")
        result = {}
        for key, value in data.items():
            if not isinstance(key, str):
                self._fault(join(path, str(key)), f"a key must be text, not {_describe(key)}; put it in quotes")
                continue
            converted = self._any(kind.value_type, value, join(path, key))
            if converted is not _UNUSABLE:
                result[key] = converted
        return result

    def _literal(self, kind: mi.LiteralType, data: Any, path: str, extra: dict[str, Any]) -> Any:
        if isinstance(data, str) and data in kind.values:
            return data
        if line := gone.replacement(path, data):
            return self._fault(path, f"{data} is gone; write {line}")
        allowed = ", ".join(map(str, kind.values))
        if data is False and (word := next((word for word in ("disabled", "none") if word in kind.values), None)):
            return self._fault(path, f"is read as false by YAML; write {word}")
        if not isinstance(data, str):
            return self._wrong(path, data, f"one of {allowed}")
        lower = {str(value).lower(): value for value in kind.values}
        close = difflib.get_close_matches(data.lower().replace("-", "_"), lower, 1, 0.6)
        if len(kind.values) == 1:
            return self._fault(path, f"must be {allowed}, not {data!r}")
        why = extra.get("why_not", {}).get(data)
        hint = f"; {why}" if why else f"; did you mean {lower[close[0]]}?" if close else ""
        return self._fault(path, f"must be one of {allowed}, not {data!r}{hint}")

    def _int(self, kind: mi.IntType, data: Any, path: str) -> Any:
        if isinstance(data, bool) or not isinstance(data, int):
            return self._wrong(path, data, "a whole number")
        if abs(data) >= 1 << 63:
            return self._fault(path, f"{data} does not fit into 64 bits")
        return self._bounded(kind, data, path)

    def _float(self, kind: mi.FloatType, data: Any, path: str) -> Any:
        if isinstance(data, bool) or not isinstance(data, int | float):
            return self._wrong(path, data, "a number")
        return self._bounded(kind, data, path)

    def _bounded(self, kind: mi.IntType | mi.FloatType, data: float, path: str) -> Any:
        least, most = kind.ge, kind.le
        if (least is None or data >= least) and (most is None or data <= most):
            return data
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        return self._fault(path, f"must be {bounds}, not {data}")

    def _union(self, kind: mi.UnionType, data: Any, path: str, extra: dict[str, Any]) -> Any:
        options = [option for option in kind.types if not isinstance(option, mi.NoneType)]
        if len(options) == 1:
            return self._any(options[0], data, path, extra)
        for option in options:  # the one union that structs use: a number or text
            if isinstance(option, mi.IntType) and isinstance(data, int) and not isinstance(data, bool):
                return self._int(option, data, path)
            if isinstance(option, mi.StrType) and isinstance(data, str):
                return self._str(option, data, path, extra)
        right = RIGHT[extra["kind"]]
        return self._fault(path, f"must be a whole number or text, not {_describe(data)}; {right}")

    def _str(self, kind: mi.StrType, data: Any, path: str, extra: dict[str, Any]) -> Any:
        right = RIGHT.get(extra.get("kind", ""), "")
        tail = f"; {right}" if right else ""
        if not isinstance(data, str):
            return self._wrong(path, data, "text") if not right else self._fault(path, f"is {_describe(data)}{tail}")
        if kind.min_length and len(data) < kind.min_length:
            return self._fault(path, f"must not be empty{tail}")
        if kind.max_length and len(data) > kind.max_length:
            return self._fault(path, f"is {len(data)} characters long, at most {kind.max_length} are allowed")
        if kind.pattern and not re.fullmatch(kind.pattern, data):  # Python's $ alone would let a final newline pass
            return self._fault(path, f"{data!r} is not allowed{tail}")
        if extra.get("kind") == "duration" and (fault := _duration_fault(data, extra)):
            return self._fault(path, fault)
        return data


@cache
def _type_info(kind: type[msgspec.Struct]) -> mi.Type:
    return mi.type_info(kind)


def join(path: str, name: str) -> str:
    """The path of a field; names that are no plain words are put in brackets."""
    plain = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return (f"{path}.{name}" if path else name) if plain else f"{path}[{json.dumps(name, ensure_ascii=False)}]"


def _duration_fault(text: str, extra: dict[str, Any]) -> str | None:
    least, most = extra["min"], extra["max"]
    if durations.seconds(least) <= durations.seconds(text) <= durations.seconds(most):
        return None
    return f"must be from {least} to {most}, not {text}"


def _names(kind: mi.StructType) -> str:
    return ", ".join(field.encode_name for field in kind.fields)


def _describe(data: Any) -> str:
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


def _advice(data: Any, wanted: str) -> str:
    if wanted == "text" and isinstance(data, bool | int | float):
        return f'; put it in quotes: "{str(data).lower() if isinstance(data, bool) else data}"'
    if wanted.endswith("number") and isinstance(data, str) and re.fullmatch(r"-?[0-9]+", data):
        return "; write it without quotes"
    return ""


def _stand_in(kind: mi.Type) -> Any:
    """A value of the type, in place of one that cannot be used. Never leaves this package."""
    match kind:
        case mi.Metadata():
            return _stand_in(kind.type)
        case mi.UnionType():
            return _stand_in(kind.types[0])
        case mi.StructType():
            return {field.encode_name: _stand_in(field.type) for field in kind.fields if field.required}
        case mi.LiteralType():
            return kind.values[0]
        case mi.IntType() | mi.FloatType():
            return kind.ge or 0
        case mi.StrType():
            return next(text for text in ("x", "/x", "1s", "1", "*") if re.fullmatch(kind.pattern or ".", text))
        case mi.VarTupleType():
            return []
        case mi.DictType():
            return {}
    return None


