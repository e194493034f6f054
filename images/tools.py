"""What every step stands on: running commands with a deadline, installing missing tools, the cache folder and its lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
STEP_S = 600.0
"""Deadline of one command, and of waiting for another build on this machine."""
LAST_LINES = 15
"""How much of a failed command's output is shown."""


class ImageError(Exception):
    """An image cannot be built or pushed. The message names the step and what it said."""


def say(text: str) -> None:
    """Progress, on standard error: standard output is for results."""
    sys.stderr.write(f"images: {text}\n")
    sys.stderr.flush()


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, folder: Path | None = None,
        timeout_s: float = STEP_S) -> str:
    """Run a command; what it wrote to standard output.

    Raises:
        ImageError: it failed, ran past its deadline or does not exist; with the last lines it wrote.
    """
    shown = " ".join(command[:2] if command[0] != sys.executable else command[1:4])
    try:
        done = subprocess.run(list(command), env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, text=True,
                              capture_output=True, timeout=timeout_s, check=False, cwd=folder)
    except subprocess.TimeoutExpired:
        raise ImageError(f"{shown}: not done after {timeout_s:.0f} s") from None
    except OSError as error:
        raise ImageError(f"{shown}: {error.strerror}") from None
    if done.returncode:
        words = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-LAST_LINES:])
        raise ImageError(f"{shown}: exit code {done.returncode}\n{words}")
    return done.stdout


def need(program: str, *packages: str) -> None:
    """Have a program, or a file, from the distribution if it is missing.

    Raises:
        ImageError: it is missing and cannot be installed from here.
    """
    if Path(program).exists() if program.startswith("/") else shutil.which(program) is not None:
        return
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ImageError(f"{program} is missing; install it: apt-get install {' '.join(packages)}")
    say(f"installing {' '.join(packages)} from the distribution")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], env=quiet)
    run(command, env=quiet)


def default_cache() -> Path:
    """Where archives, layers and downloads are kept between builds."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "xpyd" / "images"


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Builds in one cache take turns.

    Raises:
        ImageError: another one holds it past the deadline.
    """
    cache.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + STEP_S
    with (cache / "lock").open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ImageError(f"{cache}: another build has held it for {STEP_S:.0f} s") from None
                if not told:
                    say(f"waiting for another build in {cache}")
                    told = True
                time.sleep(0.2)
                continue
            yield
            return
