"""YAML text to documents that know their lines."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_operator.api.load import MAX_CHARS, LoadError, documents

TEXT = """\
# a comment
apiVersion: xpyd.dev/v1beta1
spec:
  engine:
    args:
      - --enforce-eager
      - --port
  decode: {replicas: 3}
"""


def only(text: str) -> object:
    (found,) = documents(text)
    return found.value


def test_values_and_lines() -> None:
    (found,) = documents(TEXT)
    assert found.value["spec"]["engine"]["args"] == ["--enforce-eager", "--port"]
    assert found.line == 2
    assert found.line_of("spec.engine.args[1]") == 7
    assert found.line_of("spec.decode.replicas") == 8


def test_a_missing_field_has_the_line_of_what_it_would_be_in() -> None:
    (found,) = documents(TEXT)
    assert found.line_of("spec.engine.env[0].name") == 4
    assert found.line_of('spec.decode.resources.limits["nvidia.com/gpu"]') == 8
    assert found.line_of("metadata.name") == 2
    assert found.line_of("document") == 2


def test_keys_that_are_no_plain_words_have_lines() -> None:
    (found,) = documents("limits:\n  cpu: 1\n  nvidia.com/gpu: 2\n")
    assert found.line_of('limits["nvidia.com/gpu"]') == 3


def test_several_documents_without_the_empty_ones() -> None:
    found = documents("a: 1\n---\n# nothing\n---\nb: 2\n---\n")
    assert [(one.value, one.line) for one in found] == [({"a": 1}, 1), ({"b": 2}, 5)]


def test_json_is_yaml() -> None:
    assert only('{"a": [1, "x", null, true]}') == {"a": [1, "x", None, True]}


@pytest.mark.parametrize(
    ("text", "value"),
    [("off", False), ("Off", False), ("'Off'", "Off"), ("on", True), ("1", 1), ("1.5", 1.5), ("30s", "30s"), ("~", None),
     ("2026-01-01", "2026-01-01"), ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"), ("1e3", "1e3"), ("v1", "v1")],
)  # fmt: skip
def test_scalars_as_kubectl_reads_them_and_dates_as_text(text: str, value: object) -> None:
    assert only(f"a: {text}") == {"a": value}


def test_anchors_and_merge_keys() -> None:
    assert only("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: *x\n") == {
        "a": {"p": 1, "q": 2},
        "b": {"p": 1, "q": 3},
        "c": {"p": 1, "q": 2},
    }


@pytest.mark.parametrize(
    ("text", "line", "tells"),
    [
        ("", 1, "is empty"),
        ("# only a comment\n", 1, "is empty"),
        ("---\n---\n", 1, "is empty"),
        ("a: 1\n\tb: 2\n", 2, "tab"),
        ("a:\n\t- 1\n", 2, "indented with a tab; use spaces"),
        ("a: [1, 2\nb: 3\n", 2, "expected ',' or ']'"),
        ("a: {b: 1\n", 2, "expected ',' or '}'"),
        ("a: 'x\n", 2, "unexpected end of stream"),
        ("a: b: c\n", 1, "mapping values are not allowed here"),
        ("a: 1\nb: 2\na: 3\n", 3, "the key a stands twice"),
        ("1: a\n0x1: b\n", 2, "the key 0x1 stands twice"),
        ("yes: a\ntrue: b\n", 2, "the key true stands twice"),
        ("a: {<<: 3}\n", 1, "<< takes a section"),
        ("a: {<<: {? [1] : 2}}\n", 1, "a key must be text"),
        ("a: &a {<<: *a}\n", 1, "nested too deeply"),
        ("a: *x\n", 1, "undefined alias"),
        ("a: &x [*x]\n", 1, "an alias stands inside of what it repeats"),
        ("a: !!python/object:os.system x\n", 1, "the tag"),
        ("a: !secret x\n", 1, "write plain text"),
        ("a: 1\nb: !!int x\n", 2, "'x' is not a int"),
        ("? [1]\n: 2\n", 1, "a key must be text"),
        ("a: 1\nb: \x01\n", 2, "is not allowed"),
        ("[\n" * 2000, 1, "nested too deeply"),
        ("x" * (MAX_CHARS + 1), 1, "at most"),
    ],
)
def test_what_is_no_document_is_refused_with_its_line(text: str, line: int, tells: str) -> None:
    with pytest.raises(LoadError) as caught:
        documents(text)
    assert tells in str(caught.value)
    assert caught.value.line == line


def test_aliases_cannot_blow_a_file_up() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    with pytest.raises(LoadError, match="more than 50000 values"):
        documents(bomb)


@pytest.mark.parametrize(("text", "value"), [
    ("{<<: *a, y: 3}", {"x": 1, "y": 3}), ("{y: 3, <<: *a}", {"x": 1, "y": 3}),
    ("{<<: [*a, {x: 5, z: 1}], w: 4}", {"x": 1, "y": 2, "z": 1, "w": 4}),
    ("{<<: {<<: *a, x: 7}, y: 9}", {"x": 7, "y": 9}),
])
def test_a_merge_brings_what_is_not_written(text: str, value: object) -> None:
    (found,) = documents(f"a: &a {{x: 1, y: 2}}\nb: {text}\n")
    assert found.value["b"] == value
    assert all(found.line_of(f"b.{name}") in {1, 2} for name in found.value["b"])


def test_merges_cannot_blow_a_file_up() -> None:
    levels = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], q{n}: 1}}\n" for n in range(1, 40))
    (found,) = documents(f"a0: &a0 {{x: 1}}\n{levels}")
    assert len(found.value["a39"]) == 40
    wide = ", ".join(f"k{n}: 1" for n in range(2000))
    with pytest.raises(LoadError, match="more than 50000 values"):
        documents(f"a: &a {{{wide}}}\nb: {'{<<: ' * 40}*a{'}' * 40}\n")


@settings(deadline=None)
@given(st.text(max_size=60) | st.text("ab:-[]{}&*!'\"\n \t#|>?", max_size=40))
def test_no_text_escapes_as_another_error(text: str) -> None:
    with suppress(LoadError):
        assert all(one.line >= 1 for one in documents(text))
