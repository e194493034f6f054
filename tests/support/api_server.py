"""What a Kubernetes API server does with an object of a CRD: prune nulls, fill in defaults, check structure, run CEL."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import celpy
import jsonschema

Schema = dict[str, Any]
_ENVIRONMENT = celpy.Environment()


def admit(crd: Schema, obj: Any) -> list[str]:
    """Everything that strict field validation, the structural schema and CEL find wrong; empty: admitted."""
    group, versions = crd["spec"]["group"], crd["spec"]["versions"]
    asked = (obj.get("apiVersion"), obj.get("kind")) if isinstance(obj, dict) else ()
    version = next((each for each in versions if (f"{group}/{each['name']}", crd["spec"]["names"]["kind"]) == asked), None)
    if version is None:
        return ["no such resource"]
    if not (obj.get("metadata") or {}).get("name"):
        return ["metadata.name: required"]
    return validate(version["schema"]["openAPIV3Schema"], obj)


def validate(schema: Schema, obj: Any) -> list[str]:
    value = defaulted(schema, pruned(schema, obj))
    wrong = structure(schema, value)
    return wrong or cel_faults(schema, value)


def pruned(schema: Schema, value: Any) -> Any:
    """Without nulls (no field is nullable); those of unknown fields stay, to be refused."""
    if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        known = schema.get("properties", value)
        kept = {key: item for key, item in value.items() if item is not None or key not in known}
        return {key: pruned(_below(schema, key), item) for key, item in kept.items()}
    if isinstance(value, list):
        return [pruned(schema.get("items", {}), item) for item in value]
    return value


def defaulted(schema: Schema, value: Any) -> Any:
    """With the schema's defaults, from the outside in."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in filled and "default" in field:
                filled[name] = copy.deepcopy(field["default"])
        return {key: defaulted(_below(schema, key), item) for key, item in filled.items()}
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), item) for item in value]
    return value


def structure(schema: Schema, value: Any) -> list[str]:
    """Types, bounds, patterns, required and unknown fields, list map keys."""
    found = [f"{error.json_path}: {error.message}" for error in _validator(_Key(schema)).iter_errors(value)]
    return found + list(_twice(schema, value, "$")) + list(_wide(value, "$"))


def cel_faults(schema: Schema, value: Any, path: str = "") -> list[str]:
    """``path: message`` of every rule that does not hold; rules about a change (``oldSelf``) are left out."""
    rules = [rule for rule in schema.get("x-kubernetes-validations", []) if "oldSelf" not in rule["rule"]]
    found = [f"{path}: {told(rule, value)}" for rule in rules if not holds(rule["rule"], value)]
    if isinstance(value, dict):
        for key, item in value.items():
            found += cel_faults(_below(schema, key), item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += cel_faults(schema.get("items", {}), item, f"{path}[{index}]")
    return found


def holds(rule: str, value: Any) -> bool:
    """The verdict of one CEL expression over ``self``."""
    return _verdict(rule, json.dumps(value, sort_keys=True))


def told(rule: Schema, value: Any) -> str:
    """The message of a rule that does not hold: that of its expression, where it has one."""
    if "messageExpression" not in rule:
        return str(rule["message"])
    said = _program(rule["messageExpression"]).evaluate({"self": celpy.json_to_cel(json.loads(json.dumps(value)))})
    assert isinstance(said, str)
    assert said.strip()
    assert "\n" not in said
    return str(said)


@cache
def _verdict(rule: str, value: str) -> bool:
    return bool(_program(rule).evaluate({"self": celpy.json_to_cel(json.loads(value))}))


@cache
def _program(rule: str) -> Any:
    return _ENVIRONMENT.program(_ENVIRONMENT.compile(rule))


def _below(schema: Schema, key: str) -> Schema:
    found: Schema = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
    return found


class _Key:
    """A schema as a cache key: by identity."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.schema is other.schema


@cache
def _validator(key: _Key) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_closed(key.schema, root=True))


def _closed(schema: Schema, *, root: bool = False) -> Schema:
    """The schema with unknown fields forbidden, except in metadata and where they are preserved."""
    closed = {key: value for key, value in schema.items() if not key.startswith("x-") and key not in ("default", "format")}
    if "pattern" in schema:
        closed["pattern"] = schema["pattern"].removesuffix("$") + r"\Z"  # Go's $ is the end of the text, Python's is not
    if "properties" in schema:
        closed["properties"] = {key: _closed(field) for key, field in schema["properties"].items()}
        closed["additionalProperties"] = False
        if root and "metadata" in closed["properties"]:  # the API server's own, of which the schema bounds the name
            closed["properties"]["metadata"]["additionalProperties"] = True
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        closed["additionalProperties"] = _closed(schema["additionalProperties"])
    return closed


def _wide(value: Any, path: str) -> Iterator[str]:
    """Integers beyond 64 bits, which the API server reads as floating point."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        yield f"{path}: not an integer"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _wide(item, f"{path}.{key}")


def _twice(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for keys in [schema.get("x-kubernetes-list-map-keys")]:
            names = [item.get(keys[0]) for item in value if isinstance(item, dict)] if keys else []
            if len(set(map(str, names))) < len(names):
                yield f"{path}: one key stands twice"
        for item in value:
            yield from _twice(schema.get("items", {}), item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _twice(_below(schema, key), item, f"{path}.{key}")
