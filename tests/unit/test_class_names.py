"""A class name stands for one thing in both packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("class_names", ROOT / "scripts" / "class_names.py")
assert spec is not None
assert spec.loader is not None
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)


def test_each_name_stands_for_one_class() -> None:
    assert not names.shared(ROOT)


def test_classes_inside_others_are_found(tmp_path: Path) -> None:
    texts = {"operator/src": "class A:\n    class B: ...\n", "sidecar/src": "def f():\n    class B: ...\n"}
    for package, text in texts.items():
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "m.py").write_text(text, encoding="utf-8")
    assert list(names.shared(tmp_path)) == ["B"]
    assert [path.name for path in names.shared(tmp_path)["B"]] == ["m.py", "m.py"]
