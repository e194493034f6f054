"""docs/reference.md names every field of the structs."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import inspect as mi

from xpyd_operator.api.reference import reference
from xpyd_operator.api.service import ServiceSpec

FILE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_the_file_is_up_to_date() -> None:
    assert FILE.read_text() == reference(), "run `xpyd render reference`"


def fields(kind: type[msgspec.Struct], found: set[str]) -> set[str]:
    for field in mi.type_info(kind).fields:
        found.add(field.encode_name)
        for part in (field.type, *getattr(field.type, "types", ())):
            if isinstance(part, mi.StructType):
                fields(part.cls, found)
    return found


def test_every_field_stands_in_a_table() -> None:
    text = reference()
    assert [name for name in fields(ServiceSpec, set()) if f"| `{name}` |" not in text] == []


def test_rows_have_four_cells() -> None:
    for line in reference().splitlines():
        if line.startswith("| `") and "--" not in line:
            assert line.replace("\\|", "").count("|") == 5, line


def test_defaults_required_and_bounds_are_shown() -> None:
    text = reference()
    assert "| `http` | whole number, 1024 to 65535 | `10001` |" in text
    assert "| `source` | text | required |" in text
    assert "| `timeout` | duration, from 1s to 168h | `10m` |" in text
    assert "- http, members and admin must be three ports" in text
