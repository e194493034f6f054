"""The interpreter that runs engines and sidecars: this one, or another that has vLLM."""

from __future__ import annotations

import subprocess
from typing import Any

from xpyd_operator.errors import LocalError

NEEDED = ("vllm", "xpyd_sidecar")
_PROBE = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))"
TIMEOUT_S = 30.0


def add_python(parser: Any) -> None:
    """The option --python."""
    parser.add_argument("--python", metavar="FILE", help="interpreter of engines and sidecars (default: that of xpyd)")


def check_python(python: str) -> None:
    """Whether engines and sidecars can run with it.

    Raises:
        LocalError: it cannot be run, or lacks a package.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *NEEDED], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"--python {python}: cannot run it: {error}") from None
    if done.returncode:
        raise LocalError(f"--python {python}: is no Python: {done.stderr.strip()[-200:]}")
    if missing := done.stdout.split():
        raise LocalError(f"--python {python}: lacks {' and '.join(missing)}; install it there or name another one")
