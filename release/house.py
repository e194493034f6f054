"""The wheels of a release: ``xpyd``, ``xpyd-operator``, and ``xpyd-sidecar`` for each platform and in Python alone.

    OUT/xpyd-VERSION-py3-none-any.whl
        xpyd_operator-VERSION-py3-none-any.whl
        xpyd_sidecar-VERSION-cp311-abi3-manylinux_2_28_x86_64.whl      compiled by zig's clang against glibc 2.28
        xpyd_sidecar-VERSION-cp311-abi3-manylinux_2_28_aarch64.whl
        pure/xpyd_sidecar-VERSION-py3-none-any.whl                     in a folder of its own: for who asks for it by name

Equal sources give equal bytes: one compiler for all platforms, pinned by hash, whose C library and defaults are not
those of this machine; one date for all files; copies of the sources without what lies beside them. Nothing of the checkout
changes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
import zipfile
from pathlib import Path

from images import elf, inputs
from images.platforms import PLATFORMS, Platform
from images.tools import ROOT, ImageError, run, say
from images.tree import EPOCH

from release import toolbox

GLIBC = "2.28"
BUILD_S = 1800.0
"""Deadline of one wheel: the compiler makes its C library for a platform when it is first used there."""
PURE = "pure"
SIZES = ("int", "long", "void *", "short", "float", "double", "size_t", "long long")
LEFT_OUT = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "dist", "build")


def tag(platform: Platform) -> str:
    """The last part of a wheel's name: which machines and C libraries it is for."""
    return f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine}"


def build(out: Path, platforms: tuple[Platform, ...] = PLATFORMS, cache: Path | None = None) -> list[Path]:
    """Build and check all wheels into a new or empty folder; their paths.

    Raises:
        ImageError: the folder holds something, versions differ, a compiler failed, or a wheel is not what its name says.
    """
    if out.exists() and any(out.iterdir()):
        raise ImageError(f"{out} is not empty: wheels of two builds must not meet")
    version = inputs.version()
    tools = toolbox.python(cache)
    with toolbox.temporary("wheels") as name:
        work = Path(name)
        made = [_wheel("distribution", work / "out", tools, {}), _wheel("operator", work / "out", tools, {})]
        include = headers(work / "include")
        for platform in platforms:
            say(f"compiling for {platform.name}")
            env = {"CC": compiler(tools, platform), "XPYD_WHEEL_PLATFORM": tag(platform), "XPYD_PLAIN": "",
                   "XPYD_PYTHON_INCLUDE": str(include), "ZIG_GLOBAL_CACHE_DIR": str(tools.parents[1] / "zig"),
                   "ZIG_LOCAL_CACHE_DIR": str(work / "zig")}
            made.append(_wheel("sidecar", work / "out", tools, env))
            check(made[-1], platform, tools)
        made.append(_wheel("sidecar", work / "out" / PURE, tools, {"XPYD_PLAIN": "1"}))
        check(made[-1], None, tools)
        if wrong := [path.name for path in made if path.name.split("-")[1] != version]:
            raise ImageError(f"version {version} was to be built, not {', '.join(wrong)}")
        out.mkdir(parents=True, exist_ok=True)
        shutil.copytree(work / "out", out, dirs_exist_ok=True)
        return [out / path.relative_to(work / "out") for path in made]


def compiler(tools: Path, platform: Platform) -> str:
    """What ``CC`` is for a platform: clang as zig brings it, with the C library of glibc 2.28 for just that platform."""
    words = [str(tools), "-m", "ziglang", "cc", "-target", f"{platform.machine}-linux-gnu.{GLIBC}", "-g0", "-s"]
    return shlex.join(words)


def headers(folder: Path) -> Path:
    """A folder with Python's headers for all platforms: those of this Python, whose sizes the compiler checks again.

    pyconfig.h is this machine's. Of it Python's stable interface takes the sizes of C's types, which all platforms of
    `PLATFORMS` share (64-bit, little-endian, Linux); assertions behind them let a platform fail where one differs.

    Raises:
        ImageError: this Python has no headers.
    """
    source = Path(sysconfig.get_path("include"))
    config = Path(sysconfig.get_config_h_filename())
    if not (source / "Python.h").is_file() or not config.is_file():
        raise ImageError(f"{source} has no Python.h: install Python's headers (Debian: apt-get install python3-dev)")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    lines = [f'_Static_assert(sizeof({kind}) == SIZEOF_{_name(kind)}, "pyconfig.h is of another platform");'
             for kind in SIZES]
    target = folder / "pyconfig.h"
    target.unlink(missing_ok=True)
    target.write_text("\n".join([config.read_text(), "#include <stddef.h>", *lines, ""]))
    return folder


def _name(kind: str) -> str:
    return kind.upper().replace(" *", "_P").replace(" ", "_")


def _wheel(project: str, folder: Path, tools: Path, env: dict[str, str]) -> Path:
    """Build one wheel from a copy of its sources, with the license beside them."""
    with toolbox.temporary(project) as name:
        copy, made = Path(name) / project, Path(name) / "made"
        shutil.copytree(ROOT / project, copy, ignore=LEFT_OUT)
        shutil.copy(ROOT / "LICENSE", copy)
        date = os.environ.get("SOURCE_DATE_EPOCH") or str(EPOCH)
        run([str(tools), "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)], folder=copy,
            env={"SOURCE_DATE_EPOCH": date, "PYTHONPATH": "", **env}, timeout_s=BUILD_S)
        (wheel,) = made.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, folder / wheel.name))


def check(wheel: Path, platform: Platform | None, tools: Path) -> None:
    """Whether a wheel of the sidecar is what its name says. ``platform`` None: without compiled parts.

    Raises:
        ImageError: a part is missing, for another processor, needs a newer C library or libraries that not every machine
            has, or leaves Python's stable interface.
    """
    with zipfile.ZipFile(wheel) as archive:
        parts = {name: elf.read(archive.read(name)) for name in archive.namelist() if name.endswith(".so")}
    wanted = {path.stem for path in (ROOT / "sidecar/src").rglob("_*.c")} if platform else set()
    if (found := {Path(name).name.partition(".")[0] for name in parts}) != wanted:
        raise ImageError(f"{wheel.name} holds {', '.join(sorted(found)) or 'no compiled part'}, "
                         f"not {', '.join(sorted(wanted)) or 'none'}")
    if platform is None:
        if not wheel.name.endswith("-py3-none-any.whl"):
            raise ImageError(f"{wheel.name} has no compiled parts, so its tag must be py3-none-any")
        return
    if wrong := [name for name, part in parts.items() if part is None or part.machine != platform.elf]:
        raise ImageError(f"{wheel.name}: {', '.join(wrong)} is not for {platform.machine}")
    if not wheel.name.endswith(f"-cp311-abi3-{tag(platform)}.whl"):
        raise ImageError(f"{wheel.name}: its tag must be cp311-abi3-{tag(platform)}")
    said = " ".join(toolbox.script("auditwheel", ["show", str(wheel)], tools).split())
    if not older(said, platform):
        raise ImageError(f"auditwheel finds that {wheel.name} is not {tag(platform)}: {said[:800]}")
    toolbox.script("abi3audit", ["--strict", "--assume-minimum-abi3", "3.11", str(wheel)], tools)


def older(said: str, platform: Platform) -> bool:
    """Whether auditwheel's words name a tag of this platform for a C library of `GLIBC` or older."""
    at = said.find("consistent with the following platform tag: \"manylinux_2_")
    words = said[at:].split('"')[1].split("_", 3) if at >= 0 else []
    return len(words) == 4 and words[3] == platform.machine and int(words[2]) <= int(GLIBC.partition(".")[2])

