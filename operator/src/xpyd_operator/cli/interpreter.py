"""The interpreter that runs engines and sidecars: this one, or another that has vLLM."""

from __future__ import annotations

import subprocess
from typing import Any

from xpyd_operator import versions
from xpyd_operator.errors import LocalError

NEEDED = ("vllm", "xpyd_sidecar")
_PROBE = """
import importlib.util, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name)]
if missing:
    print("lacks", *missing)
else:
    import xpyd_sidecar
    print("version", xpyd_sidecar.__version__)
"""
TIMEOUT_S = 30.0


def add_python(parser: Any) -> None:
    """The option --python."""
    parser.add_argument("--python", metavar="FILE", help="interpreter of engines and sidecars (default: that of xpyd)")


def check_python(python: str) -> None:
    """Whether engines and sidecars can run with it.

    Raises:
        LocalError: it cannot be run, lacks a package, or has an xpyd-sidecar of another version.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *NEEDED], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalError(f"--python {python}: cannot run it: {error}") from None
    if done.returncode:
        raise LocalError(f"--python {python}: is no Python: {done.stderr.strip()[-200:]}")
    word, *found = done.stdout.split()[:3] or ["nothing"]
    if word == "lacks":
        raise LocalError(f"--python {python}: lacks {' and '.join(found)}; install it there or name another one")
    if word != "version" or len(found) != 1:
        raise LocalError(f"--python {python}: is no Python: it says {done.stdout.strip()[-200:]!r}")
    versions.check(found[0], f"--python {python}: ")
