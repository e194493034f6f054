"""The pins of images, and what of the repository must not know of a processor."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from image_parts import ROOT
from images import inputs
from images.platforms import PLATFORMS, Platform
from scripts import load

PIN = re.compile(r"^([a-z0-9.-]+)==([^ \\]+) ?(.*)\\$", re.MULTILINE)
IMAGES = ("operator", "sidecar", "engine")


def pins(path: Path) -> dict[str, str]:
    return {found[1]: found[2] for found in PIN.finditer(path.read_text())}


@pytest.mark.parametrize("name", IMAGES)
def test_both_platforms_have_the_same_versions(name: str) -> None:
    first, second = (pins(inputs.lock(name, platform)) for platform in PLATFORMS)
    assert first == second
    assert first


@pytest.mark.parametrize("name", IMAGES)
def test_images_have_the_versions_that_tests_run_with(name: str) -> None:
    tested = {found[1]: found[2] for found in re.finditer(
        r"^([a-z0-9.-]+)==([^ \\]+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)}
    found = pins(inputs.lock(name, PLATFORMS[0]))
    assert {package: version for package, version in found.items() if tested.get(package, version) != version} == {}


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
@pytest.mark.parametrize("name", IMAGES)
def test_a_lock_is_for_its_platform_by_hashes_and_names_no_registry(name: str, platform: Platform) -> None:
    text = inputs.lock(name, platform).read_text()
    assert f"--python-platform {platform.machine}-manylinux_2_28" in text
    for block in re.split(r"\n(?=[a-z0-9])", text)[1:]:
        assert "--hash=sha256:" in block, block
        assert ";" not in block.partition("\n")[0], "what a wheel is for is said by the file, not by a condition"
    assert "://" not in text
    assert not re.search(r"^--(index|extra)", text, re.MULTILINE)


def asked_for(path: Path) -> set[str]:
    """Packages that an .in file names, also by those that it includes."""
    found: set[str] = set()
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            found |= asked_for(path.parent / line.removeprefix("-r "))
        elif (name := re.match(r"[a-z0-9-]+", line)) is not None:
            found.add(name[0])
    return found


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
@pytest.mark.parametrize("name", IMAGES)
def test_a_lock_has_all_that_is_asked_for(name: str, platform: Platform) -> None:
    wanted = asked_for(ROOT / f"requirements/{name}-image.in")
    assert wanted <= pins(inputs.lock(name, platform)).keys()
    assert wanted


def test_what_the_sidecars_package_declares_is_what_is_pinned() -> None:
    declared = tomllib.loads((ROOT / "sidecar/pyproject.toml").read_text())["project"]["dependencies"]
    assert asked_for(ROOT / "requirements/sidecar.in") == set(declared)


def test_pins_are_made_for_each_platform() -> None:
    wanted = {platform.name: f"{platform.machine}-manylinux_2_28" for platform in PLATFORMS}
    assert wanted == load(ROOT / "scripts/pins.py").PLATFORMS


def test_ci_builds_for_its_own_machine_alone() -> None:
    """What both platforms cost is a campaign's."""
    (command,) = load(ROOT / "scripts/tier_table.py").ROWS["build-images"].commands
    assert command[1:] == ("-m", "images", "build")
    for path in (ROOT / "e2e").glob("*.py"):
        assert not re.search(r"--platforms\W+(arm64|amd64,)", path.read_text()), path


def test_nothing_that_is_applied_asks_for_a_processor() -> None:
    """A cluster may have both: the operator on amd64, engines on arm64."""
    folders = ("manifests", "charts", "crds", "examples", "operator/src")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")
             if path.suffix in {".yaml", ".py", ".tpl", ".json"} and "kubernetes.io/arch" in path.read_text()]
    assert found == []
