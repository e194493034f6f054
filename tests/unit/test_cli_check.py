"""``xpyd check``: each fault with file and line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from api_documents import BASE, document

from xpyd_operator.cli.main import main

GOOD = yaml.safe_dump(BASE)
WRONG = """\
apiVersion: xpyd.dev/v1beta1
kind: DisaggService
metadata: {name: qwen}
spec:
  model: {source: Qwen/Qwen3-8B}
  decode:
    replica: 3
    args:
      - --enforce-eager
      - --port=8000
"""


@pytest.fixture
def write(tmp_path: Path):
    def inner(text: str | bytes, name: str = "a.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return inner


def test_a_right_document(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD)
    assert main(["check", "-f", path]) == 0
    assert capsys.readouterr().out == f"{path}:1: DisaggService qwen: ok, 1P3D\n"


def test_each_fault_has_file_line_and_path(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(WRONG)
    assert main(["check", "-f", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}:7: spec.decode.replica: unknown field; did you mean replicas?"
    assert lines[1].startswith(f"{path}:10: spec.decode.args[1]: --port is set by xpyd; ")
    assert len(lines) == 2


def test_a_key_in_the_environment_is_refused_like_the_argument(write, capsys: pytest.CaptureFixture[str]) -> None:
    given = "  engine:\n    env: [{name: VLLM_API_KEY, value: sk-inner}]\n    args: [--api-key, sk-inner]\n"
    path = write(GOOD.rstrip("\n") + "\n" + given)
    assert main(["check", "-f", path]) == 1
    lines = sorted(line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())
    words = "is set by xpyd; write spec.router.apiKeySecret; engines are reached by their routers only"
    assert lines == [f"spec.engine.args[0]: --api-key {words}", f"spec.engine.env[0].name: VLLM_API_KEY {words}"]


def test_roles_that_judge_requests_differently_are_worth_a_note(write, capsys: pytest.CaptureFixture[str]) -> None:
    one = yaml.safe_load(GOOD)
    one["spec"].setdefault("decode", {})["args"] = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    path = write(yaml.safe_dump(one))
    assert main(["check", "-f", path]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert ": ok" in first
    assert len(rest) == 2
    assert all(": note: spec.decode.args[" in line and "decode has the last word" in line for line in rest)


def test_two_documents_one_of_them_wrong(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(f"{GOOD}---\n{WRONG}")
    assert main(["check", "-f", path]) == 1
    out = capsys.readouterr().out
    assert f"{path}:1: DisaggService qwen: ok" in out
    assert f"{path}:{len(GOOD.splitlines()) + 1 + 7}: spec.decode.replica:" in out


def test_objects_of_others_are_passed_over(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(f"apiVersion: v1\nkind: Secret\n---\n{GOOD}")
    assert main(["check", "-f", path]) == 0
    assert "passed over, v1 Secret is not of xpyd.dev" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line", "tells"),
    [
        ("", 1, "is empty"),
        ("a: 1\n\tb: 2\n", 2, "is not YAML"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8"),
        (b"\x00\x01", 1, "is not YAML"),
        ("just text", 1, "must be a section"),
    ],
)
def test_what_is_no_document(write, capsys: pytest.CaptureFixture[str], text: str | bytes, line: int, tells: str) -> None:
    path = write(text)
    assert main(["check", "-f", path]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}:{line}: document: ")
    assert tells in out


def test_a_folder_with_all_its_files(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(GOOD, "a.yaml")
    write(json.dumps(BASE), "deep/b.json")
    write("not looked at", "c.txt")
    assert main(["check", "-f", str(tmp_path)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{tmp_path}/a.yaml",
        f"{tmp_path}/deep/b.json",
    ]


def test_several_files_and_standard_input(
    write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(WRONG.encode())))
    assert main(["check", "-f", write(GOOD), "-f", "-"]) == 1
    out = capsys.readouterr().out
    assert "DisaggService qwen: ok" in out
    assert "<stdin>:7: spec.decode.replica" in out


def test_what_one_target_cannot_do_is_a_note_or_a_fault(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(yaml.safe_dump(document({"spec.model.source": "./weights"}), sort_keys=False))
    assert main(["check", "-f", path]) == 0
    assert f"{path}:7: note: spec.model.source: not for kubernetes: ./weights: a path beside" in capsys.readouterr().out
    assert main(["check", "-f", path, "--for", "local"]) == 0
    assert "note" not in capsys.readouterr().out
    assert main(["check", "-f", path, "--for", "kubernetes"]) == 1
    assert f"{path}:7: spec.model.source: ./weights: a path beside" in capsys.readouterr().out


def test_json(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(f"{GOOD}---\n{WRONG}")
    assert main(["check", "-f", path, "-o", "json"]) == 1
    good, wrong = json.loads(capsys.readouterr().out)
    assert (good["ok"], good["kind"], good["name"], good["summary"]) == (True, "DisaggService", "qwen", "1P3D")
    assert wrong["ok"] is False
    assert [fault["path"] for fault in wrong["faults"]] == ["spec.decode.replica", "spec.decode.args[1]"]


def test_a_pool(write, capsys: pytest.CaptureFixture[str]) -> None:
    pool = {
        "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggPool", "metadata": {"name": "qwen-decode"},
        "spec": {"service": "qwen", "role": "decode", "replicas": 1},
    }  # fmt: skip
    assert main(["check", "-f", write(yaml.safe_dump(pool))]) == 0
    assert "DisaggPool qwen-decode: ok" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["no/such/file.yaml", "no/such/folder/"])
def test_no_such_file_is_a_usage_error(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-f", missing]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_folder_without_documents_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-f", str(tmp_path)]) == 2
    assert "no file in it ends with .yaml" in capsys.readouterr().err


def test_a_warning_is_shown_with_its_line_and_counts_if_strict(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(f"{GOOD.rstrip()}\n  engine:\n    args: [--enforce-eager, --tokens-only]\n")
    line = len(GOOD.splitlines()) + 2
    for strict, code in (((), 0), (("--strict",), 1)):
        assert main(["check", "-f", path, *strict]) == code
        first, warning = capsys.readouterr().out.splitlines()
        assert ": ok" in first
        assert warning.startswith(f"{path}:{line}: warning: spec.engine.args[1]: --tokens-only: an engine with it has no")
        assert warning.endswith("(vLLM 0.32)")
    assert main(["check", "-f", write(GOOD), "--strict"]) == 0


def test_words_that_there_are_not_are_named_by_line(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(GOOD + "  router: {placement: SIDECAR}\n  planner:\n    mode: off\n")
    assert main(["check", "-f", path]) == 1
    told = capsys.readouterr().out
    lines = GOOD.count("\n")
    assert f"{path}:{lines + 1}: spec.router.placement: must be one of deployment, sidecar, not 'SIDECAR'; did" in told
    assert f"{path}:{lines + 3}: spec.planner.mode: is read as false by YAML; write disabled" in told
