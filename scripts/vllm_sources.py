"""The Python sources of a version of vLLM that is not installed, without what is compiled and without its dependencies.

    python scripts/vllm_sources.py requirements/vllm-next.txt FOLDER

FOLDER/site is then a place for PYTHONPATH: a link to what is kept in ``~/.cache/xpyd/vllm``, so that a fresh clone fetches
nothing. pip fetches the wheel of this platform by its pinned hash (0.34 GB), and 50 MB of it stay. What is compiled is for
CUDA and could not be loaded here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FETCH_S = 900.0
SOURCES = (".py", ".dist-info/METADATA", ".dist-info/entry_points.txt")
LEAST = 1000
"""Python files that a vLLM has; fewer are no vLLM."""
KEPT = 2
"""Versions in the cache, the newest ones."""


def unpack(wheel: Path, site: Path) -> int:
    """Take the sources out of a wheel; how many Python files they are.

    Raises:
        ValueError: a name in it leads out of the folder.
    """
    found = 0
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if not name.endswith(SOURCES):
                continue
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{wheel.name}: {name} leads elsewhere")
            packed.extract(name, site)
            found += name.endswith(".py")
    return found


def fetch(pins: Path, folder: Path) -> Path:
    """The one wheel that a file of pins names.

    Raises:
        RuntimeError: pip does not get it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-cache-dir", "--no-deps",
         "--only-binary=:all:", "--require-hashes", "-r", str(pins), "-d", str(folder)], timeout=FETCH_S, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip download -r {pins}: status {done.returncode}, {len(wheels)} wheels")
    return wheels[0]


def kept(pins: Path, cache: Path) -> Path:
    """The folder of the sources that ``pins`` names, which is fetched where the cache lacks it.

    Raises:
        RuntimeError: it cannot be had, or is no vLLM.
    """
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / hashlib.sha256(pins.read_bytes()).hexdigest()[:16]
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=cache, prefix="part-") as scratch:
            work = Path(scratch)
            found = unpack(fetch(pins, work), work / "site")
            if found < LEAST:
                raise RuntimeError(f"{pins}: {found} Python files are no vLLM")
            (work / "site").rename(place)
    place.touch()
    for old in sorted((one for one in cache.iterdir() if not one.name.startswith("part-")),
                      key=lambda one: one.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old)
    return place


def main(pins: Path, folder: Path) -> None:
    """Have FOLDER/site lead to the sources."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xpyd" / "vllm"
    place = kept(pins, cache)
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "site"
    link.unlink(missing_ok=True)
    link.symlink_to(place)
    print(f"{link} leads to {place}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
