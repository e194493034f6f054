"""Structs to OpenAPI v3 structural schemas, as a CRD needs them.

Every field has a description: its docstring, the text below it in the class. Defaults are spelled out, those of whole
sections too. Lists and maps are bounded, so that the cost of CEL rules is.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as mi

from xpyd_operator.api.base import RIGHT
from xpyd_operator.api.checks import RULES
from xpyd_operator.api.rule import Rule, Target

Schema = dict[str, Any]
_PRESERVED: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_BOUNDS = {"ge": "minimum", "le": "maximum", "min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"}


def schema_of(kind: type[msgspec.Struct]) -> Schema:
    """The schema of an object of the API: its spec and status, rules included."""
    root = mi.type_info(kind)
    assert isinstance(root, mi.StructType)
    fields = {field.name: field for field in root.fields}
    docs = docs_of(kind)
    properties: Schema = {
        "apiVersion": {"type": "string", "description": docs["api_version"]},
        "kind": {"type": "string", "description": docs["kind"]},
        "metadata": {"type": "object", "properties": {"name": _name(fields["metadata"])}},
    }
    for section in ("spec", "status"):
        properties[section] = _type(fields[section].type) | {"description": docs[section]}
    return {
        "type": "object",
        "description": text_of(kind),
        "required": ["metadata", "spec"],
        "properties": properties,
    }


def with_rules(schema: Schema) -> Schema:
    """The schema of ``DisaggService`` with the CEL twin of every rule in its section (changed in place)."""
    for rule in RULES:
        if rule.cel and rule.target in (None, Target.KUBERNETES):
            for at in rule.at:
                node = schema
                for name in filter(None, (*at.split("."), rule.cel_at)):
                    node = node["properties"][name]
                node.setdefault("x-kubernetes-validations", []).append(validation(rule))
    return schema


def validation(rule: Rule) -> Schema:
    """One entry of ``x-kubernetes-validations``; white space in the expression is made single."""
    made = {"rule": " ".join(rule.cel.split()), "message": rule.says}
    return made | ({"messageExpression": " ".join(rule.tells.split())} if rule.tells else {})


def text_of(kind: type) -> str:
    """The docstring of a struct as one paragraph."""
    return _paragraph(inspect.cleandoc(kind.__doc__ or ""))


@cache
def docs_of(kind: type) -> dict[str, str]:
    """Description of each field of a struct, inherited ones included: the docstring below it.

    Raises:
        LookupError: a field has none.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("xpyd_operator.api."):
            found |= _module_docs(base.__module__).get(base.__name__, {})
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    if missing := [name for name in fields if name not in found]:
        raise LookupError(f"{kind.__qualname__}: no docstring below {', '.join(missing)}")
    return found


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Field docstrings of every class of a module, from its source: Python keeps none for fields."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _class_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = _paragraph(textwrap.dedent(text))
    return docs


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _name(metadata: mi.Field) -> Schema:
    assert isinstance(metadata.type, mi.StructType)
    return _type(next(field.type for field in metadata.type.fields if field.name == "name"))


def _type(kind: mi.Type, extra: dict[str, Any] | None = None) -> Schema:
    extra = extra or {}
    match kind:
        case mi.Metadata():
            return _type(kind.type, extra | (kind.extra or {}))
        case mi.UnionType():
            return _union(kind, extra)
        case mi.StructType():
            return dict(_PRESERVED) if extra.get("preserve") else _struct(kind)
        case mi.VarTupleType():
            return _list(kind, extra)
        case mi.DictType():
            return _dict(kind, extra)
        case mi.LiteralType():
            return {"type": "string", "enum": [*kind.values]}
        case mi.BoolType():
            return {"type": "boolean"}
        case mi.IntType():
            return {"type": "integer", "format": "int64"} | _bounds(kind)
        case mi.FloatType():
            return {"type": "number"} | _bounds(kind)
        case mi.StrType():
            return _str(kind, extra)
    raise TypeError(f"no schema for {kind!r}")


def _bounds(kind: Any) -> Schema:
    return {word: getattr(kind, name) for name, word in _BOUNDS.items() if getattr(kind, name, None) is not None}


def _str(kind: mi.StrType, extra: dict[str, Any]) -> Schema:
    schema: Schema = {"type": "string"} | _bounds(kind)
    if "format" in extra:
        schema["format"] = extra["format"]
    if extra.get("kind") == "source":  # the API server would show the expression alone
        pattern, right = schema.pop("pattern"), RIGHT["source"]
        schema["x-kubernetes-validations"] = [{"rule": f"self.matches('{pattern}')", "message": right,
                                               "messageExpression": f"self + ' is no source of a model; {right}'"}]
    if extra.get("kind") == "duration":
        least, most = extra["min"], extra["max"]
        schema["x-kubernetes-validations"] = [
            {
                "rule": f"duration(self) >= duration('{least}') && duration(self) <= duration('{most}')",
                "message": f"must be from {least} to {most}",
            }
        ]
    return schema


def _union(kind: mi.UnionType, extra: dict[str, Any]) -> Schema:
    options = [option for option in kind.types if not isinstance(option, mi.NoneType)]
    if len(options) == 1:
        return _type(options[0], extra)
    schema: Schema = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    for option in options:
        schema |= _bounds(option)
    return schema


def _list(kind: mi.VarTupleType, extra: dict[str, Any]) -> Schema:
    schema: Schema = {"type": "array", "items": _type(kind.item_type)}
    if "max_items" in extra:
        schema["maxItems"] = extra["max_items"]
    if (key := extra.get("merge_key")) and "properties" in schema["items"]:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    else:
        schema["x-kubernetes-list-type"] = "atomic"
    return schema


def _dict(kind: mi.DictType, extra: dict[str, Any]) -> Schema:
    if extra.get("preserve"):
        return dict(_PRESERVED)
    return {"type": "object", "additionalProperties": _type(kind.value_type), "maxProperties": extra["max_properties"]}


def _struct(kind: mi.StructType) -> Schema:
    docs = docs_of(kind.cls)
    properties = {}
    for field in kind.fields:
        schema = _type(field.type) | {"description": docs[field.name]}
        default = default_of(field)
        if default is not None:
            schema["default"] = section_default(schema) if default == {} else default
        properties[field.encode_name] = schema
    result: Schema = {"type": "object", "description": text_of(kind.cls), "properties": properties}
    if required := [field.encode_name for field in kind.fields if field.required]:
        result["required"] = required
    return result


def section_default(schema: Schema) -> Schema:
    """The default of a section as the API server must find it: it checks a default against the section's rules as it
    stands, before it fills in the defaults of the fields inside.
    """
    inside = schema.get("properties", {})
    return {name: child["default"] for name, child in inside.items() if "default" in child}


def default_of(field: mi.Field) -> Any:
    """The default as it is on the wire; ``{}`` for a section of defaults; None: the field is absent or required."""
    if field.required:
        return None
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.decode(msgspec.json.encode(value))
