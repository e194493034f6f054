"""A module of the operator can be read at once."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2] / "operator/src/xpyd_operator"
MOST = 300
"""Lines."""


def test_no_module_is_longer_than_can_be_read_at_once() -> None:
    long = {path.name: count for path in ROOT.rglob("*.py") if (count := len(path.read_text().splitlines())) > MOST}
    assert not long


def test_rendering_has_no_scraps() -> None:
    """A file of rendering below 40 lines has several callers."""
    texts = {path: path.read_text() for path in ROOT.rglob("*.py")}
    rendering = [path for path in (ROOT / "render").glob("*.py") if path.stem != "__init__"]
    scraps = [path for path in rendering if len(texts[path].splitlines()) < 40]
    assert scraps, "the rule has something to judge"
    for path in scraps:
        callers = [other for other, text in texts.items() if f"xpyd_operator.render.{path.stem} import" in text]
        assert len(callers) > 1, path.name
