"""The default base: Debian of this machine's release with python3, made by debootstrap from apt's own mirror."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from images.buildah import Buildah
from images.tools import ImageError, need, run, say

PACKAGES = ("python3", "ca-certificates", "libgomp1", "libnuma1")
"""What the Python packages of all three images load. The last two are for vLLM's CPU build."""
UNNEEDED = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/man", "usr/share/info", "usr/share/locale",
            "etc/resolv.conf", "etc/hostname", "etc/apt/sources.list")
"""Left by the installation: caches, translations, and what says on which machine and from which mirror it was made."""


def codename() -> str:
    """Name of this machine's Debian release.

    Raises:
        ImageError: it is not a Debian.
    """
    lines = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    name = lines.get("VERSION_CODENAME", "").strip('"')
    if lines.get("ID", "").strip('"') != "debian" or not name:
        raise ImageError("the default base needs a Debian machine; name another base: BASE=…")
    return name


def mirror(release: str) -> str:
    """The address from which apt takes ``main`` of a release.

    Raises:
        ImageError: apt's configuration has none.
    """
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    for line in run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines():
        address, _, rest = line.partition(" ")
        if rest == f"{release} main" and address.startswith(("http://", "https://", "file:/")):
            return address
    raise ImageError(f"apt's configuration names no mirror for {release} main")


def make(buildah: Buildah, image: str, folder: Path) -> None:
    """Make the base and store it as ``image``. Works in a new folder beside ``folder``, which goes away again.

    Raises:
        ImageError: this user is not root, or a step failed.
    """
    if os.geteuid() != 0:
        raise ImageError("making the base needs root")
    need("debootstrap", "debootstrap")
    release = codename()
    say(f"making the base: Debian {release} with {', '.join(PACKAGES)}")
    proxy = run(["apt-config", "dump", "--format", "%v", "Acquire::http::Proxy"]).strip()
    with tempfile.TemporaryDirectory(prefix="base-", dir=folder) as name:
        work = Path(name)
        root = work / "root"
        run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", release, str(root), mirror(release)],
            env={"http_proxy": proxy} if proxy else None)
        trim(root)
        run(["tar", "--create", "--numeric-owner", "--sort=name", "--one-file-system", "--exclude=./dev/*",
             "--exclude=./proc/*", "--exclude=./sys/*", f"--file={work / 'root.tar'}", f"--directory={root}", "."])
        shutil.rmtree(root)
        buildah.bud(image, Path(__file__).with_name("Containerfile.base"), work, {}, pull=False)


def trim(root: Path) -> None:
    """Remove what no image needs; licences stay."""
    for unneeded in UNNEEDED:
        path = root / unneeded
        if path.is_dir() and not path.is_symlink():
            for child in path.iterdir():
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        else:
            path.unlink(missing_ok=True)
    for path in (root / "usr/share/doc").rglob("*"):
        if path.is_file() and path.name != "copyright":
            path.unlink()
