"""The reference of all fields of DisaggService and DisaggPool in Markdown, made from the same schema as their CRDs."""

from __future__ import annotations

import json

from xpyd_operator.api import owned
from xpyd_operator.api.crds import pool_crd, service_crd
from xpyd_operator.api.schema import Schema

_HEAD = """\
# Reference

Made by `xpyd render reference` from the structs in `operator/src/xpyd_operator/api`; do not edit.

Everything that has a default may be left out. `xpyd check -f FILE` says what is wrong with a document, with file and line;
`kubectl explain dsvc.spec` shows the same texts in a cluster.

Durations are numbers with units, such as `500ms`, `30s` or `1h30m`. Sizes are bytes, such as `500M` or `2Gi`.

`apiVersion` is `xpyd.dev/v1beta1`.
"""


def reference() -> str:
    """The text of ``docs/reference.md``: fields and rules of both kinds, and the arguments that xpyd sets itself."""
    parts = [_HEAD]
    for crd in (service_crd(), pool_crd()):
        names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
        root = version["schema"]["openAPIV3Schema"]
        parts.append(f"## {names['kind']}\n\n{root['description']} Short name `{names['shortNames'][0]}`.\n")
        parts += _rules(root)
        seen: dict[str, Schema] = {}
        for section in ("spec", "status"):
            parts += _section(section, root["properties"][section], seen)
    parts.append(_arguments())
    return "\n".join(parts)


def _section(path: str, schema: Schema, seen: dict[str, Schema]) -> list[str]:
    """Markdown of one section: a table of its fields, its rules, then the sections inside it. A section with the same
    fields as one in ``seen`` (by path) only names that one.
    """
    head = f"### `{path}`\n\n{schema['description']}"
    same = next((other for other, known in seen.items() if known["properties"] == schema["properties"]), None)
    if same is not None:
        return [f"{head} The fields are those of `{same}`.\n"]
    seen[path] = schema
    required = schema.get("required", [])
    rows = [_row(name, field, name in required) for name, field in schema["properties"].items()]
    parts = ["\n".join([head, "", "| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"]
    parts += _rules(schema)
    for name, field in schema["properties"].items():
        inner, below = (field["items"], f"{path}.{name}[]") if "items" in field else (field, f"{path}.{name}")
        if "properties" in inner:
            parts += _section(below, inner | {"description": field["description"]}, seen)
    return parts


def _rules(schema: Schema) -> list[str]:
    """Markdown of the validation rules of a section and of its fields, but for durations, whose type says their bounds, and
    for sections inside it, which list their own.
    """
    found = list(schema.get("x-kubernetes-validations", []))
    for field in schema["properties"].values():
        if "properties" not in field and not _duration(field):
            found += field.get("x-kubernetes-validations", [])
    return ["Rules:\n\n" + "\n".join(f"- {rule['message']}" for rule in found) + "\n"] if found else []


def _duration(schema: Schema) -> str:
    """The bounds of a duration field in words, such as ``from 1s to 1h``; empty for any other field."""
    rules = schema.get("x-kubernetes-validations", [])
    if not rules or not rules[0]["rule"].startswith("duration("):
        return ""
    return str(rules[0]["message"].removeprefix("must be "))


def _row(name: str, schema: Schema, required: bool) -> str:
    default = "required" if required else _default(schema)
    return f"| `{name}` | {_cell(_type(schema))} | {_cell(default)} | {_cell(schema['description'])} |"


def _default(schema: Schema) -> str:
    default = schema.get("default")
    if default is None or "properties" in schema:
        return ""
    return f"`{default}`" if isinstance(default, str) and default else f"`{json.dumps(default)}`"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return "object of Kubernetes"
    if "items" in schema:
        return f"list of {_type(schema['items'])}, at most {schema['maxItems']}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    if "properties" in schema:
        return "section"
    return _scalar(schema)


def _scalar(schema: Schema) -> str:
    if bounds := _duration(schema):
        return f"duration, {bounds}"
    if schema.get("x-kubernetes-int-or-string"):
        pattern = schema["pattern"]
        if "maximum" in schema:
            return f"whole number, {schema['minimum']} to {schema['maximum']}, or share of the wanted count (`10%`)"
        return "quantity" if "Ei" in pattern else "size"
    least, most = schema.get("minimum"), schema.get("maximum")
    if schema["type"] == "string":
        return "text" if schema.get("format") is None else "time"
    word = {"integer": "whole number", "number": "number", "boolean": "true or false"}[schema["type"]]
    if least is None and most is None:
        return word
    return f"{word}, at least {least}" if most is None else f"{word}, {least} to {most}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _arguments() -> str:
    rows = [f"| `{option}` | {instead} |" for option, instead in owned.listing()]
    return "\n".join(
        [
            "## Arguments and variables that xpyd sets itself",
            "",
            "`engine.args`, `prefill.args` and `decode.args` refuse these, and what else begins like them, in each of",
            "vLLM's spellings (`--x=y`, `_` for `-`, shortened, `-tp`).",
            "",
            "| argument | instead |",
            "| --- | --- |",
            *rows,
            "",
            f"`engine.env` refuses names that match `{_cell(owned.ENV_PATTERN)}`.",
            "",
        ]
    )
