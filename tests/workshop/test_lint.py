"""``make lint`` says all that is wrong; hooks run its steps and nothing else; files are as .editorconfig says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
lint = load(ROOT / "scripts/lint.py")
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
HOOKS: list[dict[str, Any]] = [hook for repo in CONFIG["repos"] for hook in repo["hooks"]]


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_all_steps_run_and_the_greatest_exit_code_is_the_answer(tmp_path: Path) -> None:
    said: list[str] = []
    steps = {"well": python("print('fine')"), "worse": python("print('one\\ntwo'); exit(3)"), "bad": python("exit(1)"),
             "part": python("print('left out: half of it')"), "none": (str(tmp_path / "no-such-tool"),)}
    assert lint.lint(steps, said.append, root=tmp_path) == 3
    found = {text.split()[1]: text for text in said}
    assert {name: text.split()[0] for name, text in found.items()} == {
        "well": "ok", "worse": "BAD", "bad": "BAD", "part": "ok", "none": "BAD"}
    assert all(re.match(r"\w+ +\w+ +\d+\.\d s\n", text) for text in said)
    assert found["worse"].endswith("    one\n    two\n")
    assert "fine" not in found["well"]
    assert "left out: half of it" in found["part"]
    assert "make setup installs it" in found["none"]


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    said: list[str] = []
    assert lint.lint({"hangs": python("import time; time.sleep(60)")}, said.append, root=tmp_path, limit_s=0.5) == 1
    assert "ended after 0 s" in said[0]


def test_a_step_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        lint.main(["ruff", "style"])
    assert error.value.code == 2
    assert "no such step: style; there are: mypy, ruff" in capsys.readouterr().err


def test_hooks_are_of_this_repository_and_run_steps_of_lint() -> None:
    assert {repo["repo"] for repo in CONFIG["repos"]} == {"local"}
    steps: list[str] = []
    for hook in HOOKS:
        command, script, *names = hook["entry"].split()
        assert (hook["language"], command, script) == ("system", ".venv/bin/python", "scripts/lint.py"), hook["id"]
        assert hook["pass_filenames"] is False, hook["id"]
        steps += names
    assert sorted(steps) == sorted(lint.STEPS)
    assert [hook["id"] for hook in HOOKS if hook.get("stages", CONFIG["default_stages"]) != ["pre-commit"]] == ["mypy"]
    assert set(CONFIG["default_install_hook_types"]) == {"pre-commit", "pre-push"}


def test_hooks_look_at_files_that_there_are() -> None:
    files = tracked()
    for hook in HOOKS:
        if "files" in hook:
            for part in hook["files"].split("|^"):
                pattern = part if part.startswith("^") else f"^{part}"
                assert any(re.search(pattern, name) for name in files), f"{hook['id']}: {pattern}"


def tracked() -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, timeout=60)
    return [name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_files_are_as_editorconfig_says() -> None:
    """What holds for all: UTF-8, LF, a final newline, no blanks at ends of lines, tabs only where there must be some."""
    text = (ROOT / ".editorconfig").read_text()
    for line in ("charset = utf-8", "end_of_line = lf", "insert_final_newline = true", "trim_trailing_whitespace = true"):
        assert line in text
    wrong: list[str] = []
    for name in tracked():
        raw = (ROOT / name).read_bytes()
        if b"\0" in raw:
            continue
        found = raw.decode("utf-8")
        blanks = re.search(r"[ \t]$", found, flags=re.MULTILINE)
        if "\r" in found or blanks:
            wrong.append(f"{name}: ends of lines")
        if found and not found.endswith("\n") and not name.startswith("examples/model/weights/"):
            wrong.append(f"{name}: no final newline")
        if re.search(r"^ *\t", found, flags=re.MULTILINE) and not name.endswith(("Makefile", ".go", ".mod", ".sum")):
            wrong.append(f"{name}: tabs")
    assert wrong == []
