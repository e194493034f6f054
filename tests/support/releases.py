"""Other releases of xpyd beside this tree: the one before, from git, and artificial next ones.

    old = before()                      the tree of the commit BEFORE
    new = following("wire")             this tree, with other versions of the KV plane
    old.path_for_python                 for PYTHONPATH: an `xpyd`, agent, router or engine of that release
    old.images()                        its images, built by its own builder (root)

Trees lie in the cache (``~/.cache/xpyd/releases``), named by what is in them, and are made once; what is written in C is
compiled in place. A clone without history asks its origin for the one commit; where that has no answer, `Missing` says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "34d0fc9b22aea006a7b40ffc4548fb9ff8c723a2"
"""The release before: the oldest state from which upgrades are promised. Whoever makes a release moves it there."""
TREE = ("sidecar", "operator", "images", "requirements", "manifests", "crds", "LICENSE", "README.md")
"""What of this tree a next release is made of."""
KEPT = 4
"""Trees in the cache, the newest ones."""
GIT_S, COMPILE_S, BUILD_S = 30.0, 240.0, 1200.0
Change = Literal["wire", "fingerprint"]
CHANGES: dict[Change, tuple[tuple[str, str], ...]] = {
    "wire": (("sidecar/src/xpyd_sidecar/kv/messages.py", r"^WIRE_VERSION: Final = (\d+)$"),
             ("sidecar/src/xpyd_sidecar/kv/wire.py", r"^WIRE_VERSION: Final = (\d+)$")),
    "fingerprint": (("sidecar/src/xpyd_sidecar/contract/fingerprint.py", r"xpyd fingerprint (\d+)"),),
}
"""By what changes: in which file, and the number that is one more in the next release. Each is there exactly once."""


class Missing(Exception):
    """The release before cannot be had here; the message says what to do."""


class Release(NamedTuple):
    """One release, as a tree on this machine."""

    name: str
    folder: Path

    @property
    def path_for_python(self) -> str:
        """Both of its packages, before those that are installed."""
        return os.pathsep.join(str(self.folder / each / "src") for each in ("sidecar", "operator"))

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of this process with it in place of this tree's packages."""
        path = (self.path_for_python, more.get("PYTHONPATH"))
        return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, path))}

    def run(self, program: str, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> Any:
        """What a Python program of a few lines says of it, as JSON. Raises AssertionError with what went wrong."""
        done = subprocess.run([sys.executable, "-c", program, *arguments], env=self.environment(), input=stdin, text=True,
                              capture_output=True, timeout=timeout_s, check=False, cwd=self.folder)
        assert done.returncode == 0, f"{self.name}: {done.stderr[-3000:]}"
        return json.loads(done.stdout)

    def images(self) -> dict[str, Any]:
        """Name, archive and size of each of its images by kind; built where they are not in the cache."""
        done = subprocess.run([sys.executable, "-m", "images", "build", "operator", "sidecar"], cwd=self.folder, text=True,
                              env=self.environment(), capture_output=True, timeout=BUILD_S, check=False)
        assert done.returncode == 0, f"{self.name}: {done.stderr[-3000:]}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def before() -> Release:
    """The release before this one.

    Raises:
        Missing: this clone has no such commit, and cannot get it.
    """
    _have(BEFORE)

    def fill(folder: Path) -> None:
        packed = _git("archive", "--format=tar", BEFORE)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")

    return _made(f"before-{BEFORE[:12]}", fill)


def following(*changes: Change) -> Release:
    """This tree as a next release: the numbers of ``changes`` are one more."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *TREE).decode().split("\0")
    files = {name: (ROOT / name).read_bytes() for name in sorted(set(listed)) if name and (ROOT / name).is_file()}
    for change in changes:
        for name, pattern in CHANGES[change]:
            files[name] = raised(name, files[name].decode(), pattern).encode()
    total = hashlib.sha256()
    for name, content in files.items():
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())

    def fill(folder: Path) -> None:
        for name, content in files.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            shutil.copymode(ROOT / name, place)

    return _made(f"next-{'-'.join(changes) or 'same'}-{total.hexdigest()[:12]}", fill)


def raised(name: str, text: str, pattern: str) -> str:
    """A file with the one number that ``pattern`` finds in it raised by one."""
    found = list(re.finditer(pattern, text, re.MULTILINE))
    assert len(found) == 1, f"{name} has {len(found)} of {pattern}, not one: see CHANGES in {Path(__file__).name}"
    (number,) = found
    return f"{text[:number.start(1)]}{int(number[1]) + 1}{text[number.end(1):]}"


def _have(commit: str) -> None:
    """Have a commit, from the origin if this clone lacks it."""
    look = ("git", "cat-file", "-e", f"{commit}^{{commit}}")
    if subprocess.run(look, cwd=ROOT, capture_output=True, check=False, timeout=GIT_S).returncode == 0:
        return
    try:
        _git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", commit)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"the release before, {commit[:12]}, is not in this clone, and its origin does not give it "
                      f"(git fetch --unshallow brings it): {error}") from None


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False, timeout=GIT_S,
                          stdin=subprocess.DEVNULL, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    assert done.returncode == 0, f"git {arguments[0]}: {done.stderr.decode(errors='replace')[-500:]}"
    return done.stdout


def _made(name: str, fill: Callable[[Path], None]) -> Release:
    """The tree of this name, made where it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xpyd" / "releases"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with _locked(cache):
        if not folder.exists():
            work = Path(tempfile.mkdtemp(prefix="part-", dir=cache))
            try:
                fill(work)
                subprocess.run([sys.executable, str(work / "sidecar/hatch_build.py")], cwd=work, capture_output=True,
                               timeout=COMPILE_S, check=False)  # without a compiler the package works as well
                work.chmod(0o755)
                work.rename(folder)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
        folder.touch()
        trees = sorted((each for each in cache.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime)
        for old in trees[:-KEPT]:
            shutil.rmtree(old)
    return Release(name, folder)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One at a time makes trees; the wait ends with the test's own deadline."""
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
