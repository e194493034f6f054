"""The API server checks the default of a section against the section's rules before it fills in the fields inside."""

from collections.abc import Iterator
from typing import Any

from xpyd_operator.api.schema import schema_of
from xpyd_operator.api.service import DisaggService


def sections(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in schema.get("properties", {}).items():
        if "properties" in child and "default" in child:
            yield f"{path}.{name}", child
        yield from sections(child, f"{path}.{name}")


def test_the_default_of_a_section_spells_out_every_default_inside() -> None:
    found = dict(sections(schema_of(DisaggService)["properties"]["spec"], "spec"))
    assert found["spec.router.ports"]["default"] == {"http": 10001, "members": 30001}
    for path, section in found.items():
        inside = {name for name, child in section["properties"].items() if "default" in child}
        assert set(section["default"]) == inside, path


def test_a_default_that_is_zero_or_empty_keeps_its_type() -> None:
    spec = schema_of(DisaggService)["properties"]["spec"]["properties"]
    assert spec["router"]["properties"]["skipPrefill"]["default"] == {"belowTokens": 0}
    assert spec["engine"]["properties"]["args"]["default"] == []
