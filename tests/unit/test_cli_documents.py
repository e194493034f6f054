"""Reading the one service of a file, as ``xpyd up`` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from api_documents import BASE, document

from xpyd_operator.api.rule import Target
from xpyd_operator.cli.documents import load_service
from xpyd_operator.errors import SpecError, XpydError


def test_a_source_beside_the_document_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").mkdir()
    path = tmp_path / "local" / "a.yaml"
    path.write_text(yaml.safe_dump(document({"spec.model.source": "../weights"})))
    monkeypatch.chdir(tmp_path)
    for name in (str(path), "local/a.yaml"):
        service = load_service(name)
        assert service.spec.model.source == str(tmp_path / "weights")
        assert service.served_name == "qwen"


def test_other_sources_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert load_service(str(path)).spec.model.source == "Qwen/Qwen3-8B"


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(document({"spec.decode.replicas": 0}), sort_keys=False))
    with pytest.raises(SpecError) as caught:
        load_service(str(path))
    assert str(caught.value).startswith(f"{path}:11: spec.decode.replicas: must be at least 1")


@pytest.mark.parametrize(
    ("text", "tells"),
    [("", ":1: is empty"), ("a: [", ":1: is not YAML"), (yaml.safe_dump(BASE) + "---\na: 1\n", "has 2 documents")],
)
def test_a_file_must_hold_one_document(tmp_path: Path, text: str, tells: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_service(str(path))
    assert tells in str(caught.value)


def test_what_the_target_cannot_do_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(document({"spec.model.source": "pvc://claim/x"})))
    with pytest.raises(SpecError, match="a volume exists in Kubernetes only"):
        load_service(str(path))
    assert load_service(str(path), Target.KUBERNETES).name == "qwen"


def test_no_such_file() -> None:
    with pytest.raises(XpydError, match="No such file"):
        load_service("/no/such/file.yaml")
