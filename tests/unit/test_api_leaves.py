"""How many settings there are, and that each of them is shown in a complete document that is judged and rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from xpyd_operator.api.crds import service_crd
from xpyd_operator.api.load import documents
from xpyd_operator.api.recognize import DocumentKind, recognize
from xpyd_operator.api.rule import Target
from xpyd_operator.render.judge import judge
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.settings import KubeSettings

ROOT = Path(__file__).resolve().parents[2]
MOST = 91
"""Settings of a service. Who adds one takes another away, or says in a decision why there must be more."""
SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:1")
LOCAL = ROOT / "docs/guide.md"
SPEC = service_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
FENCE = re.compile(r"^```yaml\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


class Leaf(NamedTuple):
    """A field that a user can set; an object of Kubernetes' own is one."""

    path: str
    required: bool
    tells: str


def leaves(schema: dict[str, Any], path: str = "spec", *, required: bool = False) -> Iterator[Leaf]:
    """All of a section, or of the items of a list."""
    section = schema if "properties" in schema else schema.get("items", {})
    for name, child in section.get("properties", {}).items():
        yield from leaves(child, f"{path}.{name}", required=name in section.get("required", ()))
    if "properties" not in section:
        yield Leaf(path, required, schema.get("description", ""))


def written(schema: dict[str, Any], value: Any, path: str = "spec") -> Iterator[str]:
    """The settings that a document states."""
    if "items" in schema and "properties" in schema["items"]:
        for one in value:
            yield from written(schema["items"], one, path)
    elif "properties" not in schema:
        yield path
    else:
        for name, child in value.items():
            yield from written(schema["properties"][name], child, f"{path}.{name}")


def shown() -> Iterator[tuple[str, Any, Target]]:
    """The services of the examples and of the documentation, each with where it is to run."""
    texts = [(path, path.read_text()) for path in ROOT.glob("examples/**/*.yaml")]
    texts += [(path, block) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
              for block in FENCE.findall(path.read_text()) if re.search("^kind: DisaggService$", block, re.MULTILINE)]
    for path, text in texts:
        target = Target.LOCAL if path == LOCAL or path.parent.name == "local" else Target.KUBERNETES
        for each in documents(text):
            if recognize(each.value) is DocumentKind.SERVICE:
                yield str(path.relative_to(ROOT)), each.value, target


SHOWN = sorted(shown(), key=lambda one: one[0])


def test_there_are_no_more_settings_than_people_can_choose() -> None:
    assert len(list(leaves(SPEC))) <= MOST


def test_each_setting_that_may_be_left_out_says_when_to_set_it() -> None:
    assert [leaf.path for leaf in leaves(SPEC) if not leaf.required and "Set it " not in leaf.tells] == []


def test_each_setting_stands_in_an_example_or_a_complete_document() -> None:
    stated = {path for _, value, _ in SHOWN for path in written(SPEC, value["spec"])}
    assert sorted({leaf.path for leaf in leaves(SPEC)} - stated) == []


@pytest.mark.parametrize(("name", "value", "target"), SHOWN, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(SHOWN)])
def test_what_is_shown_is_accepted_and_rendered(name: str, value: Any, target: Target) -> None:
    service = judge(value, target, gpus=8).accepted_service()
    if target is Target.KUBERNETES:
        kinds = {each["kind"] for each in manifests(service, SETTINGS)}
        assert {"Service", "Secret"} <= kinds or {"Service", "Pod"} <= kinds, name


def test_a_list_of_objects_is_read_like_a_section() -> None:
    schema = {"properties": {"a": {"items": {"properties": {"b": {"type": "string"}, "c": {"type": "string"}}}}}}
    assert [leaf.path for leaf in leaves(schema)] == ["spec.a.b", "spec.a.c"]
    assert list(written(schema, {"a": [{"b": "x"}]})) == ["spec.a.b"]
