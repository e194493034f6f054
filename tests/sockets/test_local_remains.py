"""Processes of a service are found by its records too, not only by the mark in their environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from xpyd_operator.local import remains
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.units import Unit, wait_until

UNMARKED = "exec env -i sleep 1000 & wait"


async def test_an_orphan_without_a_mark_is_found_and_ended_also_when_its_instance_is_gone(tmp_path: Path) -> None:
    folder = ServiceFolder("qwen", tmp_path)
    folder.make()
    unit = Unit("engine", folder.instance("qwen-e0"), folder.marker("instances", "qwen-e0", "engine"))
    leader = await unit.start(("sh", "-c", UNMARKED), {})
    assert await wait_until(lambda: len(remains.pids(folder)) == 2, 60)
    os.kill(leader.pid, signal.SIGKILL)
    assert await wait_until(lambda: not unit.alive(), 60)
    assert len(remains.pids(folder)) == 1
    (folder.path / "previous").mkdir()
    folder.instance("qwen-e0").rename(folder.path / "previous" / "qwen-e0")
    assert len(remains.pids(folder)) == 1
    await remains.end(folder)
    assert remains.pids(folder) == []
    await remains.end(folder)
