"""Compiles the router's shortcuts and the links' loops while the package is built (``pip install``, ``pip wheel``).

A wheel gets what was compiled in a folder of its own: nothing that lies beside the sources is used, changed or removed.
An editable install compiles beside the sources, where the checkout runs from, and replaces a part only by a whole one.
Where the compiler fails the build fails. The variables that it knows:

    XPYD_PLAIN=1             build without compiled parts, in Python alone (slow, and without the link ``tcp``)
    XPYD_WHEEL_PLATFORM=    platform of the wheel's tag, where CC compiles for another one (default: this machine's)
    CC=                     the compiler, with words for it (default: cc)
    XPYD_PYTHON_INCLUDE=    folder of Python.h (default: that of this Python)

Compiled parts keep to Python's stable interface, so one wheel (cp311-abi3) serves every Python from 3.11 on.

    python sidecar/hatch_build.py      compile in place; exit code 1 says that it cannot be done here, and why
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
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
Where a compiler has not all of these the build fails: nothing is built less safe in silence."""
FLAGS = (*NEEDED, "-O2", *HARDENED)
LIMIT_S = 600
"""A cross compiler makes its C library at its first use."""
HELP = ("A compiler and Python's headers are needed (Debian: apt-get install gcc libc6-dev python3-dev). XPYD_PLAIN=1 "
        "builds a package without compiled parts, which is slow and has no link tcp.")


def made_of(source: Path) -> Path:
    """What a source is compiled to."""
    return source.with_suffix(".abi3.so")


def compile_in(root: Path, flags: Sequence[str] = FLAGS) -> str:
    """Compile all beside their sources; what went wrong, or nothing."""
    return "; ".join(wrong for source in SOURCES if (wrong := compile_one(root, source, flags)))


def compile_one(root: Path, source: Path, flags: Sequence[str] = FLAGS, into: Path | None = None) -> str:
    """Compile one source; what went wrong, or nothing. What was there before stays where the compiler fails.

    ``flags``: the compiler's; names of object files among them are linked into what is made. ``into``: the folder for what
    is made, with the same path below it as the source has below ``root`` (default: ``root``).
    """
    made = (into or root) / made_of(source)
    made.parent.mkdir(parents=True, exist_ok=True)
    part = made.with_suffix(f".{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    include = os.environ.get("XPYD_PYTHON_INCLUDE") or sysconfig.get_path("include")
    command = [*compiler, *flags, f"-I{include}", "-o", str(part), str(root / source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    else:
        wrong = done.stderr.strip()[-2000:] or f"exit code {done.returncode}" if done.returncode else ""
    if wrong:
        part.unlink(missing_ok=True)
    else:
        part.chmod(0o755)
        part.rename(made)
    return wrong


def tag_of(platform: str) -> str:
    """The tag of a wheel with compiled parts: ``platform`` is its last part, such as manylinux_2_28_x86_64."""
    return f"cp311-abi3-{platform.replace('-', '_').replace('.', '_')}"


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls."""

    _made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the files of the wheel are gathered.

        Raises:
            RuntimeError: a source was not compiled; the message has the compiler's words and what to do.
        """
        if os.environ.get("XPYD_PLAIN") == "1":
            self.app.display_warning("XPYD_PLAIN=1: built without compiled parts, so it is slow and has no link tcp")
            return
        root = Path(self.root)
        if version == "editable":
            self._compile(root, root)
            return
        self._made = tempfile.TemporaryDirectory(prefix="xpyd-compiled-")
        into = Path(self._made.name)
        self._compile(root, into)
        for source in SOURCES:
            made = made_of(source)
            build_data["force_include"][str(into / made)] = made.relative_to("src").as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = tag_of(os.environ.get("XPYD_WHEEL_PLATFORM") or sysconfig.get_platform())

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 (hatchling's)
        """After the wheel was written."""
        if self._made is not None:
            self._made.cleanup()

    def _compile(self, root: Path, into: Path) -> None:
        for source in SOURCES:
            if wrong := compile_one(root, source, into=into):
                raise RuntimeError(f"{source} was not compiled: {wrong}\n{HELP}")


if __name__ == "__main__":
    sys.exit(compile_in(Path(__file__).parent) or 0)
