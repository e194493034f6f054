"""docs/protocols/membership.md: every MUST stands with a test, and every test that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/protocols/membership.md"
NAMED = re.compile(r"`(test_\w+)`")


def rules() -> list[str]:
    """Numbered rules of the sections up to the last one with rules, each as one text."""
    body = PAGE.read_text().partition("## 10.")[0]
    return re.findall(r"^\d+\. .*(?:\n +.*)*", body, flags=re.MULTILINE)


def known() -> set[str]:
    found = (re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE)
             for path in ROOT.glob("tests/[us]*/test_*.py"))
    return {name for names in found for name in names}


def test_every_must_has_a_test() -> None:
    musts = [rule for rule in rules() if "MUST" in rule]
    assert len(musts) > 40
    assert [rule for rule in musts if not NAMED.search(rule)] == []


def test_every_test_that_is_named_exists() -> None:
    named = set(NAMED.findall(PAGE.read_text()))
    assert len(named) > 60
    assert sorted(named - known()) == []


@pytest.mark.parametrize("sentence", ["MUST NOT evict", "MUST use CURVE"])
def test_rules_are_found_whole(sentence: str) -> None:
    assert any(sentence in rule for rule in rules())
