"""Settings, words and the version that are gone are refused with what to write, wherever a document is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from api_documents import document
from api_server import admit
from kube_documents import document as in_cluster

from xpyd_operator.api import gone
from xpyd_operator.api.crds import service_crd
from xpyd_operator.api.decode import decode_pool, decode_service
from xpyd_operator.cli.main import main
from xpyd_operator.errors import SpecError
from xpyd_operator.kube.objects.blueprint import judge_body

FIRST = "xpyd.dev/v1alpha1"
WORDS: dict[str, Any] = {"spec.router.placement": "Deployment", "spec.router.policy": "prefix_aware",
                         "spec.planner.mode": "Off"}


def sections(values: dict[str, Any]) -> dict[str, Any]:
    """Sections of a spec with values at paths from the root of a document."""
    made: dict[str, Any] = {}
    for path, value in values.items():
        _, *parents, last = path.split(".")
        section = made
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return made


REQUIRED: dict[str, Any] = {"spec.model.source": "Qwen/Qwen3-8B", "spec.kv.offload.store.connector": "Mine",
                            "spec.router.gateway.pool.picker": "epp",
                            "spec.router.gateway.parentRefs": [{"name": "public"}]}
"""Fields without which what is gone cannot be written."""
ALL = sections(WORDS | REQUIRED | dict.fromkeys(gone.SETTINGS, 1))
LINES = {
    "apiVersion": "xpyd.dev/v1alpha1 is gone; write apiVersion: xpyd.dev/v1beta1",
    "spec.router.placement": "Deployment is gone; write placement: deployment",
    "spec.router.policy": "prefix_aware is gone; write policy: cost",
    "spec.planner.mode": "Off is gone; write mode: disabled",
}
"""What is said of ``ALL`` in the first version, beside the settings."""


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The refusals, without the name of the file."""
    captured = capsys.readouterr()
    return {line.partition(f"{path}:")[2] for line in (captured.out + captured.err).splitlines() if f"{path}:" in line}


@pytest.mark.parametrize("command", [("check",), ("check", "--for", "kubernetes"), ("up",), ("render", "pods")])
def test_a_document_of_the_first_version_is_told_the_two_lines_that_change(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("apiVersion: xpyd.dev/v1alpha1\nkind: DisaggService\nmetadata: {name: qwen}\nspec:\n"
                    "  model: {source: Qwen/Qwen3-8B}\n  router:\n    placement: Sidecar\n")
    assert main([command[0], *command[1:], "-f", str(path)]) == (1 if command[0] == "check" else 2)
    assert told(path, capsys) == {"1: apiVersion: xpyd.dev/v1alpha1 is gone; write apiVersion: xpyd.dev/v1beta1",
                                  "7: spec.router.placement: Sidecar is gone; write placement: sidecar"}


@pytest.mark.parametrize("command", ["check", "up"])
def test_each_line_and_setting_is_said_at_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(document({"apiVersion": FIRST}, **ALL)))
    assert main([command, "-f", str(path)]) != 0
    found = {line.partition(": ")[2] for line in told(path, capsys)}
    expected = {f"{at}: {words}" for at, words in LINES.items()}
    assert found == expected | {f"{at}: this setting is gone; {advice}" for at, advice in gone.SETTINGS.items()}


def test_the_operator_refuses_the_words_and_names_the_settings_that_it_ignores() -> None:
    found = judge_body(in_cluster(**ALL) | {"apiVersion": FIRST})
    assert {fault.path: fault.message for fault in found.refusals} == LINES
    assert {fault.path: fault.message for fault in found.ignored} == {
        at: f"this setting is gone, ignored; {advice}" for at, advice in gone.SETTINGS.items()}
    settings = judge_body(in_cluster(router={"workers": 4, "compat": "none"}))
    assert (settings.refusals, len(settings.ignored)) == ((), 2), "what runs goes on without them"


def test_a_pool_is_told_the_version_too() -> None:
    pool = {"apiVersion": FIRST, "kind": "DisaggPool", "metadata": {"name": "qwen-decode"},
            "spec": {"service": "qwen", "role": "decode"}}
    with pytest.raises(SpecError) as caught:
        decode_pool(pool)
    assert str(caught.value) == f"apiVersion: {LINES['apiVersion']}"


def test_the_advice_is_followed_by_a_document_that_is_right() -> None:
    right = document()
    for path, words in gone.WORDS.items():
        for word, instead in words.items():
            *sections, name = path.split(".")
            obj = document({path: word})
            with pytest.raises(SpecError, match=f"{name}: {instead}"):
                decode_service(obj)
            section = obj
            for each in sections:
                section = section[each]
            section[name] = instead
            if instead not in ("observe", "auto"):  # these want a goal beside them
                assert decode_service(obj).service.name == right["metadata"]["name"]


def test_what_is_gone_is_in_no_schema() -> None:
    """So the API server refuses a word that is gone, and drops or refuses the settings."""
    crd = service_crd()
    for path, words in gone.WORDS.items():
        if path == "apiVersion":
            continue  # the API server knows no kind of that version
        for word in words:
            assert admit(crd, document({path: word}))
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path in gone.SETTINGS:
        *sections, name = path.split(".")
        section = root
        for each in sections:
            section = section["properties"][each]
        assert name not in section["properties"]


@pytest.mark.parametrize("version", ["xpyd.dev/v1", "xpyd.dev/v1beta2", "xpyd.dev/V1beta1", "v1beta1",
                                     "xpyd.dev/v1alpha1 "])
def test_a_version_that_there_never_was_is_refused_as_any_other_word(version: str) -> None:
    with pytest.raises(SpecError, match=r"apiVersion: must be xpyd.dev/v1beta1, not"):
        decode_service(document({"apiVersion": version}))
