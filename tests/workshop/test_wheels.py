"""The wheels of a release: the same bytes each time, and what they do where there is no checkout and no compiler."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import elf
import pytest
from images import inputs, wheels
from images.platforms import native
from images.tools import ImageError, default_cache
from images.tree import EPOCH
from release import house, toolbox

ROOT = Path(__file__).resolve().parents[2]
VERSION = inputs.version()
EXAMPLE = ROOT / "examples/local/1p1d.yaml"
pytestmark = pytest.mark.timeout(3600)


def sums(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


def compiled_here() -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (ROOT / "sidecar").rglob("*.so")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("house")
    before = compiled_here()
    house.build(out)
    assert compiled_here() == before, "a build of wheels must not touch what the checkout runs"
    return out


class Fresh:
    """An environment of its own, whose programs find neither the checkout nor a compiler."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "LANG": "C.UTF-8", "CC": "false"}
        self.pinned = wheels.download(default_cache(), native(), inputs.lock("operator", native()),
                                      f"3.{sys.version_info.minor}", house.GLIBC)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.bin / words[0]), *words[1:]], cwd=self.bin, env=self.env | env, capture_output=True,
                              text=True, check=False, timeout=1800)

    def install(self, *words: str) -> None:
        done = self.run("python", "-m", "pip", "--isolated", "install", "-q", "--disable-pip-version-check", "--no-index",
                        "--only-binary=:all:", "--find-links", str(self.pinned), *words)
        assert done.returncode == 0, done.stderr

    @property
    def site(self) -> Path:
        (found,) = self.bin.parent.glob("lib/python3*/site-packages")
        return found


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    made = Fresh(tmp_path_factory.mktemp("fresh"))
    made.install("--find-links", str(built), "xpyd")
    return made


def test_two_builds_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    house.build(tmp_path)
    assert sums(tmp_path) == sums(built)


def test_a_house_has_every_wheel_and_the_pure_one_apart(built: Path) -> None:
    assert set(sums(built)) == {
        f"xpyd-{VERSION}-py3-none-any.whl", f"xpyd_operator-{VERSION}-py3-none-any.whl",
        *(f"xpyd_sidecar-{VERSION}-cp311-abi3-manylinux_2_28_{machine}.whl" for machine in ("x86_64", "aarch64")),
        f"pure/xpyd_sidecar-{VERSION}-py3-none-any.whl"}


def test_compiled_parts_are_hardened_on_both_platforms(built: Path, tmp_path: Path) -> None:
    for wheel in built.glob("*manylinux*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts = {Path(name).name: archive.extract(name, tmp_path / wheel.stem) for name in archive.namelist()
                     if name.endswith(".so")}
        found = {name: elf.read(Path(path)) for name, path in parts.items()}
        assert {name: (each.bind_now, each.relro) for name, each in found.items()} == dict.fromkeys(parts, (True, True))
        assert "__stack_chk_fail" in found["_fast.abi3.so"].undefined
        assert "__read_chk" in found["_stripes.abi3.so"].undefined, "functions of the C library are not fortified"


def test_every_wheel_has_license_readme_and_exact_pins_of_its_own_kind(built: Path) -> None:
    for wheel in built.rglob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        assert any(name.endswith("licenses/LICENSE") for name in names), wheel.name
        assert "\n\n# xpyd" in metadata, "no readme"
        own = re.findall(r"^Requires-Dist: (xpyd.*)$", metadata, re.MULTILINE)
        assert all(re.fullmatch(rf"xpyd-(operator|sidecar)(\[\w+\])?=={re.escape(VERSION)}(; extra == '\w+')?", line)
                   for line in own), own
        assert bool(own) == ("sidecar" not in wheel.name)


def test_without_checkout_and_compiler_the_command_works_and_says_that_it_is_compiled(fresh: Fresh) -> None:
    done = fresh.run("xpyd", "--version")
    assert (done.returncode, done.stdout) == (0, f"xpyd {VERSION} (compiled)\n"), done.stderr
    assert fresh.run("python", "-m", "pip", "check").returncode == 0
    done = fresh.run("xpyd", "check", "-f", str(EXAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(ROOT) not in fresh.run("python", "-c", "import xpyd_operator; print(xpyd_operator.__file__)").stdout


def test_without_vllm_up_says_what_to_install(fresh: Fresh) -> None:
    done = fresh.run("xpyd", "up", "-f", str(EXAMPLE))
    assert done.returncode == 2
    assert "lacks vllm" in done.stderr


def test_the_pure_wheel_is_taken_by_name_alone_and_says_that_it_is_slow(built: Path, fresh: Fresh, tmp_path: Path) -> None:
    offered = ("--no-deps", "--find-links", str(built), "--find-links", str(built / house.PURE))
    fresh.install("--dry-run", "--ignore-installed", "--report", str(tmp_path / "report.json"), *offered, "xpyd-sidecar")
    (taken,) = json.loads((tmp_path / "report.json").read_text())["install"]
    assert "-abi3-" in taken["download_info"]["url"], "a pure wheel was preferred"
    (pure,) = (built / house.PURE).glob("*.whl")
    fresh.install("--no-deps", "--target", str(tmp_path / "pure"), str(pure))
    done = fresh.run("xpyd", "--version", PYTHONPATH=str(tmp_path / "pure"))
    assert done.stdout.startswith(f"xpyd {VERSION} (pure Python: slow, and without the link tcp"), done.stdout + done.stderr
    assert fresh.run("xpyd", "check", "-f", str(EXAMPLE), PYTHONPATH=str(tmp_path / "pure")).returncode == 0


def test_packages_of_two_versions_are_refused_by_name(fresh: Fresh, tmp_path: Path) -> None:
    shutil.copytree(fresh.site / "xpyd_sidecar", tmp_path / "xpyd_sidecar")
    init = tmp_path / "xpyd_sidecar/__init__.py"
    init.write_text(init.read_text().replace(f'__version__ = "{VERSION}"', '__version__ = "99.0.0"'))
    for words in (("check", "-f", str(EXAMPLE)), ("--version",)):
        done = fresh.run("xpyd", *words, PYTHONPATH=str(tmp_path))
        assert done.returncode == 2
        assert f"xpyd-operator {VERSION} and xpyd-sidecar 99.0.0 do not fit" in done.stderr
        assert f"pip install xpyd=={VERSION}" in done.stderr


def test_where_the_compiler_fails_the_build_fails_and_the_checkout_keeps_its_parts(tmp_path: Path) -> None:
    before = compiled_here()
    assert before, "nothing is compiled in this checkout"
    command = [str(toolbox.python()), "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    env = os.environ | {"CC": "false", "XPYD_PLAIN": "", "SOURCE_DATE_EPOCH": str(EPOCH)}
    done = subprocess.run(command, cwd=ROOT / "sidecar", env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "_fast.c was not compiled" in done.stderr + done.stdout
    assert "XPYD_PLAIN=1" in done.stderr + done.stdout
    assert list(tmp_path.iterdir()) == []
    assert compiled_here() == before
    done = subprocess.run(command, cwd=ROOT / "sidecar", env=env | {"XPYD_PLAIN": "1"}, capture_output=True, text=True,
                          check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (pure,) = tmp_path.iterdir()
    house.check(pure, None, toolbox.python())
    assert compiled_here() == before


def test_a_wheel_that_is_not_what_its_name_says_is_refused(built: Path, tmp_path: Path) -> None:
    (pure,) = (built / house.PURE).glob("*.whl")
    with pytest.raises(ImageError, match="holds no compiled part, not _answer, _fast, _moves, _stripes"):
        house.check(pure, native(), toolbox.python())
    named = tmp_path / f"xpyd_sidecar-{VERSION}-py3-none-any.whl"
    named.write_bytes(next(built.glob("*x86_64.whl")).read_bytes())
    with pytest.raises(ImageError, match="not none"):
        house.check(named, None, toolbox.python())


def test_the_umbrella_pins_this_version_and_every_extra_of_the_sidecar() -> None:
    umbrella, sidecar = (tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
                         for name in ("distribution", "sidecar"))
    assert umbrella["dependencies"] == [f"xpyd-operator=={VERSION}", f"xpyd-sidecar=={VERSION}"]
    assert umbrella["optional-dependencies"] == {
        name: [f"xpyd-sidecar[{name}]=={VERSION}"] for name in sorted(sidecar["optional-dependencies"])}


def test_auditwheels_words_count_only_for_the_platform_and_no_newer_c_library() -> None:
    platform = native()
    said = f'it is consistent with the following platform tag: "manylinux_2_%s_{platform.machine}".'
    assert house.older(said % 17, platform)
    assert not house.older(said % 34, platform)
    assert not house.older('platform tag: "linux_x86_64"', platform)
    assert not house.older(said.replace(platform.machine, "riscv64") % 17, platform)
