from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
preflight = load(ROOT / "scripts/preflight.py")


@pytest.fixture(autouse=True)
def _built(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XPYD_PLAIN", "CC"):
        monkeypatch.delenv(name, raising=False)


def test_a_compiler_and_headers_that_are_missing_are_named_by_their_packages(monkeypatch: pytest.MonkeyPatch,
                                                                             tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    found = preflight.missing_build_tools()
    assert found[:2] == ["gcc", "libc6-dev"]
    assert found[2].startswith("python3.")
    (tmp_path / "Python.h").touch()
    assert preflight.missing_build_tools() == ["gcc", "libc6-dev"]


def test_who_asks_for_python_alone_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XPYD_PLAIN", "1")
    assert preflight.missing_build_tools() == []


def test_without_a_compiler_the_machine_is_not_fit_and_both_ways_out_are_said(monkeypatch: pytest.MonkeyPatch,
                                                                              tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(preflight, "install", lambda _: "install them: …")
    (found,) = (fault for fault in preflight.faults(tmp_path / "venv") if "compiled parts" in fault)
    assert "gcc, libc6-dev" in found
    assert "XPYD_PLAIN=1" in found
