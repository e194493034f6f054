"""Packages of this machine's Debian release for any platform. apt resolves, verifies and downloads them; nothing runs.

apt works in a folder of its own with an empty list of installed packages, so this machine's packages play no part and stay
as they are.
"""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from images.platforms import Platform
from images.tools import ImageError, run
from images.tree import Tree

AR = b"!<arch>\n"
HEADER = 60
"""Bytes before each member of an ar archive: name in the first 16, size in ten from 48 on (deb(5), ar(5))."""


def codename() -> str:
    """Name of this machine's Debian release.

    Raises:
        ImageError: it is not a Debian.
    """
    lines = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    name = lines.get("VERSION_CODENAME", "").strip('"')
    if lines.get("ID", "").strip('"') != "debian" or not name:
        raise ImageError("the default base needs a Debian machine; name another one with --base")
    return name


def apt(platform: Platform, folder: Path, *words: str) -> str:
    """Run apt-get for a platform, with everything that it keeps in a folder; sources and keys are this machine's."""
    places = {name: folder / name for name in ("lists", "cache", "log")}
    for place in places.values():
        (place / "partial").mkdir(parents=True, exist_ok=True)
    (places["cache"] / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": platform.name, "APT::Architectures": platform.name, "APT::Install-Recommends": "false",
        "Acquire::Languages": "none", "Dir::State": folder, "Dir::State::status": folder / "status",
        "Dir::State::lists": places["lists"], "Dir::Cache": places["cache"], "Dir::Log": places["log"],
        "Acquire::Retries": "2"}
    if os.geteuid() == 0:
        settings["APT::Sandbox::User"] = "root"  # the folder is not for others
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return run(["apt-get", "-qq", *options, *words], env={"DEBIAN_FRONTEND": "noninteractive"}, folder=folder)


def closure(platform: Platform, folder: Path, names: Sequence[str]) -> list[Path]:
    """Archives of packages with all that they depend on.

    Raises:
        ImageError: apt cannot have one.
    """
    apt(platform, folder, "update")
    apt(platform, folder, "install", "--download-only", "--yes", *names)
    return sorted((folder / "cache" / "archives").glob("*.deb"))


def single(platform: Platform, folder: Path, package: str, pattern: str) -> Path:
    """Of what ``package`` depends on, the archive of the one whose name is like ``pattern``, without the others.

    Raises:
        ImageError: apt cannot have it.
    """
    apt(platform, folder, "update")
    listed = apt(platform, folder, "install", "--print-uris", "--yes", package)
    planned = [words[1].partition("_")[0] for line in listed.splitlines() if len(words := line.split()) > 1]
    name = next((name for name in planned if fnmatch(name, pattern)), None)
    if name is None:
        raise ImageError(f"apt has no {pattern} for {platform.name}")
    apt(platform, folder, "download", name)
    return next(folder.glob(f"{name}_*.deb"))


def members(deb: bytes) -> Iterator[tuple[str, bytes]]:
    """What is in a package's archive.

    Raises:
        ImageError: it is none.
    """
    if not deb.startswith(AR):
        raise ImageError("not a Debian package")
    at = len(AR)
    while at + HEADER <= len(deb):
        name, size = deb[at:at + 16].decode("ascii").strip().rstrip("/"), int(deb[at + 48:at + 58])
        yield name, deb[at + HEADER:at + HEADER + size]
        at += HEADER + size + size % 2


def unpack(deb: bytes) -> tuple[dict[str, str], bytes, tarfile.TarFile]:
    """A package's control fields, its control file, and its files.

    Raises:
        ImageError: it is packed in a way that this does not know.
    """
    found = {name.partition(".tar")[0]: (name, data) for name, data in members(deb)}
    opened = {}
    for part in ("control", "data"):
        name, data = found.get(part, ("", b""))
        if name.endswith(".xz"):
            data = lzma.decompress(data)
        elif not name.endswith((".tar", ".gz")):
            raise ImageError(f"a Debian package without {part}.tar, or packed in another way: {', '.join(found)}")
        opened[part] = tarfile.open(fileobj=io.BytesIO(data))  # noqa: SIM115 (the second one is for the caller)
    with opened["control"] as archive:
        file = archive.extractfile("./control")
        control = file.read() if file is not None else b""
    lines = [line.partition(": ") for line in control.decode().splitlines() if ": " in line and line[:1] not in " \t"]
    return {name: value for name, _, value in lines}, control, opened["data"]


def install(tree: Tree, archives: Sequence[Path], left_out: Sequence[str]) -> dict[str, str]:
    """Put packages' files into a tree, and what scanners read about them; their versions by name.

    Raises:
        ImageError: an archive cannot be unpacked.
    """
    versions = {}
    for path in archives:
        fields, control, files = unpack(path.read_bytes())
        with files:
            if fields["Package"] not in left_out:
                tree.unpack(files)
                tree.file(f"var/lib/dpkg/status.d/{fields['Package']}", control)
                versions[fields["Package"]] = fields["Version"]
    return versions
