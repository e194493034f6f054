"""Programs are built once for the same sources, and a build that fails or is cut off leaves nothing to be taken for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testcluster import build, packages
from testcluster.build import Program
from testcluster.errors import BuildFailed, Missing

GOOD = 'package main\n\nvar word = "unset"\n\nfunc main() { println(word) }\n'
pytestmark = [pytest.mark.test_all, pytest.mark.timeout(300)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "go" / "tiny"
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module example.test/tiny\n\ngo 1.24.0\n")
    (folder / "main.go").write_text(GOOD)
    monkeypatch.setattr(build, "SOURCES", folder.parent)
    monkeypatch.setattr(build, "PROGRAMS", {"tiny": Program(links=("other",), stamps=("main.word=hello",))})
    monkeypatch.setenv("XPYD_CLUSTER_CACHE", str(tmp_path / "cache"))
    return folder


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}


def test_built_once_with_its_links_and_stamps(module: Path, capfd: pytest.CaptureFixture[str]) -> None:
    programs = build.ensure(["tiny"])["tiny"]
    done = subprocess.run([programs / "other"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "hello\n"
    assert "built tiny" in capfd.readouterr().err
    assert build.ensure(["tiny"])["tiny"] == programs
    assert capfd.readouterr().err == ""


def test_other_sources_are_another_build_and_old_ones_go(module: Path, tmp_path: Path) -> None:
    seen = []
    for number in range(build.KEPT + 2):
        (module / "main.go").write_text(GOOD + f"\n// {number}\n")
        seen.append(build.ensure(["tiny"])["tiny"].parent.name)
        os.utime(tmp_path / "cache" / seen[-1], (number, number))
    assert folders(tmp_path) == set(seen[-build.KEPT :])


def test_a_failed_build_quotes_the_compiler_and_leaves_nothing(module: Path, tmp_path: Path) -> None:
    (module / "main.go").write_text("package main\n\nfunc main() { nothing() }\n")
    with pytest.raises(BuildFailed, match="undefined: nothing"):
        build.ensure(["tiny"])
    (module / "main.go").write_text(GOOD)
    programs = build.ensure(["tiny"])["tiny"]
    assert folders(tmp_path) == {programs.parent.name}


def test_a_build_that_was_killed_is_done_again(module: Path, tmp_path: Path) -> None:
    """The compiler is replaced by one that writes half a binary and hangs."""
    tools = tmp_path / "tools"
    tools.mkdir()
    real = subprocess.run(["which", "go"], capture_output=True, text=True, check=True).stdout.strip()
    (tools / "go").write_text(f'#!/bin/sh\n[ "$1" = build ] || exec {real} "$@"\n'
                              'for word; do [ "$last" = -o ] && echo half > "$word"; last=$word; done\nsleep 60\n')
    (tools / "go").chmod(0o755)
    program = (f"from testcluster import build; from pathlib import Path; build.SOURCES = Path({str(module.parent)!r})\n"
               "build.PROGRAMS = {'tiny': build.Program(links=('other',), stamps=('main.word=hello',))}\n"
               "build.ensure(['tiny'])")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": f"{tools}:{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True) as builder:
        end = time.monotonic() + 120
        while not list((tmp_path / "cache").glob("tiny.partial-*/bin/tiny")):
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(builder.pid, signal.SIGKILL)
    programs = build.ensure(["tiny"])["tiny"]
    assert folders(tmp_path) == {programs.parent.name}
    assert subprocess.run([programs / "tiny"], timeout=60, check=False).returncode == 0


def test_without_a_compiler_it_says_what_to_install(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Missing, match=r"install Go 1\.26"):
        build.ensure(["tiny"])


def test_services_of_packages_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, apt = tmp_path / "policy-rc.d", tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    apt.write_text(f'#!/bin/sh\n{policy} containerd start; echo "$1 $?" >> {tmp_path}/asked\n'
                   f'if [ "$1" = install ]; then ln -s /bin/true {apt.parent}/wanted; fi\n')
    apt.chmod(0o755)
    monkeypatch.setattr(packages, "POLICY", policy)
    monkeypatch.setattr(packages, "COMMANDS", {"wanted": "some-package"})
    monkeypatch.setenv("PATH", f"{apt.parent}:{os.environ['PATH']}")
    packages.ensure()
    assert (tmp_path / "asked").read_text() == "update 101\ninstall 101\n"
    assert not policy.exists()
    (apt.parent / "wanted").unlink()
    policy.write_text("#!/bin/sh\nexit 42\n")
    policy.chmod(0o755)
    packages.ensure()
    assert (tmp_path / "asked").read_text().splitlines()[2:] == ["update 42", "install 42"]
    assert policy.exists()


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "COMMANDS", {"wanted": "some-package"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Missing, match="some-package"):
        packages.ensure()
