"""A run in CI has every extension; elsewhere their tests are left out where nothing was compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import compiled
import pytest
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.unsanitized


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with nothing compiled."""
    tree = tmp_path_factory.mktemp("plain")
    shutil.copytree(ROOT / "sidecar/src", tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tree / "src"


def run(package: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The unit tests' settings, and one test file that is done at once."""
    paths = f"operator/src {package} tests/support lab/cluster e2e/support"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"pythonpath={paths}",
               "tests/sockets/test_http_ids.py"]
    left = {name: value for name, value in os.environ.items() if name not in {"CI", "XPYD_PLAIN"}}
    return subprocess.run(command, cwd=ROOT, env=left | {"PYTHONPATH": str(package)} | env, capture_output=True, text=True,
                          check=False, timeout=60)


def test_in_ci_a_run_without_extensions_fails_and_names_them(without: Path) -> None:
    done = run(without, CI="true")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    for source in load(ROOT / "sidecar/hatch_build.py").SOURCES:
        assert source.name in done.stderr
    assert "python sidecar/hatch_build.py" in done.stderr


def test_elsewhere_and_where_python_is_asked_for_it_goes_on(without: Path) -> None:
    for env in ({}, {"CI": "true", "XPYD_PLAIN": "1"}):
        done = run(without, **env)
        assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


@pytest.mark.skipif(bool(compiled.missing()), reason="nothing was compiled here")
def test_in_ci_a_run_with_all_of_them_goes_on() -> None:
    done = run(ROOT / "sidecar/src", CI="true")
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


def test_an_extension_of_another_revision_counts_as_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled.TAKEN, "_moves", lambda: False)
    assert any(name.endswith("transport/_moves.c") for name in compiled.missing())


def test_every_extension_is_asked_for() -> None:
    assert {source.stem for source in load(ROOT / "sidecar/hatch_build.py").SOURCES} == set(compiled.TAKEN)
