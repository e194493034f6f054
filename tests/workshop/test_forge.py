"""What a forge reads: the workflow runs what is there, forms can be filled in, containers are made from what is copied."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from images import inputs
from images.wheels import ENGINE_PYTHONS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "images/docker/Dockerfile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.BaseLoader)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_alone_ends_in_time_and_runs_targets_that_are_there(path: Path) -> None:
    document = read(path)
    assert document["permissions"] == {"contents": "read"}
    for job in document["jobs"].values():
        assert 0 < int(job["timeout-minutes"]) <= 360
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", one) for one in uses), uses
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), "an expression in a script is code of who wrote its value"
    assert {"test", "test-all"} <= TARGETS & set(re.findall(r"'(test(?:-all)?)'", path.read_text()))


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not here")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["bug", "wish"])
def test_a_form_asks_each_thing_once_and_names_files_that_are_there(name: str) -> None:
    document = read(ROOT / f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= document.keys()
    asked = [each for each in document["body"] if each["type"] != "markdown"]
    ids = [each["id"] for each in asked]
    assert len(ids) == len(set(ids)) > 0
    assert all(each["attributes"]["label"] for each in asked)
    text = (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text()
    assert [path for path in re.findall(r"[\w/]+\.md", text) if not (ROOT / path).exists()] == []


def test_updates_are_asked_for_folders_that_are_there() -> None:
    for entry in read(ROOT / ".github/dependabot.yml")["updates"]:
        assert (ROOT / entry["directory"].lstrip("/")).is_dir(), entry
        assert entry["schedule"]["interval"] == "weekly"


def test_a_container_for_development_sets_up_by_the_makefile() -> None:
    document = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert "make setup" in document["postCreateCommand"]
    assert "setup" in TARGETS
    assert "gcc" in document["onCreateCommand"], "compiled parts need a compiler"


def test_what_a_dockerfile_copies_is_there_and_not_ignored() -> None:
    let = [line.removeprefix("!") for line in (ROOT / "images/docker/Dockerfile.dockerignore").read_text().splitlines()
           if line.startswith("!")]
    words = re.sub(r"\\\n\s*", "", DOCKERFILE)
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", words, re.MULTILINE) for word in line.split()[:-1]]
    for word in copied:
        for platform in ("amd64", "arm64"):
            path = word.replace("${TARGETARCH}", platform)
            assert any(fnmatch(path, pattern) for pattern in let), path
            assert path.startswith("dist/") or (ROOT / path).is_file(), path


def test_a_dockerfile_makes_the_images_that_the_builder_makes() -> None:
    for kind in (kind for kind in inputs.KINDS if kind.published):
        stage = DOCKERFILE.partition(f"FROM run AS {kind.name}\n")[2].partition("\nFROM ")[0]
        assert f"ENTRYPOINT {json.dumps(list(kind.entrypoint))}" in stage
        assert f"COPY --from=build-{kind.name} /{inputs.PREFIX} /{inputs.PREFIX}" in stage
    assert f"USER {inputs.USER}:{inputs.USER}" in DOCKERFILE
    assert f"for version in {' '.join(ENGINE_PYTHONS)}; do" in DOCKERFILE
    settings = inputs.settings(inputs.KINDS[0], "")["Env"]
    assert [one for one in settings if not one.startswith("PATH=") and one not in DOCKERFILE] == []
