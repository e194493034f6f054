from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from xpyd_operator.errors import LocalError
from xpyd_operator.local import paths
from xpyd_operator.local.paths import ServiceFolder


def test_home_is_xpyd_home_or_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XPYD_HOME", str(tmp_path / "x"))
    assert paths.home_folder() == tmp_path / "x"
    monkeypatch.delenv("XPYD_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert paths.home_folder() == tmp_path / "xpyd"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.home_folder() == tmp_path / ".local" / "state" / "xpyd"


def test_folders_are_private_and_services_are_those_with_a_document(tmp_path: Path) -> None:
    folder = ServiceFolder("qwen", tmp_path)
    assert paths.services(tmp_path) == []
    folder.make()
    assert folder.path.stat().st_mode & 0o077 == 0
    assert paths.services(tmp_path) == []
    folder.desired.write_text("x")
    assert paths.services(tmp_path) == ["qwen"]


def test_a_home_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="set XPYD_HOME"):
        ServiceFolder("qwen", tmp_path / "file").make()


def test_sockets_of_the_longest_names_fit_into_a_unix_address(tmp_path: Path) -> None:
    name = "q" * 45
    base = paths.choose_run_dir(tmp_path / name)
    for instance in (f"{name}-e0", f"{name}-e999999999", "router", f"{name}-host-12345"):
        longest = paths.run_folder(str(base), name, instance) / ("u" * paths.UUID_LENGTH)
        assert len(os.fsencode(longest)) <= paths.SOCKET_PATH_MAX


def test_run_folders_differ_by_service_and_instance(tmp_path: Path) -> None:
    assert paths.choose_run_dir(tmp_path / "a") != paths.choose_run_dir(tmp_path / "b")
    names = ("a-e0", "a-e1", "router", "a-joined")
    assert len({paths.run_folder("/r", "a", name) for name in names}) == len(names)


def test_too_long_a_temporary_folder_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/x" * 60)
    assert str(paths.choose_run_dir(tmp_path)).startswith("/tmp/xpyd-")


def test_a_private_folder_is_made_and_narrowed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    paths.make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_a_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(LocalError, match="belongs to somebody else"):
        paths.make_private(tmp_path / "link")


def test_a_folder_that_goes_while_it_is_read_has_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.pid").write_text("1")
    assert paths.matching(tmp_path, "*/*.pid") == [tmp_path / "a/engine.pid", tmp_path / "b/engine.pid"]
    scandir = os.scandir

    def late(path: str | Path | int) -> object:
        if str(path) == str(tmp_path / "b"):
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert paths.matching(tmp_path, "*/*.pid") == [tmp_path / "a/engine.pid"]
    assert not (tmp_path / "b").exists()
    assert paths.matching(tmp_path / "b", "*") == []
