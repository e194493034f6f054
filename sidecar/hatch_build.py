"""Compiles the router's shortcuts and the links' loops while the package is built (``pip install``, ``pip wheel``), beside
their source.

Where that fails (no compiler, no headers of Python) the package is built without, and plain Python's way is taken. The
modules keep to Python's stable interface, so the wheel stays one for every Python; on a machine of another kind they are
not loaded.

    python sidecar/hatch_build.py      compile in place; exit code 1 says that it cannot be done here
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without the build's tools
    BuildHookInterface = object

PACKAGE = Path("src", "xpyd_sidecar")
RELAY = PACKAGE / "router" / "relay"
SOURCES = (RELAY / "_fast.c", RELAY / "_answer.c", PACKAGE / "transport" / "_moves.c",
           PACKAGE / "transport" / "_stripes.c")
NEEDED = ("-Wall", "-Wextra", "-Wno-cast-function-type", "-fPIC", "-fvisibility=hidden", "-shared", "-D_GNU_SOURCE",
          "-pthread")
HARDENED = ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3", "-fstack-protector-strong", "-Wl,-z,relro,-z,now")
"""A fault in these files ends the process instead of becoming an attack. Fortified functions need an optimizing compiler.
Where a compiler has not all of these, nothing is compiled, and plain Python's way is taken: nothing is built less safe in
silence."""
FLAGS = (*NEEDED, "-O2", *HARDENED)
LIMIT_S = 120


def made_of(source: Path) -> Path:
    """What a source is compiled to."""
    return source.with_suffix(".abi3.so")


def compile_in(root: Path, flags: Sequence[str] = FLAGS) -> str:
    """Compile all; what went wrong, or nothing."""
    return "; ".join(wrong for source in SOURCES if (wrong := compile_one(root, source, flags)))


def compile_one(root: Path, source: Path, flags: Sequence[str] = FLAGS) -> str:
    """Compile one; what went wrong, or nothing. What was there before stays until the new one is whole, or goes.

    ``flags``: the compiler's; names of object files among them are linked into what is made.
    """
    made = root / made_of(source)
    part = made.with_suffix(f".{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, *flags, f"-I{sysconfig.get_path('include')}", "-o", str(part), str(root / source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    else:
        wrong = done.stderr.strip()[-2000:] or f"exit code {done.returncode}" if done.returncode else ""
    if wrong:
        part.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
    else:
        part.chmod(0o755)
        part.rename(made)
    return wrong


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (hatchling's name)
        """Before the files of the wheel are gathered."""
        for source in SOURCES:
            wrong = compile_one(Path(self.root), source)
            if wrong:
                self.app.display_warning(f"{source} was not compiled: {wrong}")
            else:
                build_data["artifacts"].append(f"/{made_of(source)}")


if __name__ == "__main__":
    sys.exit(compile_in(Path(__file__).parent) or 0)
