"""check, ``render pods``, the operator and ``up`` say the same of the same documents, word by word and line by line."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from judged_documents import CHANGES, EVERYWHERE, GOOD, HOW_MANY, KUBE, WARNED, Made, documents
from more_cases import more

from xpyd_operator.api.load import documents as load
from xpyd_operator.api.rule import Target
from xpyd_operator.cli.main import main
from xpyd_operator.errors import LocalError
from xpyd_operator.kube.objects.blueprint import judge_body

DOCUMENTS = documents()


class Words(NamedTuple):
    """What one of the four says of a document; each with its line."""

    refusals: set[str]
    warnings: set[str]


def checked(path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> Words:
    code = main(["check", "-f", str(path), "--for", str(target), "-o", "json"])
    (report,) = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert report["ok"] is not bool(report.get("faults"))
    strict = main(["check", "-f", str(path), "--for", str(target), "--strict"])
    text = capsys.readouterr().out
    assert strict == int(bool(report.get("faults") or report.get("warnings")))
    refusals, warnings = (
        {f"{path}:{place['line']}: {place['path']}: {place['message']}" for place in report.get(kind, [])}
        for kind in ("faults", "warnings")
    )
    for one in refusals:
        assert f"{one}\n" in text
    for one in warnings:
        file, line, words = re.fullmatch(r"(.*?):(\d+): (.*)", one).groups()  # type: ignore[union-attr]
        assert f"{file}:{line}: warning: {words}\n" in text
    return Words(refusals, warnings)


def printed(text: str) -> Words:
    """What a command writes to stderr."""
    lines = [line.removeprefix("xpyd: ") for line in text.splitlines() if line.startswith("xpyd: ")]
    warnings = {line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")}
    return Words({line for line in lines if not line.startswith("warning: ")}, warnings)


def rendered(path: Path, capsys: pytest.CaptureFixture[str]) -> Words:
    code = main(["render", "pods", "-f", str(path)])
    captured = capsys.readouterr()
    found = printed(captured.err)
    assert code == (2 if found.refusals else 0)
    assert bool(captured.out) is not bool(found.refusals)
    return found


def operated(path: Path) -> Words:
    """What the operator has in its condition and its Events; it has no lines, so they are looked up."""
    (one,) = load(path.read_text())
    judgement = judge_body(one.value)
    of = [{f"{path}:{one.line_of(fault.path)}: {fault}" for fault in found}
          for found in (judgement.refusals, judgement.warnings)]
    ignored = {f"{path}:{one.line_of(each.path)}: {each}".replace(", ignored; ", "; ", 1)
               for each in judgement.ignored}  # a cluster's API server has dropped or refused them before
    return Words(of[0] | ignored, of[1])


def upped(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Words:
    """``xpyd up`` on a host with a GPU, until it has judged."""
    def judged(service: object) -> None:
        raise LocalError("judged")

    monkeypatch.setattr("xpyd_operator.local.gpus.count", lambda: 1)
    monkeypatch.setattr("xpyd_operator.cli.up._check_model", judged)
    assert main(["up", "-f", str(path)]) == 2
    found = printed(capsys.readouterr().err)
    accepted = found.refusals == {"judged"}
    assert accepted or "judged" not in found.refusals
    return Words(set() if accepted else found.refusals, found.warnings)


def test_there_are_refusals_warnings_and_good_ones_among_them() -> None:
    assert (len(DOCUMENTS), len({made.name for made in DOCUMENTS})) == (HOW_MANY, HOW_MANY)
    assert Counter(change for made in DOCUMENTS for change in made.changes).keys() == CHANGES.keys()
    right = [made for made in DOCUMENTS if not any(change in EVERYWHERE or change in KUBE for change in made.changes)]
    assert sum(any(change in WARNED for change in made.changes) for made in right) >= 20
    assert sum(made.alike for made in DOCUMENTS) >= 50


OTHERS = [made for at, made in enumerate(DOCUMENTS) if at % 3]


@pytest.mark.parametrize("made", [*DOCUMENTS[::3], *more((made,) for made in OTHERS)], ids=lambda made: made.name)
def test_all_four_say_the_same(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(made.value))
    kube, local = (checked(path, target, capsys) for target in (Target.KUBERNETES, Target.LOCAL))
    shown, up, operator = rendered(path, capsys), upped(path, monkeypatch, capsys), operated(path)
    assert shown == operator == kube
    assert up == local
    assert kube.warnings == local.warnings
    if made.alike:
        assert kube == local
    if any(change in EVERYWHERE for change in made.changes):
        assert kube.refusals
        assert local.refusals
    if any(change in KUBE for change in made.changes):
        assert kube.refusals
    if all(change in GOOD for change in made.changes):
        assert not (local if made.name.startswith("local") else kube).refusals


def test_one_that_is_joined_by_hand_hears_all_of_it_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xpyd_operator.local.gpus.count", lambda: 0)
    given = ["join", "--service", "qwen", "--router", "10.0.0.1:30001", "--role", "decode", "--key-file", "key"]
    assert main([*given, "--model", "pvc://weights", "--", "--port", "1", "--host=x", "--tokens-only"]) == 2
    found = printed(capsys.readouterr().err)
    assert {words.split(": ")[0] for words in found.refusals} == {
        "spec.model.source", "spec.engine.args[0]", "spec.engine.args[2]"}
    assert {words.split(": ")[0] for words in found.warnings} == {"spec.engine.args[3]"}
