"""``python -m xpyd_sidecar.install``: what appears in the folder, what stays, what is refused."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_sidecar import install as module
from xpyd_sidecar.install import MARK, STAGE, InstallError, install, main, sources

FILES = {
    "site/pkg/__init__.py": "VALUE = 1\n",
    "site/pkg/deep/er.py": "VALUE = 2\n",
    "site/pkg/__pycache__/x.pyc": "byte code",
    "site/pkg-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n",
    "site/pkg-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\n",
    "site/pkg-1.0.dist-info/RECORD": "../../bin/pkg",
    "site/other/__init__.py": "",
    "extras/leaf/__init__.py": "LEAF = 3\n",
    "extras/leaf-2.0.dist-info/METADATA": "Name: leaf\n",
}
INSTALLED = {"pkg/__init__.py", "pkg/deep/er.py", "pkg-1.0.dist-info/METADATA", "pkg-1.0.dist-info/entry_points.txt",
             "leaf/__init__.py", "leaf-2.0.dist-info/METADATA", MARK}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return sources(tmp_path / "site" / "pkg", tmp_path / "extras")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_another_python_imports_the_copy_with_pythonpath_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "new" / "xpyd"
    done = install(target, folders)
    assert (done.copied, done.files) == (True, len(INSTALLED) - 1)
    assert files(target) == INSTALLED
    script = "import pkg.deep.er, leaf, importlib.metadata as m; print(pkg.__file__, leaf.LEAF, m.version('pkg'))"
    ended = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(target)}, capture_output=True, text=True,
                           check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(target / "pkg" / "__init__.py"), "3", "1.0"]


def test_an_engine_gets_all_of_xpyd_but_the_router(tmp_path: Path) -> None:
    """And what it gets runs without it: each module of it that needs no vLLM is imported."""
    site, package = tmp_path / "site", Path(module.__file__).parent
    shutil.copytree(package, site / "xpyd_sidecar", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "xpyd_sidecar-1.0.dist-info").mkdir()
    (site / "xpyd_sidecar-1.0.dist-info" / "METADATA").write_text("Name: xpyd-sidecar\n")
    (tmp_path / "extras").mkdir()
    target = tmp_path / "xpyd"
    install(target, sources(site / "xpyd_sidecar", tmp_path / "extras"))
    there = {path.name for path in (target / "xpyd_sidecar").iterdir()}
    assert "router" not in there
    assert {"agent", "contract", "dp", "engine", "kv", "member", "memory", "session", "threads", "transport"} <= there
    assert not install(target, sources(site / "xpyd_sidecar", tmp_path / "extras")).copied
    needed = ("agent.app", "agent.ask", "engine.model_download", "listening", "member", "session", "transport.tcp.fetch")
    script = f"import {', '.join(f'xpyd_sidecar.{each}' for each in needed)}; print(xpyd_sidecar.__file__)"
    ended = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(target)}, capture_output=True, text=True,
                           check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(target / "xpyd_sidecar" / "__init__.py")


def test_everyone_can_read_whatever_the_umask(folders: dict[str, Path], tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        install(tmp_path / "xpyd", folders)
    finally:
        os.umask(old)
    target = tmp_path / "xpyd"
    for path in (target, *target.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_a_second_run_changes_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "xpyd"
    install(target, folders)
    (target / "pkg" / "__pycache__").mkdir()  # what the engine's interpreter leaves there
    (target / "pkg" / "__pycache__" / "y.pyc").write_text("")
    before = {path: path.stat().st_ino for path in target.rglob("*")}
    assert not install(target, folders).copied
    assert {path: path.stat().st_ino for path in target.rglob("*")} == before


@pytest.mark.parametrize("harm", ["changed", "missing", "added"])
def test_a_damaged_copy_is_repaired(folders: dict[str, Path], tmp_path: Path, harm: str) -> None:
    target = tmp_path / "xpyd"
    install(target, folders)
    if harm == "missing":
        (target / "leaf" / "__init__.py").unlink()
    else:
        (target / "leaf" / ("__init__.py" if harm == "changed" else "more.py")).write_text("raise SystemExit\n")
    assert install(target, folders).copied
    assert files(target) == INSTALLED
    assert (target / "leaf" / "__init__.py").read_text() == "LEAF = 3\n"


def test_a_new_version_replaces_the_old_one_and_only_that(folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "xpyd"
    install(target, folders)
    (target / "mine.txt").write_text("kept")
    site = tmp_path / "site"
    (site / "pkg-1.0.dist-info").rename(site / "pkg-2.0.dist-info")
    (site / "pkg" / "deep" / "er.py").unlink()
    (site / "pkg" / "__init__.py").write_text("VALUE = 9\n")
    assert install(target, sources(site / "pkg", tmp_path / "extras")).copied
    assert sorted(path.name for path in target.iterdir()) == [MARK, "leaf", "leaf-2.0.dist-info", "mine.txt", "pkg",
                                                              "pkg-2.0.dist-info"]
    assert files(target / "pkg") == {"__init__.py"}
    assert (target / "pkg" / "__init__.py").read_text() == "VALUE = 9\n"


def test_a_run_that_was_cut_off_is_finished_by_the_next(folders: dict[str, Path], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    target, swap, calls = tmp_path / "xpyd", module._swap, []

    def cut_off(place: Path, stage: Path) -> None:
        calls.append(place.name)
        if len(calls) == 3:
            shutil.copytree(stage, target / f"{STAGE}left", dirs_exist_ok=True)
            raise KeyboardInterrupt
        swap(place, stage)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_swap", cut_off)
        with pytest.raises(KeyboardInterrupt):
            install(target, folders)
    assert not (target / "pkg").exists(), "the package comes last"
    assert (target / f"{STAGE}left").exists()
    assert install(target, folders).copied
    assert files(target) == INSTALLED


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_is_not_ours_is_never_replaced(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    target = tmp_path / "xpyd"
    target.mkdir()
    if kind == "folder":
        (target / "pkg").mkdir()
    elif kind == "file":
        (target / "pkg").write_text("mine")
    else:
        (target / "pkg").symlink_to("nowhere")
    with pytest.raises(InstallError, match="xpyd/pkg: is there already"):
        install(target, folders)
    assert [path.name for path in target.iterdir()] == ["pkg"]


@pytest.mark.parametrize("text", ["{", '{"names": [1]}', '{"names": ["../site"]}', '{"names": [".."]}', "\udcff"])
def test_a_wrong_mark_is_refused(folders: dict[str, Path], tmp_path: Path, text: str) -> None:
    target = tmp_path / "xpyd"
    target.mkdir()
    (target / MARK).write_text(text, errors="surrogateescape")
    with pytest.raises(InstallError, match=f"{MARK}: "):
        install(target, folders)
    assert (tmp_path / "site" / "pkg" / "__init__.py").exists()


def test_too_little_room_is_said_before_anything_is_written(folders: dict[str, Path], tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    target = tmp_path / "xpyd"
    for field, value, words in (("f_bavail", 10, "KiB are free"), ("f_favail", 3, "inodes are free")):
        numbers = {name: getattr(real, name) for name in ("f_bavail", "f_frsize", "f_files", "f_favail")}
        numbers |= {"f_files": 1000, field: value}
        monkeypatch.setattr(os, "statvfs", lambda _, numbers=numbers: type("Room", (), numbers))
        with pytest.raises(InstallError, match=words):
            install(target, folders)
        assert list(target.iterdir()) == []


def test_a_full_disk_in_the_middle_leaves_the_old_copy(folders: dict[str, Path], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "xpyd"
    install(target, folders)
    (tmp_path / "extras" / "leaf" / "__init__.py").write_text("LEAF = 4\n")

    def full(source: Path, place: Path) -> None:
        raise OSError(28, "No space left on device", str(place))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(InstallError, match="No space left on device"):
        install(target, folders)
    assert files(target) == INSTALLED
    assert (target / "leaf" / "__init__.py").read_text() == "LEAF = 3\n"


def test_two_runs_at_once_do_not_meet(folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "xpyd"
    target.mkdir()
    handle = os.open(target, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(InstallError, match="another run works in it"):
            install(target, folders)
    finally:
        os.close(handle)
    assert install(target, folders).copied


def test_the_folder_that_is_copied_is_no_target(folders: dict[str, Path], tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "site", tmp_path / "site" / "pkg" / "x"):
        with pytest.raises(InstallError, match="give another folder"):
            install(target, folders)


def test_a_file_is_no_target(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InstallError, match="Not a directory"):
        install(tmp_path / "file", folders)


def test_a_package_without_its_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    with pytest.raises(InstallError, match="0 dist-info folders of pkg"):
        sources(tmp_path / "pkg", tmp_path)


def test_extras_that_are_not_there_or_loose_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="none: no such folder"):
        sources(tmp_path / "site" / "pkg", tmp_path / "none")
    (tmp_path / "extras" / "loose.py").write_text("")
    with pytest.raises(InstallError, match=r"loose\.py is not a folder"):
        sources(tmp_path / "site" / "pkg", tmp_path / "extras")


def test_the_command_says_what_it_did(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site" / "pkg" / "__init__.py"))
    arguments = [str(tmp_path / "xpyd"), "--extras", str(tmp_path / "extras")]
    assert [main(arguments), main(arguments)] == [0, 0]
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("copied")
    assert "leaf-2.0, pkg-1.0" in first
    assert second.endswith("already in place")
    assert main([str(tmp_path / "xpyd"), "--extras", str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xpyd_sidecar.install: ")
    assert err.count("\n") == 1
