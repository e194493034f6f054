from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xpyd_operator.cli import interpreter
from xpyd_operator.errors import LocalError


def test_this_interpreter_has_what_engines_need() -> None:
    interpreter.check_python(sys.executable)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "cannot run it"),
        ("#!/bin/sh\nexit 3\n", "is no Python"),
        ("#!/bin/sh\necho vllm xpyd_sidecar\n", "lacks vllm and xpyd_sidecar; install it there"),
    ],
)
def test_others_are_refused_with_a_reason(tmp_path: Path, script: str | None, said: str) -> None:
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o700)
    with pytest.raises(LocalError, match=said):
        interpreter.check_python(str(path))
