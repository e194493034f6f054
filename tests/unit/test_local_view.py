"""What ``xpyd status`` says of a router and of instances, by what was found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from plan_world import desired
from render_service import service

from xpyd_operator.local import store
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.view import Viewer, _wanting
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import Instance, ObservedRouter, ObservedService, ObservedUnit, Phase
from xpyd_operator.plan.round import think
from xpyd_sidecar.contract.ids import InstanceName, Role


@pytest.fixture
def viewer(tmp_path: Path) -> Viewer:
    folder = ServiceFolder("qwen", tmp_path)
    folder.make()
    store.save_desired(folder, service())
    store.save(folder.settings, store.settings_for(folder, "127.0.0.1"))
    store.service_key(folder)
    return Viewer(folder)


@pytest.mark.parametrize(("unit", "ready", "state", "problem"), [
    (ObservedUnit("router", alive=True), True, "ready", ""),
    (ObservedUnit("router", alive=True, crashes=2, ended=900.0, exit="exit code 1"), False, "starting", ""),
    (ObservedUnit("router", alive=False), False, "starting", ""),
    (ObservedUnit("router", alive=False, crashes=3, ended=990.0, exit="exit code 1"), False, "crashed", "exit code 1"),
], ids=["serves", "again", "not yet", "ended"])
def test_the_state_of_a_router_is_what_was_found(
        viewer: Viewer, unit: ObservedUnit, ready: bool, state: str, problem: str) -> None:
    found = ObservedService(router=ObservedRouter(Revision("router1"), unit, ready=ready))
    row = viewer._router(think(desired(1, 1), found, 1000.0), "http://127.0.0.1:8000", 1000.0)
    assert row is not None
    assert (row.state, row.ready, row.problem, row.address) == (state, ready, problem, "127.0.0.1:8000")
    assert viewer._router(think(desired(1, 1), ObservedService(), 1000.0), "http://x", 1000.0) is None


def test_what_could_be_better_of_an_instance_that_serves_is_said() -> None:
    seen = Instance(InstanceName("qwen-e1"), 1, Role.DECODE, Revision("r"), Phase.READY)
    assert _wanting(seen) == ""
    seen = msgspec.structs.replace(seen, refuses=((InstanceName("qwen-e0"), "another model"),), links=("over tcp: why",))
    assert _wanting(seen) == "cannot take KV from qwen-e0: another model; over tcp: why"
    assert _wanting(msgspec.structs.replace(seen, refuses=(), links=(), ejected="it hangs")) == "ejected: it hangs"
