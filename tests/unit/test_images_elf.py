from __future__ import annotations

import sys
from pathlib import Path

import image_parts
import pytest
from image_parts import elf_file
from images import __main__ as command
from images import elf, platforms
from images.platforms import PLATFORMS
from images.tools import ImageError
from images.tree import Tree

AMD64, ARM64 = PLATFORMS


def test_a_file_says_its_processor_and_its_libraries() -> None:
    assert elf.read(elf_file(183, ["libc.so.6", "libm.so.6"])) == (183, ("libc.so.6", "libm.so.6"))
    assert elf.read(elf_file(62)) == (62, ())


def test_other_files_say_nothing() -> None:
    assert [elf.read(data) for data in (b"", b"#!/bin/sh", b"\x7fELF", b"\x7fELF\x01\x01" + b"\0" * 100)] == [None] * 4


@pytest.mark.parametrize("length", [20, 64, 100, 175, 180])
def test_a_broken_file_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="broken ELF"):
        elf.read(elf_file(62, ["libc.so.6"])[:length])


def test_this_python_and_the_extensions_are_of_this_machine() -> None:
    found = [Path(sys.executable).resolve(), *image_parts.ROOT.glob("sidecar/src/**/*.abi3.so")]
    for path in found:
        module = elf.read(path.read_bytes())
        assert module is not None
        assert module.machine == platforms.native().elf
        assert any(name.startswith("libc.so") for name in module.needed), path


def test_an_image_of_one_kind_with_its_libraries_is_right() -> None:
    tree, below = Tree(), Tree()
    tree.file("opt/x.so", elf_file(183, ["libc.so.6", "libown.so.1"]))
    tree.link("opt/libown.so.1", "x.so")
    tree.file("opt/x.py", b"import os")
    below.file("usr/lib/libc.so.6", b"")
    assert elf.check(tree, ARM64, below) == 1


@pytest.mark.parametrize(("data", "words"), [
    (elf_file(62), "opt/x.so is for processors of kind 62, not 183"),
    (elf_file(183, ["libgone.so.3"]), "opt/x.so needs libgone.so.3"),
    (elf_file(183, ["libc.so.6"])[:100], "opt/x.so is a broken ELF file")])
def test_what_would_not_start_is_named(data: bytes, words: str) -> None:
    tree = Tree()
    tree.file("opt/x.so", data)
    with pytest.raises(ImageError, match=words):
        elf.check(tree, ARM64)


def test_platforms_by_their_names() -> None:
    assert platforms.parse("arm64, linux/amd64") == PLATFORMS
    assert platforms.parse("arm64") == (ARM64,)
    assert platforms.parse("") == (platforms.native(),)
    with pytest.raises(ImageError, match="no images are made for riscv64; there are amd64, arm64"):
        platforms.parse("amd64,riscv64")


@pytest.mark.parametrize(("words", "names"), [
    (("push", "host/team"), ["amd64", "arm64"]), (("push", "host/team", "--platforms", "arm64"), ["arm64"]),
    (("build",), [platforms.native().name])])
def test_what_is_pushed_is_for_both_platforms_unless_one_is_named(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...],
                                                                  names: list[str]) -> None:
    asked: list[str] = []

    def build(cache: object, base: object, only: object, wanted: tuple[platforms.Platform, ...]) -> dict[str, object]:
        asked.extend(each.name for each in wanted)
        return {}

    monkeypatch.setattr(command, "build", build)
    monkeypatch.setattr(command, "push", lambda *_: {})
    assert command.main(words) == 0
    assert asked == names
