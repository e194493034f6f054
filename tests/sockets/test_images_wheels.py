from __future__ import annotations

import hashlib
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest
from image_parts import ROOT, elf_file, wheel
from images import elf, wheels
from images.platforms import PLATFORMS, native
from images.tools import ImageError, default_cache
from images.tree import Tree

AMD64, ARM64 = PLATFORMS
SITE = "opt/xpyd/lib/python3.11/site-packages"


def installed(path: Path, tree: Tree | None = None) -> Tree:
    tree = Tree() if tree is None else tree
    wheels.install(tree, path, "opt/xpyd", "3.11")
    return tree


def test_a_wheel_is_unpacked_where_pip_would_put_it(tmp_path: Path) -> None:
    tree = installed(wheel(tmp_path, "it", {
        "it/__init__.py": b"", "it/_it.abi3.so": b"x", "it-1.0.data/platlib/more.py": b"2",
        "it-1.0.data/data/share/it.txt": b"3", "it-1.0.data/scripts/run-it": b"#!python\nimport it\n"}))
    files = {path: node.mode for path, node in tree if node.data is not None and ".dist-info" not in path}
    assert files == {f"{SITE}/it/__init__.py": 0o644, f"{SITE}/it/_it.abi3.so": 0o755, f"{SITE}/more.py": 0o644,
                     "opt/xpyd/share/it.txt": 0o644, "opt/xpyd/bin/run-it": 0o755}
    assert tree.read("opt/xpyd/bin/run-it") == b"#!/opt/xpyd/bin/python\nimport it\n"
    assert tree.read(f"{SITE}/it-1.0.dist-info/METADATA") is not None


def test_entry_points_become_programs(tmp_path: Path) -> None:
    tree = installed(wheel(tmp_path, "it", {"it.py": b""}, programs=["it=it:main", "it-more = it.sub:Main.run [extra]"]))
    assert tree.names("opt/xpyd/bin") == ["it", "it-more"]
    script = (tree.read("opt/xpyd/bin/it-more") or b"").decode()
    assert script.startswith("#!/opt/xpyd/bin/python\n")
    assert "from it.sub import Main\n" in script
    assert "sys.exit(Main.run())" in script
    compile(script, "it-more", "exec")


@pytest.mark.parametrize(("files", "words"), [
    ({"it-1.0.data/headers/it.h": b""}, "has no place"), ({"../it.py": b""}, "leads out"),
    ({"it-1.0.data/data/../../etc/passwd": b""}, "leads out"), ({"there.py": b"2"}, "is there already")])
def test_files_that_go_elsewhere_are_refused(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    tree = Tree()
    tree.file(f"{SITE}/there.py", b"1")
    with pytest.raises(ImageError, match=words):
        installed(wheel(tmp_path, "it", files), tree)


def test_extras_of_several_pythons_lie_over_each_other(tmp_path: Path) -> None:
    both = [wheel(tmp_path, "it", {"it/__init__.py": b"1", f"it/_it.{tag}.so": b"x"}, tag=tag)
            for tag in ("cp311", "cp312")]
    tree = Tree()
    wheels.extras(tree, "opt/e", both)
    assert tree.names("opt/e/it") == ["__init__.py", "_it.cp311.so", "_it.cp312.so"]
    assert tree.names("opt/e/it-1.0.dist-info") == ["METADATA"]
    other = wheel(tmp_path, "it", {"it/__init__.py": b"2"}, tag="cp313")
    with pytest.raises(ImageError, match=r"it/__init__\.py differs between versions of Python"):
        wheels.extras(tree, "opt/e", [other])


def test_wheels_are_asked_for_by_the_platform_and_never_newer_than_the_base() -> None:
    found = wheels.tags(ARM64, "2.36")
    assert found[0] == "manylinux_2_36_aarch64"
    assert found[-2:] == ["manylinux_2_17_aarch64", "manylinux2014_aarch64"]
    assert {tag.rpartition("_x86_64")[1] for tag in wheels.tags(AMD64, "2.28")} == {"_x86_64"}
    for wrong in ("", "2.12", "1.2", "musl"):
        with pytest.raises(ImageError, match="C library"):
            wheels.tags(ARM64, wrong)


def test_what_is_kept_must_be_what_is_pinned(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    one, lock = wheel(tmp_path / "kept", "it", {"it.py": b""}), tmp_path / "lock.txt"
    right = hashlib.sha256(one.read_bytes()).hexdigest()
    lock.write_text(f"it==1.0 \\\n    --hash=sha256:{right}\n    # via more==2\n")
    wheels.verify(tmp_path / "kept", lock)
    lock.write_text(f"it==1.0 \\\n    --hash=sha256:{right}\nmore==2 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ImageError, match=r"has 1 wheels for the 2 pins of lock\.txt; remove it"):
        wheels.verify(tmp_path / "kept", lock)
    lock.write_text(f"it==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ImageError, match=r"it-1\.0-py3-none-any\.whl is none of them"):
        wheels.verify(tmp_path / "kept", lock)


def test_the_compiler_of_this_machine_or_the_one_across(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usr/include/python3.11").mkdir(parents=True)
    monkeypatch.setenv("CC", "ccache gcc")
    assert wheels.compiler(AMD64, None, AMD64) == "ccache gcc"
    across = shlex.split(wheels.compiler(ARM64, tmp_path, AMD64))
    assert across == ["aarch64-linux-gnu-gcc", f"-I{tmp_path}/usr/include/python3.11", f"-I{tmp_path}/usr/include"]
    assert wheels.compiler(AMD64, tmp_path, ARM64).split()[0] == "x86_64-linux-gnu-gcc"
    with pytest.raises(ImageError, match="headers of Python"):
        wheels.compiler(ARM64, None, AMD64)


def package(folder: Path, machines: dict[str, int]) -> tuple[Path, Path]:
    """A wheel with modules for these machines, and the package that it was made from."""
    project = folder / "project"
    project.mkdir()
    for name in ("_one.c", "_two.c", "not.c"):
        (project / name).touch()
    return wheel(folder, "it", {f"it/{name}.abi3.so": elf_file(machine) for name, machine in machines.items()}), project


@pytest.mark.parametrize(("machines", "missing"), [
    ({"_one": 183, "_two": 183}, []), ({"_one": 183, "_two": 62}, ["_two.c"]), ({}, ["_one.c", "_two.c"])])
def test_what_is_not_compiled_for_the_platform_is_missing(tmp_path: Path, machines: dict[str, int],
                                                          missing: list[str]) -> None:
    assert wheels._missing(*package(tmp_path, machines), ARM64) == missing


@pytest.mark.unsanitized
def test_our_package_is_compiled_across_beside_nothing_of_the_sources(tmp_path: Path) -> None:
    """Where the compiler is installed and Python's headers were taken: `campaign-arm64` does both, CI does neither."""
    platform = next(each for each in PLATFORMS if each != native())
    if shutil.which(platform.compiler) is None or not list((default_cache() / "headers").glob(f"*-{platform.name}")):
        pytest.skip(f"{platform.compiler} or Python's headers are not here")
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "sidecar").rglob("*.so")}
    made = wheels.own(default_cache(), "sidecar", tmp_path / "own", platform)
    with zipfile.ZipFile(made) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        found = [elf.read(archive.read(name)) for name in modules]
    assert sorted(Path(name).name for name in modules) == [
        "_answer.abi3.so", "_fast.abi3.so", "_moves.abi3.so", "_stripes.abi3.so"]
    assert [module.machine for module in found if module is not None] == [platform.elf] * 4
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "sidecar").rglob("*.so")} == before


@pytest.mark.unsanitized
def test_a_compiler_that_fails_fails_the_build_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ImageError, match="exit code 1"):
        wheels.own(tmp_path, "sidecar", tmp_path / "own", native())
