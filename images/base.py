"""The default base: Debian of this machine's release with python3, unpacked.

What packages would do at their installation, and images need, is done here: names of users, certificates, byte code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from images import bytecode, debian, elf
from images.debian import codename
from images.oci import Layer, Layers
from images.platforms import Platform
from images.tools import ImageError, say
from images.tree import Tree

PACKAGES = ("base-files", "base-passwd", "ca-certificates", "coreutils", "dash", "libc-bin", "libstdc++6", "netbase",
            "python3")
LEFT_OUT = ("debconf", "debianutils", "dpkg", "mawk", "openssl", "perl-base", "tar")
"""What these depend on for their installation alone."""
MERGED = ("bin", "lib", "sbin")
"""Folders that are links into usr."""
UNNEEDED = ("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bug", "usr/share/perl5",
            "usr/share/bash-completion", "usr/share/debconf", "usr/share/pixmaps", "usr/share/applications",
            "etc/cron.daily")
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
COMPILED = ("usr/lib/python3", "usr/lib/python3.*")
LD = {"amd64": "lib64", "arm64": ""}
"""The folder of the loader, where it is another one than lib."""


def name_of(release: str, platform: Platform, packages: Sequence[str], digest: str) -> str:
    """What a base is kept as."""
    more = "-".join(name for name in packages if name not in PACKAGES)
    return "-".join(part for part in ("base", release, platform.name, more, digest) if part)


def make(layers: Layers, name: str, platform: Platform, packages: Sequence[str]) -> tuple[Layer, Tree]:
    """The layer of a base and its files, downloaded and unpacked where the cache has none.

    Raises:
        ImageError: apt failed, or the packages are not what this expects.
    """
    if (found := layers.find(name)) is not None:
        return found
    release = codename()
    say(f"making the base: Debian {release} for {platform.name} with {', '.join(packages)}")
    with tempfile.TemporaryDirectory(prefix="base-", dir=layers.folder.parent) as work:
        archives = debian.closure(platform, Path(work), packages)
        tree, versions = assemble(archives, platform)
        say(f"{len(versions)} packages, Python {versions.get('python3', '?')}")
    return layers.add(name, tree), tree


def assemble(archives: Sequence[Path], platform: Platform) -> tuple[Tree, dict[str, str]]:
    """A base from archives of packages; the versions of the packages by name.

    Raises:
        ImageError: something that images need is not in them.
    """
    tree = Tree()
    for name in (*MERGED, *filter(None, (LD[platform.name],))):
        tree.folder(f"usr/{name}")
        tree.link(name, f"usr/{name}")
    versions = debian.install(tree, archives, LEFT_OUT)
    configure(tree)
    trim(tree)
    bytecode.add(tree, COMPILED, python_of(tree))
    elf.check(tree, platform)
    return tree, versions


def python_of(tree: Tree) -> str:
    """Version of python3 in a tree, as "3.11".

    Raises:
        ImageError: it has none.
    """
    program = tree.resolve("usr/bin/python3").rpartition("/python")[2]
    if tree.kind("usr/bin/python3") != "file" or not program.startswith("3."):
        raise ImageError("the base has no python3")
    return program


def configure(tree: Tree) -> None:
    """What the packages' own scripts would write.

    Raises:
        ImageError: what it is written from is not there.
    """
    copies = {"etc/passwd": "usr/share/base-passwd/passwd.master", "etc/group": "usr/share/base-passwd/group.master"}
    for path, source in copies.items():
        if (data := tree.read(source)) is None:
            raise ImageError(f"the base has no {source}")
        tree.file(path, data)
    if tree.read("etc/nsswitch.conf") is None:  # without it names of /etc/hosts come after DNS
        tree.file("etc/nsswitch.conf", tree.read("usr/share/libc-bin/nsswitch.conf") or b"hosts: files dns\n")
    folder = "usr/share/ca-certificates/mozilla"
    bundle = [tree.read(f"{folder}/{name}") or b"" for name in tree.names(folder)]
    if not bundle:
        raise ImageError(f"the base has no certificates in {folder}")
    tree.file(CERTIFICATES, b"".join(data.rstrip() + b"\n" for data in bundle))
    tree.link("usr/lib/ssl/cert.pem", f"/{CERTIFICATES}")
    tree.link("usr/lib/ssl/certs", "/etc/ssl/certs")
    for path, mode in {"tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "root": 0o700}.items():
        tree.folder(path, mode)


def trim(tree: Tree) -> None:
    """Remove what no image needs; licences stay."""
    for path in UNNEEDED:
        tree.remove(path)
    for path, node in list(tree):
        if path.startswith("usr/share/doc/") and node.data is not None and not path.endswith("/copyright"):
            tree.remove(path)
