"""The schemas are structural, described, bounded, and their defaults fit themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from api_server import admit, defaulted, validate

from xpyd_operator.api.base import Part
from xpyd_operator.api.crds import crds
from xpyd_operator.api.schema import docs_of
from xpyd_sidecar.contract import adapters

CRDS = crds()
ROOTS = {name: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name, crd in CRDS.items()}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from nodes(schema[word], f"{path}.{word}")


ALL = [(f"{name}{path}", node) for name, root in ROOTS.items() for path, node in nodes(root)]
INTS_OR_STRINGS = [{"type": "integer"}, {"type": "string"}]


def test_each_node_is_structural() -> None:
    for path, node in ALL:
        check_structural(path, node)


def check_structural(path: str, node: dict[str, Any]) -> None:
    assert "$ref" not in node, path
    if node.get("x-kubernetes-int-or-string"):
        assert "type" not in node
        assert node["anyOf"] == INTS_OR_STRINGS
    else:
        assert node["type"] in ("object", "array", "string", "integer", "number", "boolean")
        assert not {"anyOf", "allOf", "oneOf", "not"} & node.keys()
    if node.get("type") == "object" and ".metadata" not in path:
        kinds = {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & node.keys()
        assert len(kinds) == 1, "an object has fields, is a map, or is preserved"
    for name in node.get("required", []):
        assert name in node["properties"]
        assert "default" not in node["properties"][name]


def test_each_field_is_described() -> None:
    for path, node in ALL:
        for name, field in node.get("properties", {}).items():
            if name != "metadata" and ".metadata" not in path:
                text = field["description"]
                assert len(text) >= 6, (path, name)
                assert text[0].isupper() or text.startswith(("`", "vLLM")), (path, name)
                assert text.endswith("."), (path, name)
                assert "  " not in text, (path, name)


def test_what_a_person_writes_is_bounded() -> None:
    """Without bounds the API server assumes the worst, and refuses the CEL rules over it as too costly."""
    for path, node in ALL:
        if ".spec" in path:
            if node.get("type") == "array":
                assert node["maxItems"] <= (adapters.MOST if path.endswith(".adapters") else 128), path
            if node.get("type") == "string":
                assert "enum" in node or node["maxLength"] <= 4096, path
            if node.get("type") == "integer":
                assert {"minimum", "maximum"} <= node.keys(), path
            if isinstance(node.get("additionalProperties"), dict):
                assert node["maxProperties"] <= 64, path


def test_each_default_fits_its_own_schema_and_rules() -> None:
    for path, node in ALL:
        if "default" in node:
            assert validate(node, node["default"]) == [], path
            assert defaulted(node, node["default"]) == node["default"], f"{path}: complete, as rules see it as it stands"


def test_patterns_are_anchored_and_known_to_re2() -> None:
    for path, node in ALL:
        if "pattern" in node:
            assert node["pattern"].startswith("^"), path
            assert node["pattern"].endswith("$"), path
            assert not re.search(r"\(\?[=!<]|\\[1-9]", node["pattern"]), f"{path}: RE2 has no lookaround or back-reference"


RULES = [(path, rule, node) for path, node in ALL for rule in node.get("x-kubernetes-validations", [])]


def test_cost_of_regular_expressions_in_rules() -> None:
    """Kubernetes' estimate: 0.1 per byte (4 per character) times 0.25 per character of the expression, per item.

    A rule may cost 10 million; see ``k8s.io/apiserver`` and cel-go ``checker/cost.go``.
    """
    for path, rule, node in RULES:
        for expression in re.findall(r"matches\('([^']*)'\)", rule["rule"]):
            items = node.get("maxItems", 1)
            texts = [field for _, field in nodes(node) if field.get("type") == "string"]
            longest = max((field.get("maxLength", 512) for field in texts), default=512)
            assert items * (longest * 4 + 1) * 0.1 * len(expression) * 0.25 < 5_000_000, path


def test_a_field_without_docstring_is_found() -> None:
    class Undescribed(Part, frozen=True):
        """No text below the field."""

        field: int = 0

    with pytest.raises(LookupError, match="no docstring below field"):
        docs_of(Undescribed)


def test_unknown_types_have_no_schema() -> None:
    from xpyd_operator.api.schema import schema_of

    class Odd(msgspec.Struct):
        """Not of the API."""

        metadata: bytes = b""

    with pytest.raises((KeyError, TypeError, LookupError)):
        schema_of(Odd)


def test_a_pool_whose_name_is_not_its_service_and_role_is_refused() -> None:
    pool = {
        "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggPool", "metadata": {"name": "qwen-decode"},
        "spec": {"service": "qwen", "role": "decode"},
    }  # fmt: skip
    crd = CRDS["disaggpools.yaml"]
    assert admit(crd, pool) == []
    other = pool | {"metadata": {"name": "qwen-prefill"}}
    assert admit(crd, other) == [": metadata.name must be <spec.service>-<spec.role>"]
