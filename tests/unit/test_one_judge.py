"""check, ``render pods``, the operator and ``up`` refuse the same documents with the same words."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_documents import BASE

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.cli.main import main
from xpyd_operator.errors import SpecError, Unsupported
from xpyd_operator.kube.blueprint import judge
from xpyd_operator.render.unsupported import check_local

FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "data": {"prefill": {"parallelism": {"data": 2}}},
    "ray": {"decode": {"parallelism": {"executor": "ray"}, "resources": {}}},
    "pipeline": {"decode": {"parallelism": {"pipeline": 2}, "args": ["--enforce-eager"], "resources": {}}},
    "memory": {"decode": {"resources": {"limits": {"memory": "319Mi"}}}},
    "hostNetwork": {"prefill": {"template": {"spec": {"hostNetwork": True}}}},
    "name": {"prefill": {"template": {"metadata": {"name": "x"}}}},
    "port": {"router": {"ports": {"http": 8000}}},
    "members": {"router": {"ports": {"members": 8000}}},
    "p2p": {"router": {"compat": "p2p"}},
}
PAIRS = list(itertools.combinations(FAULTS, 2))


def merged(into: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        into[key] = merged(into[key], value) if isinstance(into.get(key), dict) and value else copy.deepcopy(value)
    return into


def made(pair: tuple[str, str]) -> dict[str, Any]:
    document = copy.deepcopy(BASE)
    for fault in pair:
        merged(document["spec"], FAULTS[fault])
    return document


def checked(path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> set[str]:
    code = main(["check", "-f", str(path), "--for", str(target), "-o", "json"])
    (report,) = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    faults = report.get("faults", [])
    assert all(place["line"] > 0 for place in faults)
    return {f"{place['path']}: {place['message']}" for place in faults}


def up_says(document: dict[str, Any]) -> list[str]:
    """What ``xpyd up`` would end with on a host with a GPU: every fault of the document, or the first refusal."""
    try:
        check_local(decode_service(document, target=Target.LOCAL).service, gpus=1)
    except SpecError as error:
        return [str(fault) for fault in error.faults]
    except Unsupported as error:
        return [str(error)]
    return []


def test_there_are_enough_documents() -> None:
    assert len(PAIRS) >= 40


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_same_words(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(made(pair)))
    words = checked(path, Target.KUBERNETES, capsys)
    judged = judge(made(pair))
    assert words, "each pair has a fault in Kubernetes"
    assert judged.service is None
    assert all(one in judged.message for one in words)
    assert main(["render", "pods", "-f", str(path)]) == 2
    printed = capsys.readouterr().err
    assert all(one in printed for one in words)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_same_words_on_a_host(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(made(pair)))
    words = checked(path, Target.LOCAL, capsys)
    said = set(up_says(made(pair)))
    assert said <= words
    assert bool(said) is bool(words)
