"""The files of an image, in memory, and the layer that they become: the same bytes for the same files.

All belong to root and carry one time. So an image needs no root, no mount and no file system that can hold what it has.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

EPOCH = 1580601600
"""Time of every file, and of the images (the one that wheels are made with)."""
LINKS = 40
"""How many symbolic links a path may lead through."""


class Node(NamedTuple):
    """A file, a folder (``data`` is None), or a symbolic link (``target``)."""

    mode: int
    data: bytes | None = None
    target: str = ""


class Tree:
    """Paths are relative to the root of the image, with ``/`` between names: ``usr/bin/python3``."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[tuple[str, Node]]:
        """All in order of their paths, so that folders come before what is in them."""
        return iter(sorted(self._nodes.items()))

    def __len__(self) -> int:
        return len(self._nodes)

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Have a folder, and those above it; one that is there gets this mode."""
        place = self._place(path)
        if place and (there := self._nodes.get(place)) is not None and there.target and self.kind(place) == "folder":
            return
        self._put(place, Node(mode))

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file over whatever is there. Programs of other users (setuid) are not made."""
        self._put(self._place(path), Node(mode & 0o777, data))

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        self._put(self._place(path), Node(0o777, None, target))

    def remove(self, path: str) -> None:
        """Take away a file or a folder with all that is in it; nothing where there is none."""
        place = self._place(path)
        for name in [name for name in self._nodes if name == place or name.startswith(f"{place}/")]:
            del self._nodes[name]

    def resolve(self, path: str) -> str:
        """The path behind all links, whether there is something or not.

        Raises:
            ValueError: links that lead in a circle.
        """
        parts, done = path.strip("/").split("/"), ""
        for _ in range(LINKS + 1):
            while parts:
                done = posixpath.normpath(posixpath.join("/", done, parts.pop(0))).strip("/")
                node = self._nodes.get(done)
                if node is not None and node.target:
                    parts = [*node.target.strip("/").split("/"), *parts]
                    done = "" if node.target.startswith("/") else posixpath.dirname(done)
                    break
            else:
                return done
        raise ValueError(f"{path}: too many symbolic links")

    def read(self, path: str) -> bytes | None:
        """A file's content, or None where there is no file."""
        node = self._nodes.get(self.resolve(path))
        return None if node is None else node.data

    def kind(self, path: str) -> str:
        """What a path leads to: ``file``, ``folder``, or nothing."""
        node = self._nodes.get(self.resolve(path))
        return "" if node is None or node.target else "folder" if node.data is None else "file"

    def names(self, path: str) -> list[str]:
        """What is in a folder."""
        start = f"{self.resolve(path)}/"
        return sorted(name[len(start):] for name in self._nodes if name.startswith(start) and "/" not in name[len(start):])

    def unpack(self, archive: tarfile.TarFile, *, whiteouts: bool = False) -> None:
        """Put everything of a tar archive in place, later files over earlier ones. Devices and pipes are left out.

        ``whiteouts``: the archive is a layer, in which a file ``.wh.NAME`` takes NAME away.
        """
        for member in archive:
            path = posixpath.normpath(posixpath.join("/", member.name)).strip("/")
            name = posixpath.basename(path)
            if whiteouts and name == ".wh..wh..opq":
                below = posixpath.dirname(path)
                for old in self.names(below):
                    self.remove(posixpath.join(below, old))
            elif whiteouts and name.startswith(".wh."):
                self.remove(posixpath.join(posixpath.dirname(path), name.removeprefix(".wh.")))
            elif member.isdir():
                if path:
                    self.folder(path, member.mode & 0o1777)
            elif member.issym():
                self.link(path, member.linkname)
            elif member.islnk():
                first = self._nodes[self.resolve(member.linkname)]
                self._put(self._place(path), first)
            elif member.isreg():
                content = archive.extractfile(member)
                self.file(path, content.read() if content is not None else b"", member.mode)

    def tar(self) -> bytes:
        """The layer, not compressed."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, node in self:
                entry = tarfile.TarInfo(path)
                entry.mode, entry.mtime = node.mode, EPOCH
                if node.target:
                    entry.type, entry.linkname = tarfile.SYMTYPE, node.target
                elif node.data is None:
                    entry.type = tarfile.DIRTYPE
                else:
                    entry.size = len(node.data)
                archive.addfile(entry, io.BytesIO(node.data or b""))
        return buffer.getvalue()

    def _place(self, path: str) -> str:
        """A path with the links above its last name resolved."""
        plain = posixpath.normpath(posixpath.join("/", path)).strip("/")
        above, name = posixpath.split(plain)
        return posixpath.join(self.resolve(above), name) if above else name

    def _put(self, path: str, node: Node) -> None:
        above = posixpath.dirname(path)
        if above and above not in self._nodes:
            self._put(above, Node(0o755))
        there = self._nodes.get(path)
        if there is not None and there.data is None and not there.target and (node.data is not None or node.target):
            self.remove(path)
        self._nodes[path] = node
