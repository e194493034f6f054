"""``python -m xpyd_sidecar.install DIR``: put this package where any vLLM image finds it with ``PYTHONPATH=DIR``.

Runs as an init container, from an environment into which the package was installed as a wheel. DIR is a volume that the
engine's container shares:

    DIR/xpyd_sidecar/                     the package, without the router
    DIR/xpyd_sidecar-VERSION.dist-info/   its entry points, which vLLM looks up as plugins
    DIR/xxhash/ …                         what it imports and a stock vLLM image lacks (``--extras``)
    DIR/.xpyd-install.json                names of the above: nothing else in DIR is ever touched

Each name appears complete or not at all (copied beside, then renamed), the package as the last one. A second run finds
everything in place, or repairs it. Files are readable for every user, since the engine's image may run as another one.

Exit code: 0 everything is in place; 1 it is not (one line on stderr says why); 2 wrong usage.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from xpyd_sidecar.errors import SidecarError

PACKAGE = "xpyd_sidecar"
EXTRAS = Path("share", "xpyd", "engine")
"""Folder of the extras in the environment of the sidecar's image."""
MARK = ".xpyd-install.json"
STAGE = ".xpyd-install-"
LEFT_OUT = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Of a dist-info: what speaks of the environment that the package comes from."""
ROUTERS_OWN = frozenset({"router"})
"""Folders of the package that no engine runs: they stay where the sidecar runs."""
MARGIN = 1 << 20
"""Bytes that must stay free."""
BLOCK = 4096


class InstallError(SidecarError):
    """The package cannot be put there. The message names the path and what would be right."""


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What earlier runs have put into the folder."""

    names: tuple[str, ...]


class InstallResult(NamedTuple):
    """What a run found and did."""

    names: tuple[str, ...]
    files: int
    size: int
    """Bytes, of all files."""
    copied: bool
    """False: everything was in place."""


def sources(package: Path, extras: Path) -> dict[str, Path]:
    """Folders to copy by the name that they get, the package as the last one.

    Raises:
        InstallError: the package was not installed as a wheel, or the extras are not there.
    """
    infos = sorted(package.parent.glob(f"{package.name}-*.dist-info"))
    if len(infos) != 1:
        raise InstallError(f"{package.parent}: {len(infos)} dist-info folders of {package.name}; install it as a wheel")
    if not extras.is_dir():
        raise InstallError(f"{extras}: no such folder; it holds what an engine needs besides (--extras)")
    found = {path.name: path for path in sorted(extras.iterdir())}
    if loose := [path.name for path in found.values() if not path.is_dir()]:
        raise InstallError(f"{extras}: {loose[0]} is not a folder")
    return {**found, infos[0].name: infos[0], package.name: package}


def install(target: Path, folders: Mapping[str, Path]) -> InstallResult:
    """Have a copy of every folder in ``target``, which is made if it is not there.

    Raises:
        InstallError: ``target`` cannot take them; what was in it is still there.
    """
    try:
        return _install(target, folders)
    except OSError as error:
        raise InstallError(f"{error.filename or target}: {error.strerror}") from None


def _install(target: Path, folders: Mapping[str, Path]) -> InstallResult:
    wanted = {name: list(_files(folder)) for name, folder in folders.items()}
    size = sum(path.stat().st_size for files in wanted.values() for path in files)
    count = sum(map(len, wanted.values()))
    for folder in folders.values():
        if folder.resolve().is_relative_to(target.resolve()) or target.resolve().is_relative_to(folder.resolve()):
            raise InstallError(f"{target}: {folder} is to be copied; give another folder")
    if not os.path.lexists(target):
        target.mkdir(parents=True)
        target.chmod(0o755)
    with _alone(target):
        ours = _marked(target)
        for name in folders:
            if name not in ours and os.path.lexists(target / name):
                raise InstallError(f"{target / name}: is there already and not xpyd's; give a folder of its own")
        for remains in target.glob(f"{STAGE}*"):
            shutil.rmtree(remains)
        if set(ours) == set(folders) and all(_same(target / name, folders[name]) for name in folders):
            return InstallResult(tuple(folders), count, size, copied=False)
        _check_space(target, [path for files in wanted.values() for path in files], len(wanted))
        with tempfile.TemporaryDirectory(prefix=STAGE, dir=target) as stage:
            for name, files in wanted.items():
                _copy(folders[name], files, Path(stage, name))
            _mark(target, stage, {*ours, *folders})
            for name in folders:
                _swap(target / name, Path(stage))
            for name in set(ours) - set(folders):
                _swap(target / name, Path(stage))
            _mark(target, stage, set(folders))
    return InstallResult(tuple(folders), count, size, copied=True)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold a folder against other runs."""
    handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InstallError(f"{target}: another run works in it") from None
    finally:
        os.close(handle)


def _marked(target: Path) -> tuple[str, ...]:
    """Names that earlier runs have put into a folder."""
    try:
        names = msgspec.json.decode((target / MARK).read_bytes(), type=_Mark).names
    except FileNotFoundError:
        return ()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InstallError(f"{target / MARK}: not written by xpyd ({error}); empty the folder") from None
    if wrong := [name for name in names if name in {"", ".", ".."} or "/" in name or "\0" in name]:
        raise InstallError(f"{target / MARK}: {wrong[0]!r} is no name of a folder; empty the folder")
    return names


def _mark(target: Path, stage: str, names: set[str]) -> None:
    """Write down, before they appear, which names are ours."""
    new = Path(stage, MARK)
    new.write_bytes(msgspec.json.encode(_Mark(tuple(sorted(names)))))
    new.chmod(0o644)
    new.replace(target / MARK)


def _files(folder: Path) -> Iterator[Path]:
    """Files to copy, in order. Byte code stays: it belongs to one version of Python and names its source's path."""
    for path in sorted(folder.rglob("*")):
        left_out = path.parent.suffix == ".dist-info" and path.name in LEFT_OUT
        left_out |= folder.name == PACKAGE and path.relative_to(folder).parts[0] in ROUTERS_OWN
        if path.is_file() and "__pycache__" not in path.parts and not left_out:
            yield path


def _same(installed: Path, folder: Path) -> bool:
    """Whether a copy is complete and unchanged; byte code beside it does not count."""
    return not installed.is_symlink() and _digest(installed) == _digest(folder)


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in _files(folder):
        total.update(f"{path.relative_to(folder)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _check_space(target: Path, files: Sequence[Path], folders: int) -> None:
    """Both bytes and inodes, before anything is written."""
    room = os.statvfs(target)
    blocks = sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files)
    needed = blocks + len({path.parent for path in files}) * BLOCK + MARGIN
    if (free := room.f_bavail * room.f_frsize) < needed:
        raise InstallError(f"{target}: {free >> 10} KiB are free, {needed >> 10} KiB are needed")
    if room.f_files and room.f_favail < len(files) + folders + len({path.parent for path in files}) + 2:
        raise InstallError(f"{target}: {room.f_favail} inodes are free, {len(files)} files are to be copied")


def _copy(folder: Path, files: Sequence[Path], copy: Path) -> None:
    copy.mkdir()
    copy.chmod(0o755)
    for path in files:
        place = copy / path.relative_to(folder)
        for parent in reversed(place.relative_to(copy).parents[:-1]):
            (copy / parent).mkdir(exist_ok=True)
            (copy / parent).chmod(0o755)
        shutil.copyfile(path, place)
        place.chmod(0o644)


def _swap(place: Path, stage: Path) -> None:
    """Put ``stage``'s folder of this name in place, or nothing if it has none; what was there ends in ``stage``."""
    if os.path.lexists(place):
        place.rename(stage / f"{place.name}.old")
    if (stage / place.name).exists():
        (stage / place.name).rename(place)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="xpyd_sidecar.install", description="Copy xpyd to where engines find it.")
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that engines have on PYTHONPATH")
    parser.add_argument("--extras", type=Path, default=Path(sys.prefix) / EXTRAS, metavar="DIR",
                        help="packages that engines need besides (%(default)s)")
    args = parser.parse_args(argv)
    try:
        done = install(args.dir, sources(Path(__file__).parent, args.extras))
    except InstallError as error:
        sys.stderr.write(f"xpyd_sidecar.install: {error}\n")
        return 1
    said = "copied" if done.copied else "already in place"
    packages = ", ".join(name.removesuffix(".dist-info") for name in done.names if name.endswith(".dist-info"))
    sys.stdout.write(f"xpyd_sidecar.install: {packages} → {args.dir}: {done.files} files, {done.size >> 10} KiB, {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
