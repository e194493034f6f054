"""Waiting for a service, and giving up with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from xpyd_operator.api.status import Condition, ServiceStatus
from xpyd_operator.cli import follow
from xpyd_operator.cli.follow import Show, WaitFailed, wait_for
from xpyd_operator.cli.up import _Still
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.view import InstanceView, Snapshot
from xpyd_sidecar.contract.membership import Load


def conditions(ready: bool, moving: bool, degraded: bool) -> tuple[Condition, ...]:
    def say(kind: str, holds: bool, message: str = "") -> Condition:
        return Condition(type=kind, status="True" if holds else "False", reason="X", message=message)

    return (say("Ready", ready, "0 of 1 ready"), say("Progressing", moving), say("Degraded", degraded))


def view(state: str, log: Path | str = "/none", restarts: int = 0, **more: Any) -> InstanceView:
    return InstanceView("e0", "decode", state, state == "ready", Load(), "h:1", 1.0, restarts, 7, "", str(log), **more)


def snapshot(state: str = "starting", *, supervisor: int = 5, degraded: bool = False, **more: Any) -> Snapshot:
    ready = state == "ready"
    status = ServiceStatus(wanted="0P1D", ready="0P0D", conditions=conditions(ready, not ready, degraded))
    instances = (view(state, **more),)
    return Snapshot("qwen", "m", "http://h:1", supervisor, False, status, instances, None, 0, 0)


class FakeViewer:
    """Shows one snapshot after the other, the last one for ever."""

    def __init__(self, folder: Path, *snapshots: Snapshot) -> None:
        self.folder = ServiceFolder("qwen", folder)
        self.folder.make()
        self.left = list(snapshots)

    async def take_snapshot(self, now: float) -> Snapshot:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.001)


async def wait(viewer: FakeViewer, timeout_s: float = 5.0) -> Snapshot:
    with Show() as show:
        return await wait_for(viewer, show, lambda seen: seen.ready, timeout_s, what="ready")  # type: ignore[arg-type]


async def test_shows_each_change_once_until_the_condition_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = snapshot(progress="loading the model")
    await wait(FakeViewer(tmp_path, snapshot(), loading, loading, snapshot("ready")))
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["e0 (decode) starting", "e0 (decode) starting: loading the model", "e0 (decode) ready"]


async def test_an_instance_that_goes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = msgspec.structs.replace(snapshot("ready"), instances=())
    await wait(FakeViewer(tmp_path, snapshot(), gone))
    assert "e0 is gone" in capsys.readouterr().err


async def test_a_deadline_that_passes_says_what_is_missing_with_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("first\nlast words\n")
    words = r"qwen was not ready within 0\.02 s: 0 of 1 ready\nthe end of .*:\nfirst\nlast words"
    with pytest.raises(WaitFailed, match=words):
        await wait(FakeViewer(tmp_path, snapshot(log=log)), 0.02)


async def test_a_crash_loop_is_not_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("ValueError: no\n")
    with pytest.raises(WaitFailed, match=r"e0 crashes again and again .*\nValueError: no"):
        await wait(FakeViewer(tmp_path, snapshot("crashed", log=log, restarts=3, degraded=True)))


async def test_a_supervisor_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    viewer = FakeViewer(tmp_path, snapshot(supervisor=0))
    viewer.folder.log.write_text("it failed\n")
    with pytest.raises(WaitFailed, match="the supervisor of qwen has ended:\nit failed"):
        await wait(viewer)


def test_settled_counts_only_when_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    still = _Still()
    assert not still(snapshot("ready"))
    now[0] = 1.0
    assert not still(snapshot("starting"))
    now[0] = 2.0
    assert not still(snapshot("ready"))
    now[0] = 4.0
    assert still(snapshot("ready"))
