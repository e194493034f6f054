"""Whether this package and the sidecar package beside it are of one version, and how the sidecar package was built."""

from __future__ import annotations

import re
import subprocess
import sys

import xpyd_sidecar
from xpyd_operator import __version__
from xpyd_operator.errors import LocalError

TIMEOUT_S = 30.0
_SAID = re.compile(r"xpyd-sidecar (\S+) \((.+)\)")


def check(sidecar: str | None = None, where: str = "") -> None:
    """Refuse a sidecar package of another version than this one's.

    ``sidecar``: its version (default: that of the package beside this one). ``where``: what the message begins with.

    Raises:
        LocalError: the versions differ; the message names both packages and what to install.
    """
    found = getattr(xpyd_sidecar, "__version__", "unknown") if sidecar is None else sidecar
    if found != __version__:
        raise LocalError(f"{where}xpyd-operator {__version__} and xpyd-sidecar {found} do not fit: they share a contract; "
                         f"install both of one version, for example: pip install xpyd=={__version__}")


def describe(python: str = sys.executable) -> str:
    """What ``xpyd --version`` prints, such as ``xpyd 0.1.0 (compiled)``.

    ``python``: the interpreter whose sidecar package is asked, in a process of its own, within `TIMEOUT_S`.
    """
    try:
        done = subprocess.run([python, "-m", "xpyd_sidecar", "--version"], capture_output=True, text=True, check=False,
                              timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
        said = _SAID.search(done.stdout) if done.returncode == 0 else None
        why = done.stderr.strip()[-200:] or f"exit code {done.returncode}"
        how = said[2] if said else f"xpyd-sidecar does not run: {why}"
    except (OSError, subprocess.TimeoutExpired) as error:
        how = f"xpyd-sidecar does not run: {error}"
    return f"xpyd {__version__} ({how})"
