"""What both backends make of a document stays what it was, byte for byte.

A change that is meant: ``GOLDEN=write pytest tests/unit/test_render_golden.py`` writes the files anew, and their diff shows
what services get with it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rendered import ROOT, kubernetes, local, services

from xpyd_operator.api.rule import Target

GOLDEN = ROOT / "tests/golden"
CASES = [
    *((ROOT / "examples/kubernetes" / name, Target.KUBERNETES) for name in ("1p1d.yaml",)),
    *((GOLDEN / name, Target.KUBERNETES) for name in ("everything.yaml", "without-devices.yaml")),
    *((GOLDEN / name, Target.LOCAL) for name in ("local.yaml",)),
]


@pytest.mark.parametrize(("document", "target"), CASES, ids=[path.stem for path, _ in CASES])
def test_what_is_rendered_stays_as_it_is(document: Path, target: Target) -> None:
    made = "".join((kubernetes if target is Target.KUBERNETES else local)(each) for each in services(document, target))
    golden = GOLDEN / f"{document.stem}.rendered.yaml"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(made)
    assert made.splitlines() == golden.read_text().splitlines()
