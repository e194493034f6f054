"""What benches, campaigns and some tests need beside the environment of ``make setup``.

    python -m lab extras NAME…          install these
    install("nixl") / "site"            from Python: a folder for PYTHONPATH

Each extra has a folder .cache/NAME, which is filled anew where its pins or the Python are others than those it was filled
with. Programs of the distribution are installed with apt-get where they are missing, which needs root.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
LIMIT_S = 3600.0
CC: Final = os.environ.get("CC", "gcc")
RDMA: Final = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


class ExtraError(Exception):
    """An extra cannot be installed; the text says what failed or what to install."""


class Extra(NamedTuple):
    """One of them. ``pins``: files of requirements/, which ``fill(folder, *pins)`` installs; ``commands``: each with the
    Debian packages that have it; ``packages``: Debian's, without a command to look for; ``programs``: a C source each,
    compiled into the folder at every call; ``always``: ``fill`` itself knows what is there.
    """

    about: str
    fill: Callable[..., None]
    pins: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    always: bool = False


def _run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run([str(part) for part in command], cwd=ROOT, env=os.environ | (env or {}), check=False,
                              stdin=subprocess.DEVNULL, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExtraError(str(error)) from error
    if done.returncode:
        raise ExtraError(f"{' '.join(map(str, command))}: exit code {done.returncode}")


def _pip(pins: str, *where: str | Path, env: dict[str, str] | None = None) -> None:
    _run(Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--no-deps", "--require-hashes",
         "-r", f"requirements/{pins}.txt", *where, env=env)


def _site(folder: Path, pins: str) -> None:
    """Packages alone, which run with this environment's torch."""
    _pip(pins, "--python", sys.executable, "--target", folder / "site")


def _venv(folder: Path, pins: str, *, based: bool) -> None:
    """An environment of its own, with ``site`` leading to its packages. ``based``: ours stand behind them."""
    _run(Path(sys.executable).with_name("uv"), "venv", "-q", "--python", sys.executable, folder / "venv")
    [packages] = (folder / "venv/lib").glob("python3.*/site-packages")
    (folder / "site").symlink_to(packages)
    _pip(pins, "--python", folder / "venv/bin/python")
    if based:
        (packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _suffix(folder: Path, tools: str, pins: str) -> None:
    """Suffix decoding's package has no wheel: it is built with this environment's torch."""
    _venv(folder, tools, based=True)
    _pip(pins, "--no-build-isolation", "--python", folder / "venv/bin/python",
         env={"PATH": f"{folder}/venv/bin{os.pathsep}{os.environ['PATH']}"})
    packages = (folder / "site").resolve()
    (folder / "site").unlink()
    (folder / "site").mkdir()
    for part in packages.glob("arctic_inference*"):
        shutil.copytree(part, folder / "site" / part.name)


def _script(*command: str | Path) -> None:
    _run(sys.executable, *command, env={"PYTHONPATH": str(ROOT / "tests/support")})


C = (CC, "gcc", "libc6-dev")
EXTRAS: Final = {
    "nixl": Extra("NIXL, for the link over it (0.2 GB)", _site, ("nixl",)),
    "vllm-next": Extra("the Python sources of the newer vLLM (0.34 GB, once)", always=True,
                       fill=lambda folder: _script("scripts/vllm_sources.py", "requirements/vllm-next.txt", folder)),
    "suffix": Extra("suffix decoding", _suffix, ("suffix-build", "suffix"), (("g++", "g++"),)),
    "stores": Extra("Mooncake and LMCache", _site, ("stores",), packages=RDMA),
    "bench": Extra("nginx, vllm-router and sglang-router", partial(_venv, based=False), ("bench",),
                   (("nginx", "nginx-light"), C), programs=("lab/bench/router/engine.c", "lab/bench/router/load.c")),
    "gateways": Extra("nginx and HAProxy", lambda _folder: None,
                      commands=(("nginx", "nginx-light"), ("haproxy", "haproxy"), C),
                      programs=("lab/bench/router/engine.c", "lab/bench/router/load.c")),
    "bench-kv": Extra("NIXL and Mooncake, in an environment of their own", partial(_venv, based=True), ("bench-kv",),
                      (C,), (*RDMA, "iproute2"), programs=("lab/bench/kv/raw.c",)),
    "mutation": Extra("cosmic-ray's operators", _site, ("mutation",)),
    "browser": Extra("Chromium and its driver", lambda _folder: _script("scripts/browser.py"), always=True),
    "compiler": Extra("gcc", lambda _folder: None, commands=(C,), always=True),
}


def install(name: str) -> Path:
    """Have an extra; its folder.

    Raises:
        ExtraError: it cannot be had.
    """
    extra, folder = EXTRAS[name], CACHE / name
    _system(extra)
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, identity = folder / "filled", _identity(extra)
        if extra.always or not stamp.exists() or stamp.read_text() != identity:
            if not extra.always:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            extra.fill(folder, *extra.pins)
            stamp.write_text(identity)
        for source in extra.programs:
            _run(CC, "-O2", "-Wall", "-Wextra", "-Werror", "-o", folder / Path(source).stem, source, "-lpthread")
    return folder


def _identity(extra: Extra) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for pins in extra.pins:
        digest.update((ROOT / f"requirements/{pins}.txt").read_bytes())
    return digest.hexdigest()


def _system(extra: Extra) -> None:
    """Install what the distribution has and this machine lacks."""
    absent = {package for command, *packages in extra.commands if shutil.which(command) is None for package in packages}
    absent |= set(_not_installed(extra.packages))
    if not absent:
        return
    words = f"apt-get install {' '.join(sorted(absent))}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ExtraError(f"missing on this machine: {words}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    _run("apt-get", "update", "-qq", env=quiet)
    _run("apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq", "--no-install-recommends", *sorted(absent),
         env=quiet)


def _not_installed(packages: Iterable[str]) -> list[str]:
    def there(package: str) -> bool:
        done = subprocess.run(["dpkg", "-s", package], capture_output=True, text=True, check=False, timeout=60)
        return "Status: install ok installed" in done.stdout

    return [] if shutil.which("dpkg") is None else [package for package in packages if not there(package)]


def main(names: list[str]) -> int:
    """Install those that are named; the exit code."""
    if not names or set(names) - EXTRAS.keys():
        print("\n".join(f"{name:12} {extra.about}" for name, extra in EXTRAS.items()), file=sys.stderr)
        return 2
    for name in names:
        try:
            print(install(name))
        except ExtraError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
