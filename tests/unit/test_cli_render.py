"""``xpyd render``: writing, printing and checking what is generated."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from xpyd_operator.api.crds import crds
from xpyd_operator.cli.main import main


def test_crds_are_written_and_then_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "crds"
    assert main(["render", "crds", "--dir", str(folder), "--check"]) == 1
    assert "not up to date; run `xpyd render crds`" in capsys.readouterr().out
    assert main(["render", "crds", "--dir", str(folder)]) == 0
    assert yaml.safe_load((folder / "disaggservices.yaml").read_text()) == crds()["disaggservices.yaml"]
    assert main(["render", "crds", "--dir", str(folder), "--check"]) == 0
    (folder / "disaggpools.yaml").write_text("# edited")
    capsys.readouterr()
    assert main(["render", "crds", "--dir", str(folder), "--check"]) == 1
    assert capsys.readouterr().out.startswith(f"{folder}/disaggpools.yaml: not up to date")


def test_crds_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "crds", "--dir", "-"]) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == list(crds().values())


def test_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reference.md"
    assert main(["render", "reference", "--file", str(file)]) == 0
    assert main(["render", "reference", "--file", str(file), "--check"]) == 0
    capsys.readouterr()
    assert main(["render", "reference", "--file", "-"]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["render", "crds", "--dir", str(tmp_path / "file")]) == 2
    assert "xpyd: " in capsys.readouterr().err


DOCUMENT = """\
apiVersion: xpyd.dev/v1beta1
kind: DisaggService
metadata: {name: qwen}
spec:
  model: {source: a/b}
  prefill: {replicas: 2}
"""
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))
NOT_BUILT: set[str] = set()


def test_pods_prints_every_object_that_would_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qwen.yaml"
    file.write_text(DOCUMENT)
    arguments = ["render", "pods", "-f", str(file), "-n", "models", "--sidecar-image", "r/sidecar:1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "&id" not in text
    made = list(yaml.safe_load_all(text))
    assert {one["metadata"]["namespace"] for one in made} == {"models"}
    assert all("ownerReferences" not in one["metadata"] for one in made)
    pods = [one for one in made if one["kind"] == "Pod"]
    assert [(one["metadata"]["name"], one["metadata"]["labels"]["xpyd.dev/role"]) for one in pods] == [
        ("qwen-e0", "prefill"), ("qwen-e1", "prefill"), ("qwen-e2", "decode")]
    assert pods[0]["spec"]["initContainers"][0]["image"] == "r/sidecar:1"
    pools = {one["metadata"]["name"]: one["spec"]["replicas"] for one in made if one["kind"] == "DisaggPool"}
    assert pools == {"qwen-prefill": 2, "qwen-decode": 1}
    (secret,) = (one for one in made if one["kind"] == "Secret")
    assert secret["stringData"]["key"] == "made once by the operator"  # nothing that could be used as a key
    assert main([*arguments, "-o", "json"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"apiVersion": "v1", "kind": "List", "items": made}


def test_pods_are_those_of_the_operators_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qwen.yaml"
    file.write_text(DOCUMENT)
    for user, uids in (("fixed", {65532}), ("assigned", {None})):
        assert main(["render", "pods", "-f", str(file), "--pod-user", user]) == 0
        pods = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one["kind"] == "Pod"]
        assert {one["spec"]["securityContext"].get("runAsUser") for one in pods} == uids


def test_pods_names_every_refusal_by_file_line_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qwen.yaml"
    file.write_text(DOCUMENT + "  router: {compat: p2p}\n  decode:\n    template: {spec: {hostNetwork: true}}\n")
    assert main(["render", "pods", "-f", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"xpyd: {file}:7: spec.router.compat: " in captured.err
    assert f"xpyd: {file}:9: spec.decode.template.spec.hostNetwork: " in captured.err
    file.write_text("a: [\n")
    assert main(["render", "pods", "-f", str(file)]) == 2
    assert f"xpyd: {file}:" in capsys.readouterr().err
    file.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
    assert main(["render", "pods", "-f", str(file)]) == 2
    assert capsys.readouterr().err == f"xpyd: {file}: no DisaggService in it\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_for_kubernetes_render_or_say_what_is_not_built(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = path.name in NOT_BUILT
    assert main(["render", "pods", "-f", str(path)]) == (2 if refused else 0)
    captured = capsys.readouterr()
    assert ("# Not built yet: " in path.read_text()) == refused
    assert (captured.err.count("not built yet") > 0) == refused
    assert (captured.out == "") == refused
