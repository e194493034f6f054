"""The words that fields take are written by the rules of docs/decisions/0024-words-of-the-api.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CRDS = Path(__file__).parents[2] / "crds"
WORD = re.compile(r"[a-z][a-z0-9_]*")


def words(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each word that a field below ``schema`` may take, with the field's path."""
    for word in schema.get("enum", ()):
        yield ".".join(path), word
    for name, below in schema.get("properties", {}).items():
        yield from words(below, (*path, name))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from words(schema[key], path)
    for key in ("anyOf", "oneOf", "allOf"):
        for below in schema.get(key, ()):
            yield from words(below, path)


def specs() -> Iterator[tuple[str, str]]:
    """Of all kinds."""
    for file in ("disaggservices", "disaggpools"):
        for version in yaml.safe_load((CRDS / f"{file}.yaml").read_text())["spec"]["versions"]:
            yield from words(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def plain(word: str) -> bool:
    """Whether YAML 1.1 (PyYAML is one of its readers, kubectl's another) takes the word without quotes for itself.

    PyYAML leaves out y and n, which YAML 1.1 has as booleans.
    """
    return yaml.safe_load(word) == word and word.lower() not in ("y", "n")


def test_words_are_written_by_the_rules() -> None:
    found = set(specs())
    assert ("kv.encryption", "network") in found
    broken = {(path, word) for path, word in found if not (WORD.fullmatch(word) and plain(word))}
    assert broken == set()


@pytest.mark.parametrize("word", ["off", "On", "YES", "no", "y", "N", "true", "null", "~", "12", "1e3", "0x1f"])
def test_what_yaml_reads_as_something_else_is_no_word(word: str) -> None:
    assert not (WORD.fullmatch(word) and plain(word))


def test_words_are_found_wherever_a_schema_has_them() -> None:
    either = {"anyOf": [{"enum": ["y_1"]}]}
    schema = {"properties": {"a": {"items": {"enum": ["x"]}}, "b": {"additionalProperties": either}}}
    assert list(words(schema)) == [("a", "x"), ("b", "y_1")]
