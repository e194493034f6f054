from __future__ import annotations

import io
import tarfile

import image_parts
import pytest
from images.tree import EPOCH, Tree


def unpacked(files: dict[str, bytes | str], into: Tree | None = None, *, whiteouts: bool = False,
             mode: int = 0o644) -> Tree:
    tree = Tree() if into is None else into
    with tarfile.open(fileobj=io.BytesIO(image_parts.tar(files, mode))) as archive:
        tree.unpack(archive, whiteouts=whiteouts)
    return tree


def test_files_go_through_links_of_folders() -> None:
    tree = Tree()
    tree.folder("usr/lib")
    tree.link("lib", "usr/lib")
    unpacked({"./": b"", "./lib/": b"", "./lib/x86_64-linux-gnu/libc.so.6": b"c",
              "./lib/ld.so": "x86_64-linux-gnu/libc.so.6"}, tree)
    assert tree.read("usr/lib/x86_64-linux-gnu/libc.so.6") == b"c"
    assert tree.read("lib/ld.so") == b"c"
    assert dict(tree)["lib"].target == "usr/lib"
    assert tree.names("lib") == ["ld.so", "x86_64-linux-gnu"]


@pytest.mark.parametrize(("path", "target", "where"), [
    ("a/b", "/c", "c"), ("a/b", "c", "a/c"), ("a/b", "../c", "c"), ("a/b", "../../../c", "c")])
def test_a_link_leads_where_it_leads_in_a_container(path: str, target: str, where: str) -> None:
    tree = Tree()
    tree.link(path, target)
    assert tree.resolve(path) == where


def test_links_in_a_circle_are_an_error() -> None:
    tree = Tree()
    tree.link("a", "b")
    tree.link("b", "a")
    with pytest.raises(ValueError, match="too many symbolic links"):
        tree.resolve("a")


def test_names_that_lead_out_of_the_image_stay_in_it() -> None:
    assert [path for path, _ in unpacked({"../../etc/passwd": b"x", "/abs": b"y"})] == ["abs", "etc", "etc/passwd"]


def test_a_layer_takes_away_and_hides() -> None:
    tree = unpacked({"a/one": b"1", "a/two": b"2", "b/old": b"3", "c": b"4"})
    unpacked({"a/.wh.one": b"", "b/.wh..wh..opq": b"", "b/new": b"5", ".wh.c": b""}, tree, whiteouts=True)
    assert [path for path, node in tree if node.data is not None] == ["a/two", "b/new"]


def test_a_file_in_place_of_a_folder_and_back() -> None:
    tree = unpacked({"a/b": b"1"})
    tree.file("a", b"2")
    assert [path for path, _ in tree] == ["a"]
    tree.folder("a")
    assert tree.kind("a") == "folder"


def test_programs_of_other_users_become_plain_ones() -> None:
    tree = unpacked({"bin/su": b"x"}, mode=0o4755)
    assert dict(tree)["bin/su"].mode == 0o755


def test_the_layer_is_the_same_whatever_came_first() -> None:
    first = unpacked({"a/b": b"1", "c": "a/b", "tmp/": b""})
    second = Tree()
    second.folder("tmp")
    second.link("c", "a/b")
    second.file("a/b", b"1")
    assert first.tar() == second.tar()
    with tarfile.open(fileobj=io.BytesIO(first.tar())) as archive:
        assert [(entry.name, entry.mode, entry.uid, entry.uname, entry.mtime) for entry in archive] == [
            ("a", 0o755, 0, "", EPOCH), ("a/b", 0o644, 0, "", EPOCH), ("c", 0o777, 0, "", EPOCH),
            ("tmp", 0o755, 0, "", EPOCH)]


def test_a_layer_that_is_read_again_is_the_same() -> None:
    tree = unpacked({"a/b": b"1", "c": "a/b", "tmp/": b""})
    again = Tree()
    with tarfile.open(fileobj=io.BytesIO(tree.tar())) as archive:
        again.unpack(archive)
    assert list(again) == list(tree)
