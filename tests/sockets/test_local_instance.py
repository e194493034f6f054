"""Processes and files of one instance on a host."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from processes import free_port
from render_service import service

from xpyd_operator.local import store
from xpyd_operator.local.blueprint import LocalBlueprint
from xpyd_operator.local.instance import LocalInstance
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.store import InstanceRecord
from xpyd_operator.local.units import wait_until
from xpyd_operator.plan.actions import Create
from xpyd_operator.render.process import Process
from xpyd_sidecar.contract.ids import InstanceName, Role

NAME = InstanceName("qwen-e0")
SHARING = """
import subprocess, sys, time
file = open(sys.argv[1], "r+b")
subprocess.Popen(["sleep", "1000"], pass_fds=[file.fileno()])
print("shared", flush=True)
time.sleep(1000)
"""


class Pair:
    """An instance of two members, each with a data-parallel rank, whose processes end at once."""

    def __init__(self, folder: Path) -> None:
        home = ServiceFolder("qwen", folder / "home")
        home.make()
        settings = msgspec.structs.replace(store.settings_for(home, "127.0.0.1"), run_dir=str(folder / "r"),
                                           python="/bin/true")
        store.save_desired(home, service(decode={"parallelism": {"data": 2, "pods": 2}}))
        blueprint = LocalBlueprint(home, settings)
        made = blueprint.instance(Create(NAME, 0, Role.DECODE, blueprint.desired_service().decode.revision), [], Random(0))
        quick = [Process(("/bin/true", "--host", "127.0.0.1"), {})] * 2
        self.record = msgspec.structs.replace(
            made, process=quick[0], port=free_port(),
            followers=(msgspec.structs.replace(made.followers[0], process=quick[1], port=free_port()),))
        self.instance = LocalInstance(home, settings, NAME)
        self.instance.write(self.record, blueprint.agent(self.record))

    def now(self) -> InstanceRecord:
        found = self.instance.record()
        assert found is not None
        return found

    def addresses(self) -> list[tuple[str, str]]:
        """Of each member's agent: where its engine is, and where routers find it."""
        agents = [config.agent for member in self.instance.members if (config := member.agent_config()) is not None]
        return [(agent.engine, agent.advertised_address) for agent in agents if agent is not None]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(tmp_path)
    yield made
    await made.instance.remove(now=True)


@pytest.mark.parametrize("index", [0, 1])
async def test_a_member_whose_port_is_taken_gets_another_one_and_its_agent_knows(pair: Pair, index: int) -> None:
    member, before = pair.instance.members[index], pair.record.member(index).port
    with socket.create_server(("127.0.0.1", before)):
        await pair.instance.start(member.engine, pair.record.ports, Random(1))
    after = pair.now()
    assert after.member(index).port not in pair.record.ports
    assert after.member(1 - index) == pair.record.member(1 - index), "the other one stays where it is"
    addresses = [f"127.0.0.1:{after.member(each).port}" for each in (0, 1)]
    assert pair.addresses() == [(address, address) for address in addresses]
    assert "xpyd: start of" in member.agent.log.read_text(), "started again"
    assert not pair.instance.members[1 - index].agent.log.exists()


async def test_a_free_port_is_kept(pair: Pair) -> None:
    for member in pair.instance.members:
        await pair.instance.start(member.engine, pair.record.ports, Random(1))
    assert pair.now() == pair.record
    assert all("xpyd: start of engine" in member.engine.log.read_text() for member in pair.instance.members)


@pytest.fixture
def segment() -> Iterator[str]:
    path = Path(f"/dev/shm/xpyd_unit_{os.getpid()}")
    path.write_bytes(bytes(4096))
    yield path.name
    path.unlink(missing_ok=True)


async def test_shared_memory_of_an_engine_that_dies_before_anybody_has_looked_at_it_goes_with_what_is_left_of_it(
        pair: Pair, segment: str) -> None:
    """Its API server is killed; its core, which has the memory open, is ended by the next start."""
    engine = pair.instance.leader.engine
    leader = await engine.start((sys.executable, "-c", SHARING, f"/dev/shm/{segment}"), {})
    assert await wait_until(lambda: "shared" in engine.log.read_text(), 60)
    os.kill(leader.pid, signal.SIGKILL)
    assert await wait_until(lambda: not engine.alive(), 60)
    await pair.instance.start(engine, pair.record.ports, Random(1))
    assert segment not in os.listdir("/dev/shm")
