"""What travels to a bare GPU machine, as archives to be unpacked there: ``python -m lab.gpu_engines.pack WHAT TO``.

    site       vLLM and what it imports, in two transfers: TO/a/*.tar.xz (Python), TO/b/*.tar.xz (libraries, models). Once:
               it asks the package index, and takes minutes and 3 GB of disk
    product    the two packages, both drivers and checks of a checkout (--checkout): TO/xpyd.tar.xz. Seconds
    checks     what ``lab.gpu`` imports beside torch, for --cuda 12 or 13 and --python: TO/checks.tar.xz. Seconds
    nixl       NIXL, to run NixlConnector beside: TO/nixl.tar.xz

All is for CPython 3.12 on x86-64, whatever Python makes it; only ``checks`` may be for another. There: ``tar -xJf`` of each
with ``-C /tmp/gpu``, then PYTHONPATH=/tmp/gpu/product:/tmp/gpu/site:/tmp/gpu/checks.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lab.gpu_engines import cubins, site
from lab.gpu_engines.archives import Archive, run, wheel

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / ".cache/gpu-engines"
LOCK: Final = ROOT / "requirements/gpu-engines.txt"
PYTHON: Final = "3.12"
CUDAS: Final = ("12", "13")
"""What torch may be made for there, by its first number."""
MODELS: Final = {"llama": "tiny-llama-1", "gemma": "tiny-gemma-3", "granite": "tiny-granite"}
DRIVERS: Final = ("lab/gpu", "lab/gpu_engines")
CHECKS: Final = ("lab/__init__.py", "tests/component/test_device_*.py", "tests/component/conftest.py",
                 "tests/conftest.py", "tests/support/*.py", "pyproject.toml")
"""Of a checkout: what a driver may be asked to run besides, and what that and the checks of a CPU import."""


def packages() -> Path:
    """What vLLM and xpyd import, installed by hash into a folder; once."""
    folder, done = CACHE / "packages", CACHE / "packages.lock"
    if not done.exists() or done.read_bytes() != LOCK.read_bytes():
        shutil.rmtree(folder, ignore_errors=True)
        install(folder, PYTHON, LOCK)
        shutil.copy(LOCK, done)
    return folder


def install(folder: Path, python: str, *locks: Path) -> None:
    """Install what locks pin, by hash, for a Python of Linux on x86-64."""
    run(Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--no-deps", "--require-hashes",
        "--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--python", sys.executable,
        "--target", folder, *(part for lock in locks for part in ("-r", lock)))


def pack_site(to: Path) -> list[Path]:
    """Python, which can be compiled there while libraries and models are on their way."""
    with zipfile.ZipFile(wheel(CACHE / "wheels", "vllm", site.VLLM)) as vllm:
        first = Archive(to / "a/python.tar.xz")
        for name in vllm.namelist():
            if site.travels_of_vllm(name):
                first.add(f"site/{name}", vllm.read(name))
        first.tree(packages(), "site", site.travels)
        first.add("site/bin/py-spy", (packages() / "bin/py-spy").read_bytes(), 0o755)
        first.close()
        second = Archive(to / "b/libraries.tar.xz", 3)
        for name in site.LIBRARIES:
            second.add(f"site/{name}", cubins.strip(vllm.read(name), site.CHIPS), 0o755)
        _models(second)
        second.close()
    return [first.path, second.path]


def _models(archive: Archive) -> None:
    """Small random models of the tests, made where they are missing, and the shape of one of 8 billion weights."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    model_variants = importlib.import_module("model_variants")
    for name, model in MODELS.items():
        archive.tree(model_variants.ensure(model), f"models/{name}", lambda _path: True)
    archive.tree(model_variants.ensure(MODELS["llama"]), "models/big", lambda path: "token" in path)
    archive.add("models/big/config.json", Path(__file__).with_name("big_model.json").read_bytes())


def pack_product(to: Path, checkout: Path) -> list[Path]:
    """Packages and tests of a checkout, as its files are, committed or not. Both drivers are of this one."""
    archive = Archive(to / "xpyd.tar.xz")
    with tempfile.TemporaryDirectory(prefix="xpyd-pack-") as folder:
        parts, installed = [Path(folder, name) for name in ("sidecar", "operator")], Path(folder, "installed")
        for part in parts:  # compiled beside its sources, which are not ours to touch
            shutil.copytree(checkout / part.name, part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        run(Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-cache",
            "--python", sys.executable, "--target", installed, *parts)
        archive.tree(installed, "product", site.travels_as_installed)
    for pattern in CHECKS:
        for path in sorted(checkout.glob(pattern)):
            archive.add(f"product/{path.relative_to(checkout).as_posix()}", path.read_bytes())
    for driver in DRIVERS:
        archive.tree(ROOT / driver, f"product/{driver}", site.travels_as_installed)
    archive.add("product/commit.txt", _commit(checkout).encode())
    archive.close()
    return [archive.path]


def _commit(checkout: Path) -> str:
    """Of a checkout; with what is changed beside it counted."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout

    changed = len(git("status", "--porcelain").splitlines())
    return git("rev-parse", "HEAD").strip() + (f", {changed} files changed" if changed else "") + "\n"


def pack_checks(to: Path, cuda: str, python: str) -> list[Path]:
    """What the checks of a GPU import beside torch, numpy and Triton, which are the machine's."""
    archive = Archive(to / "checks.tar.xz")
    with tempfile.TemporaryDirectory(prefix="xpyd-pack-") as folder:
        install(Path(folder), python, *(ROOT / f"requirements/{name}.txt" for name in ("gpu", f"gpu-cu{cuda}")))
        archive.tree(Path(folder), "checks", site.travels_as_installed)
    archive.close()
    return [archive.path]


def pack_nixl(to: Path) -> list[Path]:
    """Both of its packages whole, with the libraries they bring in folders beside them."""
    archive = Archive(to / "nixl.tar.xz")
    for name in site.NIXL:
        with zipfile.ZipFile(wheel(CACHE / "wheels", name, site.NIXL_VERSION)) as whole:
            for entry in whole.namelist():
                if site.travels_of_nixl(entry):
                    archive.add(f"nixl/{entry}", whole.read(entry), 0o755 if ".so" in entry else 0o644)
    archive.close()
    return [archive.path]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["site", "product", "checks", "nixl"])
    parser.add_argument("to", type=Path)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose product travels (this one)")
    parser.add_argument("--cuda", default=CUDAS[-1], choices=CUDAS, help=f"of the machine's torch ({CUDAS[-1]})")
    parser.add_argument("--python", default=PYTHON, help=f"of the machine, for checks ({PYTHON})")
    given = parser.parse_args(arguments)
    makers: dict[str, Callable[[], list[Path]]] = {
        "site": lambda: pack_site(given.to), "nixl": lambda: pack_nixl(given.to),
        "product": lambda: pack_product(given.to, given.checkout.resolve()),
        "checks": lambda: pack_checks(given.to, given.cuda, given.python)}
    for path in makers[given.what]():
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
