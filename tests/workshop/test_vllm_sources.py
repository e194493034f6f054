"""The sources of a vLLM that is not installed: what is taken of a wheel, and that a second clone fetches nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
tool = load(ROOT / "scripts/vllm_sources.py")


def wheel(folder: Path, *names: str) -> Path:
    made = folder / "vllm-9.1-cp38-abi3-x86_64.whl"
    with zipfile.ZipFile(made, "w") as packed:
        for name in names:
            packed.writestr(name, "x = 1\n")
    return made


def test_only_sources_and_what_names_the_version_stay(tmp_path: Path) -> None:
    made = wheel(tmp_path, "vllm/__init__.py", "vllm/_C.abi3.so", "vllm/a/b.py", "vllm/a/c.json",
                 "vllm-9.1.dist-info/METADATA", "vllm-9.1.dist-info/RECORD", "vllm-9.1.dist-info/entry_points.txt")
    assert tool.unpack(made, tmp_path / "site") == 2
    site = tmp_path / "site"
    assert sorted(path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()) == [
        "vllm-9.1.dist-info/METADATA", "vllm-9.1.dist-info/entry_points.txt", "vllm/__init__.py", "vllm/a/b.py"]


@pytest.mark.parametrize("name", ["../out.py", "vllm/../../out.py", "/tmp/out.py"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads elsewhere"):
        tool.unpack(wheel(tmp_path, name), tmp_path / "in" / "site")
    assert not list(tmp_path.rglob("out.py"))


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each fetch that was made, of a wheel of three files."""
    calls: list[Path] = []

    def fetch(pins: Path, folder: Path) -> Any:
        calls.append(pins)
        return wheel(folder, *(f"vllm/{n}.py" for n in range(3)))

    monkeypatch.setattr(tool, "fetch", fetch)
    monkeypatch.setattr(tool, "LEAST", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_what_is_kept_is_fetched_once_for_each_list_of_pins(tmp_path: Path, fetched: list[Path]) -> None:
    pins = [tmp_path / f"{n}.txt" for n in range(3)]
    for n, one in enumerate(pins):
        one.write_text(f"vllm=={n}\n")
        for clone in ("a", "b"):
            tool.main(one, tmp_path / clone)
            assert len(list((tmp_path / clone / "site" / "vllm").glob("*.py"))) == 3
    assert fetched == pins
    assert len(list((tmp_path / "cache/xpyd/vllm").iterdir())) == tool.KEPT


@pytest.mark.usefixtures("fetched")
def test_a_wheel_that_is_no_vllm_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "LEAST", 4)
    (tmp_path / "pins.txt").write_text("vllm==1\n")
    with pytest.raises(RuntimeError, match="3 Python files are no vLLM"):
        tool.main(tmp_path / "pins.txt", tmp_path / "clone")
    assert list((tmp_path / "cache/xpyd/vllm").iterdir()) == []
    assert not (tmp_path / "clone").exists()
