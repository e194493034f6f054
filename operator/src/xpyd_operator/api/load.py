"""Reads YAML text into untyped documents that know the line of each field.

Values are read as kubectl reads them (YAML 1.1: an unquoted ``off`` is false), but dates stay text, and a key that stands
twice is an error. A text has at most ``MAX_CHARS`` characters, and a document ``MAX_NODES`` values, those that aliases
and merges (``<<``) repeat included.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec
import yaml

from xpyd_operator.api.base import API_VERSION
from xpyd_operator.api.walk import join
from xpyd_operator.errors import Fault, SpecError

MAX_CHARS = 1 << 20
MAX_NODES = 50_000
_MERGE = "tag:yaml.org,2002:merge"
_Pair = tuple[yaml.Node, yaml.Node]
_SCALARS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))


class Document(msgspec.Struct, frozen=True):
    """One YAML document, as plain values, with the line of each field, counted from 1."""

    value: Any
    """What it says, as plain dicts, lists and scalars."""
    line: int
    """Where it begins, from 1."""
    lines: dict[str, int]
    """Line of each field, by its path (``spec.engine.args[2]``)."""

    def line_of(self, path: str) -> int:
        """The line of the field at ``path``; where it is missing, that of the closest section around it that is there."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = re.sub(r'(\.[^.\[\]]+|\[[0-9]+\]|\["(?:[^"\\]|\\.)*"\]|^[^.\[\]]+)$', "", path, count=1)
        return self.line


class LoadError(SpecError):
    """The text is no YAML, too large or too deeply nested, or has no document. ``line``: where, counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__((Fault("document", message),))
        self.line = line


class _Loader(yaml.SafeLoader):
    """Resolves scalars as YAML 1.1 does, except for dates, which stay text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def documents(text: str) -> list[Document]:
    """All YAML documents of a text; those that are empty (only comments) are left out.

    Raises:
        LoadError: the text is too large or too deeply nested, is no YAML, or has no document at all.
    """
    if len(text) > MAX_CHARS:
        raise LoadError(1, f"has {len(text)} characters, at most {MAX_CHARS} are read")
    try:
        loader = _Loader(text)
        try:
            found = _all(loader)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise LoadError(mark.line + 1 if mark else 1, f"is not YAML: {_words(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise LoadError(line, f"is not YAML: the character {chr(error.character)!r} is not allowed") from None
    except RecursionError:
        raise LoadError(1, "is nested too deeply") from None
    if not found:
        raise LoadError(1, f"is empty; a DisaggService begins with apiVersion: {API_VERSION}")
    return found


def _all(loader: _Loader) -> list[Document]:
    found: list[Document] = []
    while loader.check_node():
        node = loader.get_node()
        if node is None:  # only at the end of the stream, which check_node has ruled out
            break
        builder = _Builder(loader)
        value = builder.build(node, "")
        if value is not None:
            found.append(Document(value=value, line=node.start_mark.line + 1, lines=builder.lines))
    return found


class _Builder:
    """Builds plain values from YAML nodes, and notes the line of every field by its path."""

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader
        self.lines: dict[str, int] = {}
        self.nodes = 0
        self.open: set[int] = set()
        self.merged: dict[int, list[_Pair]] = {}
        """What ``<<`` brings into a mapping, by the identity of its node; later pairs win."""

    def build(self, node: yaml.Node, path: str) -> Any:
        self._count(node, 1)
        if isinstance(node, yaml.ScalarNode):
            if node.tag not in _SCALARS:
                _fail(node, f"the tag {node.tag} is not known; write plain text")
            return self._scalar(node)
        if id(node) in self.open:
            _fail(node, "an alias stands inside of what it repeats")
        self.open.add(id(node))
        try:
            return self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        finally:
            self.open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self.loader.construct_object(node)
        except ValueError:
            _fail(node, f"{node.value!r} is not a {node.tag.rpartition(':')[2]}")

    def _sequence(self, node: yaml.Node, path: str) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            here = f"{path}[{index}]"
            self.lines[here] = item.start_mark.line + 1
            items.append(self.build(item, here))
        return items

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        written: set[Any] = set()
        merged, own = self._merge(node), [pair for pair in node.value if pair[0].tag != _MERGE]
        for index, (key, value) in enumerate([*merged, *own]):  # merged keys come first, so those written here win
            name = self.build(key, path)
            if index >= len(merged):
                if name in written:
                    _fail(key, f"the key {key.value} stands twice in one section")
                written.add(name)
            here = join(path, str(name))
            self.lines[here] = key.start_mark.line + 1
            result[name] = self.build(value, here)
        return result

    def _merge(self, node: yaml.MappingNode) -> list[_Pair]:
        """The pairs that the key ``<<`` of a mapping brings, without those that others of them replace."""
        if id(node) in self.merged:
            return self.merged[id(node)]
        found: dict[tuple[str, str], _Pair] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _fail(key, "a key must be text")
            if key.tag != _MERGE:
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in reversed(sources):  # the first of a list wins
                if not isinstance(source, yaml.MappingNode):
                    _fail(source, "<< takes a section, or a list of them")
                pairs = [*self._merge(source), *(pair for pair in source.value if pair[0].tag != _MERGE)]
                found |= {(pair[0].tag, pair[0].value): pair for pair in pairs}
        self._count(node, len(found))
        self.merged[id(node)] = list(found.values())
        return self.merged[id(node)]

    def _count(self, node: yaml.Node, values: int) -> None:
        self.nodes += values
        if self.nodes > MAX_NODES:
            _fail(node, f"has more than {MAX_NODES} values")


def _fail(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _words(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "cannot be read"
    if "cannot start any token" in problem and "\\t" in problem:
        problem = "a line is indented with a tab; use spaces"
    return f"{error.context}, {problem}" if error.context else problem
