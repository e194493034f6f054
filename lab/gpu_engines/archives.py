"""Archives that are packed while they are written, and the wheels they are made of."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

LIMIT_S: Final = 3600.0
PLATFORM: Final = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64")


class Archive:
    """A tar file that ``xz`` packs while it is written; it is there under its name when it is whole."""

    def __init__(self, path: Path, level: int = 6) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._part, self.path = path.with_suffix(".part"), path
        self._out = self._part.open("wb")
        self._xz = subprocess.Popen(["nice", "xz", "-T0", f"-{level}", "-c"], stdin=subprocess.PIPE, stdout=self._out)
        self._tar = tarfile.open(fileobj=self._xz.stdin, mode="w|")  # noqa: SIM115 (closed below)

    def add(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """A file."""
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(data), mode
        self._tar.addfile(entry, io.BytesIO(data))

    def tree(self, folder: Path, under: str, wanted: Callable[[str], bool]) -> None:
        """The files of a folder whose path in it is wanted, in order: the same files make the same archive."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and wanted(name):
                self.add(f"{under}/{name}", path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644)

    def close(self) -> int:
        """Its bytes, once it is whole.

        Raises:
            OSError: ``xz`` failed.
        """
        self._tar.close()
        assert self._xz.stdin is not None
        self._xz.stdin.close()
        code = self._xz.wait(LIMIT_S)
        self._out.close()
        if code:
            raise OSError(f"{self.path}: xz ended with {code}")
        self._part.replace(self.path)
        return self.path.stat().st_size


def run(*command: str | Path) -> None:
    """Run a command to its end. Raises CalledProcessError."""
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S)


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel of the package index, without what it needs; downloaded once."""
    def found() -> list[Path]:
        return sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))

    if not found():
        run(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", *PLATFORM, "-d", folder, f"{name}=={version}")
    return found()[0]
