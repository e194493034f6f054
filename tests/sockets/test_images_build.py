from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from image_parts import ROOT, elf_file, wheel
from images import build as building
from images import bytecode, foreign, inputs
from images.foreign import Base
from images.hosts import HostPaths
from images.oci import Layers
from images.platforms import PLATFORMS, native
from images.tools import ImageError
from images.tree import Tree

AMD64, ARM64 = PLATFORMS
OTHER = next(each for each in PLATFORMS if each != native())
VERSION = bytecode.OURS
LIBC = b"\0".join([elf_file(183), b"GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\nCopyright"])


def base_tree(version: str = VERSION, library: bytes = LIBC) -> Tree:
    tree = Tree()
    tree.file(f"usr/bin/python{version}", elf_file(183))
    tree.link("usr/local/bin/python3", f"/usr/bin/python{version}")
    tree.file("usr/lib/aarch64-linux-gnu/libc.so.6", library)
    tree.file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n")
    return tree


def described(tree: Tree, path: str = "/usr/local/bin:/usr/bin") -> Base:
    return foreign.described_as((), tree, path)


def test_a_base_is_known_by_its_files() -> None:
    found = described(base_tree("3.12"))
    assert (found.python, found.version, found.glibc) == ("usr/local/bin/python3", "3.12", "2.36")
    assert described(base_tree(library=b"musl libc")).glibc == ""


@pytest.mark.parametrize(("version", "path", "words"), [
    ("3.12", "/opt/bin", "no python3 in /opt/bin"), ("3.10", "/usr/local/bin", "has Python 3.10: 3.11 or later")])
def test_a_base_that_cannot_be_used_is_refused(version: str, path: str, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        described(base_tree(version), path)


def test_an_environment_is_what_venv_would_make_with_its_byte_code(tmp_path: Path) -> None:
    tree = Tree()
    building.environment(tree, [wheel(tmp_path, "it", {"it.py": b"x = 1\n"}, programs=["it=it:x"])], described(base_tree()))
    assert tree.names("opt/xpyd/bin") == ["it", "python", "python3", f"python{VERSION}"]
    assert dict(tree)["opt/xpyd/bin/python"].target == "/usr/local/bin/python3"
    assert b"home = /usr/local/bin\n" in (tree.read("opt/xpyd/pyvenv.cfg") or b"")
    (compiled,) = tree.names(f"opt/xpyd/lib/python{VERSION}/site-packages/__pycache__")
    code = tree.read(f"opt/xpyd/lib/python{VERSION}/site-packages/__pycache__/{compiled}") or b""
    assert code[4] & 0b11 == 0b01, "unchecked-hash: never compared with the source"
    assert f"/opt/xpyd/lib/python{VERSION}/site-packages/it.py".encode() in code
    assert str(tmp_path).encode() not in code


def test_byte_code_is_the_same_in_every_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of strings and names that are used twice come in the order of hashes, and of what the compiler saw before."""
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv("PYTHONOPTIMIZE", seed)
        tree = Tree()
        for number in range(3):
            tree.file(f"lib/m{number}.py", b"def f(a):\n    return a in {'alpha', 'beta', 'gamma', 'delta'}, 'alpha'\n")
        bytecode.add(tree, ["lib"], VERSION)
        made.append(tree.tar())
        assert len(tree.names("lib/__pycache__")) == 3
    assert made[0] == made[1]


def test_what_is_no_python_fails_the_build() -> None:
    tree = Tree()
    tree.file("lib/it.py", b"def (\n")
    with pytest.raises(ImageError, match="exit code 1"):
        bytecode.add(tree, ["lib"], VERSION)


def test_a_python_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match=r"install python3\.99 on this machine"):
        bytecode.compiler("3.99")


def test_the_user_has_a_name_once() -> None:
    tree = Tree()
    building.add_user(tree, base_tree())
    assert (tree.read("etc/passwd") or b"").splitlines()[1].startswith(b"xpyd:x:65532:65532:")
    assert tree.read("etc/group") == b"xpyd:x:65532:\n"
    again = Tree()
    building.add_user(again, tree)
    assert len(again) == 0


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is a Debian, in an environment that has vLLM."""
    monkeypatch.setattr(building, "codename", lambda: "bookworm")
    monkeypatch.setattr(building, "host_paths", lambda: HostPaths(python="/venv/bin/python", mounts=[]))


@pytest.mark.usefixtures("names")
def test_names_follow_from_inputs_and_platforms() -> None:
    (operator, *_) = inputs.KINDS
    name = {platforms: building.name_of(operator, [building.own_base(operator, each) for each in platforms], platforms)
            for platforms in ((native(),), (OTHER,), PLATFORMS)}
    assert len({text.rpartition("-")[2] for text in name.values()}) == 3
    head = f"localhost/xpyd-operator:{inputs.version()}"
    assert re.fullmatch(rf"{re.escape(head)}-[0-9a-f]{{12}}", name[native(),])
    assert name[OTHER,].startswith(f"{head}-{OTHER.name}-")
    assert name[PLATFORMS].startswith(f"{head}-index-")
    assert building.name_of(operator, ["another"], (native(),)) != name[native(),]


def test_every_file_that_decides_is_an_input() -> None:
    """A part of the recipe that is not named would leave an old image in place."""
    recipe = {path.name for path in inputs.RECIPE}
    beside = {"__init__.py", "__main__.py", "hosts.py", "push.py", "tools.py"}
    assert recipe | beside == {path.name for path in (ROOT / "images").glob("*.py")}
    for kind in inputs.KINDS:
        for platform in PLATFORMS:
            files = inputs.files_of(kind, platform)
            assert all(path.is_file() for path in files)
            assert (inputs.lock(kind.name, platform) in files) == bool(kind.projects)
            other = next(each for each in PLATFORMS if each != platform)
            assert not any(path.name.endswith(f"-{other.name}.txt") for path in files)


@pytest.mark.usefixtures("names")
def test_an_image_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str]] = []

    def one(cache: Path, kind: inputs.Kind, base: str | None, platform: object, image: str) -> None:
        built.append((kind.name, getattr(platform, "name", "")))
        tree = Tree()
        tree.file("name", kind.name.encode())
        layer = Layers(tmp_path / kind.name).add("own", tree)
        building.oci.Image(next(each for each in PLATFORMS if each == platform), {}, [layer]).write(
            building.archive_of(cache, image), image)

    monkeypatch.setattr(building, "_one", one)
    first = building.build(tmp_path)
    assert built == [(name, native().name) for name in ("operator", "sidecar", "engine-cpu")], "only this machine's"
    assert building.build(tmp_path) == first
    assert len(built) == 3
    both = building.build(tmp_path, platforms=PLATFORMS)
    assert built[3:] == [("operator", OTHER.name), ("sidecar", OTHER.name)]
    assert both["operator"]["platforms"] == ["amd64", "arm64"]
    assert building.build(tmp_path, platforms=PLATFORMS) == both
    with pytest.raises(ImageError, match="engine-cpu is for this machine's"):
        building.build(tmp_path, only=["engine-cpu"], platforms=PLATFORMS)


def test_old_builds_go_and_each_platform_keeps_its_own(tmp_path: Path) -> None:
    (operator, *_) = inputs.KINDS
    for apart in ("", "arm64-", "index-"):
        for number in range(8):
            path = tmp_path / f"xpyd-operator-0.1.0-{apart}{number:012x}.tar"
            path.touch()
            os.utime(path, (number, number))
    building._prune(tmp_path, operator)
    left = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert len(left) == 18
    assert all(re.search(r"-(arm64-|index-)?00000000000[2-7]\.tar$", name) for name in left)
