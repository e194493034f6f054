from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_operator import __version__, versions
from xpyd_operator.cli import interpreter
from xpyd_operator.errors import LocalError


def test_this_interpreter_has_what_engines_need() -> None:
    interpreter.check_python(sys.executable)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "cannot run it"),
        ("#!/bin/sh\nexit 3\n", "is no Python"),
        ("#!/bin/sh\necho lacks vllm xpyd_sidecar\n", "lacks vllm and xpyd_sidecar; install it there"),
        ("#!/bin/sh\necho hello\n", "is no Python: it says 'hello'"),
        ("#!/bin/sh\n", "is no Python: it says ''"),
        ("#!/bin/sh\necho version 99.0.0\n", r"--python .*: xpyd-operator .* and xpyd-sidecar 99\.0\.0 do not fit"),
    ],
)
def test_others_are_refused_with_a_reason(tmp_path: Path, script: str | None, said: str) -> None:
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o700)
    with pytest.raises(LocalError, match=said):
        interpreter.check_python(str(path))


def test_the_version_says_how_the_sidecar_package_was_built_or_why_it_does_not_run() -> None:
    assert re.fullmatch(r"xpyd \S+ \((compiled|pure Python: .+)\)", versions.describe())
    assert versions.describe("/no/such/python").startswith(f"xpyd {__version__} (xpyd-sidecar does not run: ")


@pytest.mark.parametrize(("hidden", "says"), [
    ("numpy", r"xpyd-sidecar \S+ \(compiled\)"),
    ("msgspec", ""),
])
def test_where_no_engine_can_run_the_version_leaves_its_parts_out(tmp_path: Path, hidden: str, says: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{hidden!r}] = None\n")
    done = subprocess.run([sys.executable, "-m", "xpyd_sidecar", "--version"], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert re.fullmatch(says, done.stdout.strip()), (done.stdout, done.stderr)
    assert (done.returncode == 0) is bool(says)
