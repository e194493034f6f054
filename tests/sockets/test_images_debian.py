from __future__ import annotations

from pathlib import Path

import image_parts
import pytest
from image_parts import deb
from images import base, debian
from images.platforms import PLATFORMS
from images.tools import ImageError
from images.tree import Tree

AMD64, ARM64 = PLATFORMS
BASE = {
    "base-passwd": {"usr/share/base-passwd/passwd.master": b"root:*:0:0:root:/root:/bin/bash\n",
                    "usr/share/base-passwd/group.master": b"root:*:0:\n", "usr/share/man/man8/x.8": b"x"},
    "ca-certificates": {"usr/share/ca-certificates/mozilla/B.crt": b"BBB\n",
                        "usr/share/ca-certificates/mozilla/A.crt": b"AAA",
                        "usr/share/doc/ca-certificates/copyright": b"MPL", "usr/share/doc/ca-certificates/README": b"x"},
    "debconf": {"usr/bin/debconf": b"x"},
    "python3": {"usr/bin/python3": "python3.11", "usr/bin/python3.11": image_parts.elf_file(183, ["libc.so.6"]),
                "usr/lib/python3.11/os.py": b"name = 'posix'\n",
                "usr/lib/python3.11/sitecustomize.py": "/etc/python3.11/sitecustomize.py",
                "etc/python3.11/sitecustomize.py": b"", "usr/share/doc/python3/changelog.gz": b"x"},
    "libc6": {"lib/aarch64-linux-gnu/libc.so.6": image_parts.elf_file(183),
              "lib/ld-linux-aarch64.so.1": "aarch64-linux-gnu/ld.so"},
}


def packages(folder: Path, contents: dict[str, dict[str, bytes | str]]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, files in contents.items():
        (folder / f"{name}.deb").write_bytes(deb(name, files))
    return sorted(folder.glob("*.deb"))


@pytest.mark.parametrize("packing", ["xz", "gz"])
def test_a_package_is_unpacked(packing: str) -> None:
    fields, control, files = debian.unpack(deb("it", {"usr/bin/it": b"odd", "etc/it": "../usr/bin/it"}, packing))
    assert (fields["Package"], fields["Version"]) == ("it", "1.0-1")
    assert b"of several lines" in control
    with files:
        assert [name for name in files.getnames() if "it" in name] == ["./usr/bin/it", "./etc/it"]


@pytest.mark.parametrize(("data", "words"), [
    (b"PK\x03\x04", "not a Debian package"),
    (deb("it", {}).replace(b"data.tar.xz ", b"data.tar.zst"), "packed in another way"),
    (b"!<arch>\n", "without control.tar")])
def test_what_cannot_be_unpacked_is_named(data: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        debian.unpack(data)


def test_scanners_find_what_is_installed_and_nothing_else(tmp_path: Path) -> None:
    tree = Tree()
    archives = packages(tmp_path, {"it": {"usr/bin/it": b"x"}, "debconf": {"usr/bin/debconf": b"x"}})
    assert debian.install(tree, archives, ["debconf"]) == {"it": "1.0-1"}
    assert tree.names("var/lib/dpkg/status.d") == ["it"]
    assert tree.names("usr/bin") == ["it"]


def test_a_base_has_what_installations_would_have_written(tmp_path: Path) -> None:
    tree, versions = base.assemble(packages(tmp_path, BASE), ARM64)
    assert sorted(versions) == ["base-passwd", "ca-certificates", "libc6", "python3"]
    assert tree.read("etc/passwd") == BASE["base-passwd"]["usr/share/base-passwd/passwd.master"]
    assert tree.read("usr/lib/ssl/cert.pem") == b"AAA\nBBB\n"
    assert (tree.read("etc/nsswitch.conf") or b"").startswith(b"hosts: files")
    assert tree.read("usr/lib/aarch64-linux-gnu/libc.so.6") == tree.read("lib/aarch64-linux-gnu/libc.so.6") != b""
    assert tree.kind("usr/share/man") == ""
    assert [path for path, node in tree if path.startswith("usr/share/doc") and node.data is not None] == [
        "usr/share/doc/ca-certificates/copyright"]
    assert base.python_of(tree) == "3.11"
    assert dict(tree)["tmp"].mode == 0o1777


def test_the_same_packages_make_the_same_base(tmp_path: Path) -> None:
    """Their byte code too, which Python writes in another order now and then where nobody takes care."""
    first, second = (base.assemble(packages(tmp_path / name, BASE), ARM64)[0] for name in ("a", "b"))
    assert first.tar() == second.tar()
    assert first.names("usr/lib/python3.11/__pycache__") == ["os.cpython-311.pyc", "sitecustomize.cpython-311.pyc"]


@pytest.mark.parametrize(("without", "words"), [
    ("base-passwd", "no usr/share/base-passwd"), ("ca-certificates", "no certificates"), ("python3", "no python3"),
    ("libc6", r"usr/bin/python3.11 needs libc\.so\.6")])
def test_a_base_without_what_it_needs_is_refused(tmp_path: Path, without: str, words: str) -> None:
    archives = packages(tmp_path, {name: files for name, files in BASE.items() if name != without})
    with pytest.raises(ImageError, match=words):
        base.assemble(archives, ARM64)


def test_a_base_for_another_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="for processors of kind 183, not 62"):
        base.assemble(packages(tmp_path, BASE), AMD64)


def test_apt_keeps_to_its_folder_and_to_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(debian, "run", lambda command, **_: called.append(list(command)) or "")
    assert debian.closure(ARM64, tmp_path, ["python3"]) == []
    assert [words[-1] for words in called] == ["update", "python3"]
    for words in called:
        options = dict(word.split("=", 1) for word in words if "=" in word)
        assert options["APT::Architecture"] == options["APT::Architectures"] == "arm64"
        assert {Path(options[name]).is_relative_to(tmp_path) for name in options if name.startswith("Dir::")} == {True}
        assert Path(options["Dir::State::status"]).read_bytes() == b""
    assert "--download-only" in called[1]
