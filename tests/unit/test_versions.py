from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import xpyd_sidecar
from xpyd_operator import __version__, versions
from xpyd_operator.cli import main
from xpyd_operator.errors import LocalError
from xpyd_sidecar.process import parts


def test_packages_of_one_version_fit() -> None:
    assert xpyd_sidecar.__version__ == __version__
    versions.check()


def test_another_version_is_refused_with_both_names_and_what_to_install(monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(xpyd_sidecar, "__version__", "0.9.9")
    with pytest.raises(LocalError, match=rf"xpyd-operator {__version__} and xpyd-sidecar 0\.9\.9 do not fit.*xpyd=="):
        versions.check()
    assert main.main(["check", "-f", "none.yaml"]) == 2
    assert "xpyd-sidecar 0.9.9" in capsys.readouterr().err


def test_a_sidecar_package_without_a_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(xpyd_sidecar, "__version__")
    with pytest.raises(LocalError, match="xpyd-sidecar unknown"):
        versions.check()


@pytest.mark.parametrize(("compiled", "said"), [
    ((True, True, True), "compiled"),
    ((False, False, False), "pure Python: slow, and without the link tcp; install a wheel"),
    ((True, True, False), "partly compiled: slow, without the link tcp; install a wheel")])
def test_the_parts_that_are_taken_are_said(monkeypatch: pytest.MonkeyPatch, compiled: tuple[bool, ...], said: str) -> None:
    found = {name: SimpleNamespace(COMPILED=one) for name, one in zip(parts.PARTS, compiled, strict=True)}
    monkeypatch.setattr(parts.importlib, "import_module", found.__getitem__)
    monkeypatch.delenv("XPYD_PLAIN", raising=False)
    assert parts.describe().startswith(said)
    if not all(compiled):
        monkeypatch.setenv("XPYD_PLAIN", "1")
        assert "XPYD_PLAIN=1 is set" in parts.describe()


def test_the_version_is_said_even_where_the_sidecar_package_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "exit code 3" in versions.describe(_failing(monkeypatch, 3, ""))
    assert versions.describe(_failing(monkeypatch, 0, "xpyd-sidecar 1 (compiled)")) == f"xpyd {__version__} (compiled)"


def _failing(monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> str:
    done = subprocess.CompletedProcess([], code, words, "")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: done)
    return sys.executable
