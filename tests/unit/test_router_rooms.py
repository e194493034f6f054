"""The router's house: what its modules and rooms have to keep to beside the order of the rooms (``.importlinter``)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUTER = ROOT / "sidecar" / "src" / "xpyd_sidecar" / "router"
ROOMS = sorted(path.parent for path in ROUTER.glob("*/__init__.py"))
MAX_LINES = 400


def test_no_module_is_longer_than_can_be_read_at_once() -> None:
    long = {path.name: lines for path in ROUTER.rglob("*.py")
            if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_LINES}
    assert not long


def test_each_room_says_what_belongs_in_it_and_what_does_not() -> None:
    assert len(ROOMS) > 8
    for room in ROOMS:
        words = " ".join((ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or "").split())
        assert "Belongs here:" in words, room.name
        assert re.search(r"Does not belong here:", words), room.name


def test_each_room_and_module_has_its_place_in_the_order() -> None:
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8").partition("contract:router-rooms]")[2]
    order = contract.partition("layers =\n")[2].partition("\n\n")[0].split()
    parts = {path.stem for path in ROUTER.glob("*.py") if path.stem != "__init__"} | {room.name for room in ROOMS}
    assert sorted(order) == sorted(parts)


def test_what_is_pure_is_named_one_by_one_and_exists() -> None:
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8").partition("contract:pure]")[2]
    named = contract.partition("forbidden_modules")[0]
    for name in re.findall(r"xpyd_sidecar\.router\.([a-z_0-9.]+)", named):
        path = ROUTER.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
