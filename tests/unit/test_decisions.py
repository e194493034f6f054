"""Every decision says how it stands, names what supersedes it, and fits on a page; the index is what the pages say."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
decisions = load(ROOT / "scripts/decisions.py")

PAGE_WORDS = 1000
"""What a printed page of small type holds."""


def page(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_index_is_what_the_decisions_say() -> None:
    assert decisions.main(["check"]) == 0


def test_a_decision_fits_on_a_page() -> None:
    words = {path.name: len(path.read_text().split()) for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert {name: number for name, number in words.items() if number > PAGE_WORDS} == {}


def test_a_decision_has_its_sections() -> None:
    """What was decided, and what else could have been."""
    for path in (ROOT / "docs/decisions").glob("[0-9]*.md"):
        text = path.read_text()
        assert "\n## Decision" in text or "\n**Decision.**" in text, path.name
        assert "\n## Alternatives" in text or "\n**Alternatives.**" in text, path.name


@pytest.mark.parametrize(("status", "by", "whole"), [
    ("Status: accepted.", (), False),
    ("Status: accepted", (), False),
    ("Status: accepted; supersedes [0001](0001-a.md).", (), False),
    ("Status: accepted; superseded in part by [0003](0003-c.md): its names.", ("0003",), False),
    ("Status: accepted; superseded in part by [0003](0003-c.md) and [0004](0004-d.md). See [0001](0001-a.md).",
     ("0003", "0004"), False),
    ("Status: superseded by [0004](0004-d.md): nobody asked for it.", ("0004",), True),
])
def test_a_status_names_what_supersedes_the_page_and_nothing_else(
        tmp_path: Path, status: str, by: tuple[str, ...], whole: bool) -> None:
    for name in ("0001-a.md", "0003-c.md", "0004-d.md"):
        page(tmp_path, name, "")
    found = decisions.read(page(tmp_path, "0002-b.md", f"# 0002 How it is\n\n{status}\n\n## Context\n"))
    assert found == ("0002", "0002-b.md", "How it is", by, whole)


@pytest.mark.parametrize(("name", "text", "wrong"), [
    ("2-b.md", "# 2 T\n\nStatus: accepted.\n", "NNNN-title.md"),
    ("0002-b.md", "# 0003 T\n\nStatus: accepted.\n", "# 0002 Title"),
    ("0002-b.md", "# 0002\n\nStatus: accepted.\n", "# 0002 Title"),
    ("0002-b.md", "# 0002 T\n\n## Context\nStatus: accepted.\n", "one line"),
    ("0002-b.md", "# 0002 T\n\nStatus: in force.\n", "one line"),
    ("0002-b.md", "# 0002 T\n\nStatus: accepted in part.\n", "one line"),
    ("0002-b.md", "# 0002 T\n\nStatus: superseded by 0003\n", "one line"),
    ("0002-b.md", "# 0002 T\n\nStatus: accepted.\nStatus: accepted.\n", "one line"),
    ("0002-b.md", "# 0002 T\n\nStatus: superseded by [0003](0003-gone.md)\n", "no later decision"),
    ("0002-b.md", "# 0002 T\n\nStatus: superseded by [0001](0001-a.md)\n", "no later decision"),
    ("0002-b.md", "# 0002 T\n\nStatus: accepted; superseded in part by [0003](0004-d.md)\n", "no later decision"),
])
def test_a_page_without_the_form_is_refused_by_name(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    for other in ("0001-a.md", "0004-d.md"):
        page(tmp_path, other, "")
    path = page(tmp_path, name, text)
    with pytest.raises(ValueError, match=f"^{name}: .*{wrong}"):
        decisions.read(path)


def test_two_decisions_of_one_number_are_refused(tmp_path: Path) -> None:
    for name in ("0001-a.md", "0001-b.md"):
        page(tmp_path, name, "# 0001 T\n\nStatus: accepted.\n")
    with pytest.raises(ValueError, match=r"^0001-a\.md and 0001-b\.md have one number$"):
        decisions.read_all(tmp_path)


def test_the_index_is_written_once_and_noticed_when_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page(tmp_path, "0001-a.md", "# 0001 Old\n\nStatus: superseded by [0002](0002-b.md).\n")
    page(tmp_path, "0002-b.md", "# 0002 New\n\nStatus: accepted.\n")
    assert decisions.main(["check"], tmp_path) == 1
    assert decisions.main(["write"], tmp_path) == 0
    assert decisions.main(["check"], tmp_path) == 0
    rows = (tmp_path / "README.md").read_text().splitlines()[-2:]
    assert rows == ["| 0001 | [Old](0001-a.md) | superseded by [0002](0002-b.md) |",
                    "| 0002 | [New](0002-b.md) | accepted |"]
    page(tmp_path, "0003-c.md", "# 0003 Newest\n\nStatus: accepted.\n")
    assert decisions.main(["check"], tmp_path) == 1
    assert "python scripts/decisions.py write" in capsys.readouterr().out
    assert decisions.main([], tmp_path) == 2
