"""A class name stands for one thing in both packages; the list of those that do not can only shrink."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("class_names", ROOT / "scripts" / "class_names.py")
assert spec is not None
assert spec.loader is not None
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)


def test_no_new_name_stands_for_several_classes_and_the_known_ones_do() -> None:
    found = names.shared(ROOT)
    assert not {name: paths for name, paths in found.items() if name not in names.KNOWN}, "give the new one another name"
    assert not names.KNOWN - found.keys(), "these stand for one thing now: take them out of scripts/class_names.py"


def test_each_name_of_the_router_stands_for_one_thing() -> None:
    router = ROOT / "sidecar" / "src" / "xpyd_sidecar" / "router"
    assert not [name for name, paths in names.shared(ROOT).items() if any(router in path.parents for path in paths)]


def test_classes_inside_others_are_found(tmp_path: Path) -> None:
    texts = {"operator/src": "class A:\n    class B: ...\n", "sidecar/src": "def f():\n    class B: ...\n"}
    for package, text in texts.items():
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "m.py").write_text(text, encoding="utf-8")
    assert list(names.shared(tmp_path)) == ["B"]
    assert [path.name for path in names.shared(tmp_path)["B"]] == ["m.py", "m.py"]
