"""Wheels for a platform: the pinned ones from the package index by hash, and the two packages of this repository.

This machine downloads, with its own settings of pip (index, proxy, certificates), and compiles, for another platform by the
distribution's cross compiler. Wheels are unpacked here: nothing runs that is in them.
"""

from __future__ import annotations

import configparser
import hashlib
import io
import os
import posixpath
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from images import debian, elf
from images.platforms import Platform, native
from images.tools import ROOT, ImageError, need, run, say
from images.tree import EPOCH, Tree

ENGINE_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Those that vLLM 0.32 supports: the engine's image may have any of them."""
ENGINE_GLIBC = "2.28"
"""torch's builds need as much."""
PIN = re.compile(r"^[A-Za-z0-9._-]+==", re.MULTILINE)
KEPT = 32
"""Downloads kept in the cache, the newest ones."""
SCRIPT = """#!{python}
import sys

from {module} import {first}

if __name__ == "__main__":
    sys.exit({function}())
"""
"""What starts an entry point."""


def tags(platform: Platform, glibc: str) -> list[str]:
    """Platform tags that a glibc of this version can load, newest first (PEP 600).

    Raises:
        ImageError: it is no glibc of a version that wheels are made for.
    """
    major, _, minor = glibc.partition(".")
    if major != "2" or not minor.isdecimal() or int(minor) < 17:
        raise ImageError(f"the base's C library is {glibc or 'not glibc'}: wheels need glibc 2.17 or later")
    return [*(f"manylinux_2_{number}_{platform.machine}" for number in range(int(minor), 16, -1)),
            f"manylinux2014_{platform.machine}"]


def download(cache: Path, platform: Platform, requirements: Path, python: str, glibc: str) -> Path:
    """A folder with the wheels that ``requirements`` pins, for one version of Python; from the cache when it has them.

    Raises:
        ImageError: pip cannot get one, or its hash differs.
    """
    key = hashlib.sha256(f"{python} {glibc} {platform.machine} ".encode() + requirements.read_bytes()).hexdigest()[:16]
    folder = cache / "wheels" / key
    if not folder.exists():
        say(f"downloading {requirements.name} for Python {python} on {platform.name}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
        try:
            accepted = [word for tag in tags(platform, glibc) for word in ("--platform", tag)]
            run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--require-hashes",
                 "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *accepted,
                 "--dest", str(temporary), "-r", str(requirements)])
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    verify(folder, requirements)
    folder.touch()
    return folder


def verify(folder: Path, requirements: Path) -> None:
    """Look whether a folder has the wheels that are pinned, and no others: it may have been kept for long.

    Raises:
        ImageError: it has not.
    """
    text = requirements.read_text()
    pinned, found = len(PIN.findall(text)), sorted(folder.iterdir())
    strange = [path.name for path in found if f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" not in text]
    if strange or pinned != len(found):
        raise ImageError(f"{folder} has {len(found)} wheels for the {pinned} pins of {requirements.name}"
                         f"{''.join(f', and {name} is none of them' for name in strange[:1])}; remove it")


def prune(cache: Path) -> None:
    """Keep the newest downloads."""
    folders = [path for path in (cache / "wheels").glob("*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(path)


def compiler(platform: Platform, headers: Path | None, machine: Platform) -> str:
    """The C compiler for a platform on a machine, as ``CC`` names it; ``headers``: where those of Python are unpacked."""
    if platform == machine:
        return os.environ.get("CC") or "cc"
    if headers is None:
        raise ImageError(f"compiling for {platform.name} needs that platform's headers of Python")
    folders = sorted(headers.glob("usr/include/python3*"))
    return " ".join([platform.compiler, *(f"-I{folder}" for folder in (*folders, headers / "usr/include"))])


def own(cache: Path, project: str, folder: Path, platform: Platform) -> Path:
    """Build the wheel of ``operator`` or ``sidecar`` into a folder, from a copy: what is compiled for another platform must
    not come to lie beside the sources.

    Raises:
        ImageError: the build failed, or something is not compiled, or for another platform.
    """
    machine = native()
    with tempfile.TemporaryDirectory(prefix="xpyd-own-") as name:
        copy = Path(name) / project
        shutil.copytree(ROOT / project, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
        hook = copy / "hatch_build.py"
        env = {"SOURCE_DATE_EPOCH": str(EPOCH), "XPYD_PLAIN": "", "XPYD_WHEEL_PLATFORM": f"linux_{platform.machine}"}
        if hook.exists():
            if platform == machine:
                need((os.environ.get("CC") or "cc").split()[0], "gcc")
                headers = None
            else:
                for there in (platform.compiler, platform.headers):
                    need(there, *platform.packages)
                headers = python_headers(cache, platform)
            env["CC"] = compiler(platform, headers, machine)
        run([sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-index",
             "--no-build-isolation", "--wheel-dir", str(folder), str(copy)], env=env)
        (wheel,) = folder.glob(f"xpyd_{project}-*.whl")
        if hook.exists() and (missing := _missing(wheel, copy, platform)):
            raise ImageError(f"{', '.join(missing)}: not compiled for {platform.name}")
    return wheel


def _missing(wheel: Path, project: Path, platform: Platform) -> list[str]:
    """Sources of C whose module is not in the wheel as one of this platform."""
    with zipfile.ZipFile(wheel) as archive:
        made = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    found = {posixpath.basename(name).partition(".")[0] for name, data in made.items()
             if (module := elf.read(data)) is not None and module.machine == platform.elf}
    return [path.name for path in sorted(project.rglob("_*.c")) if path.stem not in found]


def python_headers(cache: Path, platform: Platform) -> Path:
    """A folder with the headers of the distribution's Python for a platform, below usr/include.

    Raises:
        ImageError: apt has none.
    """
    release = debian.codename()
    folder = cache / "headers" / f"{release}-{platform.name}"
    if not folder.exists():
        say(f"taking the headers of Python for {platform.name} from the distribution")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="part-", dir=folder.parent) as name:
            work = Path(name)
            deb = debian.single(platform, work / "apt", "libpython3-dev", "libpython3.*-dev")
            _, _, files = debian.unpack(deb.read_bytes())
            with files:
                members = [member for member in files if member.name.startswith("./usr/include/")]
                files.extractall(work / "root", members=members, filter="data")
            if not list((work / "root").glob("usr/include/python3*/Python.h")):
                raise ImageError(f"libpython3-dev for {platform.name} has no Python.h")
            (work / "root").rename(folder)
    return folder


def install(tree: Tree, wheel: Path, prefix: str, python: str) -> None:
    """Unpack a wheel into an environment: modules below lib, programs in bin.

    Raises:
        ImageError: it has files that go elsewhere, or over others.
    """
    site = f"{prefix}/lib/python{python}/site-packages"
    folders = {"purelib": site, "platlib": site, "scripts": f"{prefix}/bin", "data": prefix}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name, data = entry.filename, b"" if entry.is_dir() else archive.read(entry)
            first, _, rest = name.partition("/")
            if first.endswith(".data") and rest:
                scheme, _, name = rest.partition("/")
                if scheme not in folders:
                    raise ImageError(f"{wheel.name}: {entry.filename} has no place in an image")
                place = f"{folders[scheme]}/{name}"
                if scheme == "scripts" and data.startswith(b"#!python"):
                    data = f"#!{_program(prefix)}\n".encode() + data.partition(b"\n")[2]
            else:
                scheme, place = "purelib", f"{site}/{name}"
            if not posixpath.normpath(place).startswith(f"{prefix}/") or ".." in name.split("/"):
                raise ImageError(f"{wheel.name}: {entry.filename} leads out of its folder")
            if entry.is_dir():
                continue
            if tree.kind(place):
                raise ImageError(f"{wheel.name}: {entry.filename} is there already")
            tree.file(place, data, 0o755 if scheme == "scripts" or entry.external_attr >> 16 & 0o100 else 0o644)
            if name.endswith(".dist-info/entry_points.txt"):
                _scripts(tree, data.decode(), prefix)


def _scripts(tree: Tree, text: str, prefix: str) -> None:
    """Write the programs that a package's entry points name."""
    points = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    points.optionxform = str  # type: ignore[assignment,method-assign]
    points.read_file(io.StringIO(text))
    for name, value in points["console_scripts"].items() if "console_scripts" in points else ():
        module, _, function = value.partition("[")[0].strip().partition(":")
        script = SCRIPT.format(python=_program(prefix), module=module, first=function.partition(".")[0], function=function)
        tree.file(f"{prefix}/bin/{name}", script.encode(), 0o755)


def _program(prefix: str) -> str:
    return f"/{prefix}/bin/python"


def extras(tree: Tree, folder: str, wheels: list[Path]) -> None:
    """Unpack wheels of several versions of Python over each other.

    Their compiled modules carry the version in their names and do not meet; whatever else meets must be equal.

    Raises:
        ImageError: it is not.
    """
    for wheel in sorted(wheels, key=lambda path: path.name):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".data/" in name or ".." in name.split("/") or name.startswith("/"):
                    raise ImageError(f"{wheel.name}: {name} has no place on an engine's path")
                if name.endswith(("/", ".dist-info/RECORD", ".dist-info/WHEEL")):
                    continue
                place, data = f"{folder}/{name}", archive.read(name)
                if (there := tree.read(place)) is not None and there != data:
                    raise ImageError(f"{wheel.name}: {name} differs between versions of Python")
                tree.file(place, data)
