"""`xpyd up` with data-parallel ranks over several members, and engines that cost nothing: agents, launchers and router are
real.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import MODEL_NAME, complete
from local_service import LocalService
from service import wait, wait_life
from stand_in_ranks import make_rank_stand_in

from xpyd_operator.cli import main
from xpyd_operator.local import procs
from xpyd_operator.local.paths import run_folder


class Ranks(LocalService):
    """The service; prefill and decode have two members each, with one and two ranks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.python = make_rank_stand_in(folder)
        self.url = f"http://127.0.0.1:{self.port}"
        self.document["spec"]["model"]["servedName"] = MODEL_NAME
        self.document["spec"] |= {"prefill": {"replicas": 1, "parallelism": {"data": 2, "pods": 2}},
                                  "decode": {"replicas": 1, "parallelism": {"data": 4, "pods": 2}}}
        self.file.write_text(yaml.safe_dump(self.document))

    def role(self, capsys: pytest.CaptureFixture[str], role: str) -> str:
        (name,) = [one["name"] for one in self.status(capsys)["instances"] if one["role"] == role]
        return str(name)

    def ready(self, capsys: pytest.CaptureFixture[str]) -> bool:
        status: dict[str, Any] = self.status(capsys)["status"]
        return next(one for one in status["conditions"] if one["type"] == "Ready")["status"] == "True"

    def wait_life(self, name: str, before: str = "") -> str:
        """The incarnation of another life than the one before."""
        return wait_life(self.folder, self.admin, name, 300, before)

    def asked(self, name: str) -> list[Counter[str]]:
        """What the members of an instance were asked so far, the leader first."""
        settings = json.loads(self.folder.settings.read_text())
        leader = run_folder(settings["run_dir"], self.name, name)
        return [Counter(path.read_text().splitlines() if path.exists() else ())
                for path in (leader / "asked", leader.with_name(f"{leader.name}-1") / "asked")]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    one = Ranks(tmp_path, monkeypatch)
    yield one
    one.clean()


def test_each_rank_is_asked_at_the_server_of_its_member_and_a_death_begins_a_new_life(
        service: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert service.up("--detach") == 0
    prefill, decode = service.role(capsys, "prefill"), service.role(capsys, "decode")

    def ask(times: int) -> None:
        for number in range(times):
            assert complete(service.url, [number, 5, 6], 1)["token_ids"] == [7]

    ask(8)
    assert service.asked(decode) == [Counter({"decode 0": 2, "decode 1": 2})] * 2
    # A client has decode's answer, and prefill may be asked for it only then.
    wait(lambda: sum(map(Counter.total, service.asked(prefill))) == 8, 120, "all that prefill is asked")
    assert service.asked(prefill) == [Counter({"prefill -": 4})] * 2, "one rank alone has no need of a name"
    launcher, before = service.pid("instances", decode, "engine-1"), service.wait_life(decode)
    (engine,) = [one.pid for one in procs.all_processes() if one.parent == launcher]
    os.kill(engine, signal.SIGKILL)
    service.wait_life(decode, before)
    wait(lambda: service.ready(capsys), 300, "back by itself")
    assert service.pid("instances", decode, "engine-1") == launcher, "launchers stay"
    ask(4)
    assert service.asked(decode) == [Counter({"decode 0": 3, "decode 1": 3})] * 2
    assert main.main(["down", service.name]) == 0
    assert service.pids() == []
