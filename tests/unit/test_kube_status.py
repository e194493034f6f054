"""What is said of a service as a whole, and of one for which nothing can be planned; ``Stalled`` is there while a document
cannot take effect by itself, with the words of what holds it up.
"""

from __future__ import annotations

import msgspec
import pytest
from kube_documents import service
from plan_world import World, desired

from xpyd_operator.api.status import Condition, PoolStatus, ServiceStatus
from xpyd_operator.kube.keys.master import KeyTrouble
from xpyd_operator.kube.reports.status import (
    pool_status,
    service_status,
    service_wide,
    stalled_conditions,
    unplanned_status,
)
from xpyd_operator.plan.absent import Breakage, Waiting
from xpyd_operator.plan.round import think
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role

VALID = Condition(type="Valid", status="True", reason="Valid", message="the document is followed")
READY = Condition(type="Ready", status="True", reason="AllReady", message="1P1D ready")
MOVES = Condition(type="Progressing", status="True", reason="Changing", message="changing: qwen-e1")
STUCK = Condition(type="Progressing", status="False", reason="Stuck", message="in trouble: qwen-e1")
WRONG = Condition(type="Valid", status="False", reason="Invalid", message="spec.x: wrong")
LOST = KeyTrouble("MasterLost", "it is gone")
REFUSED = Condition(type="Valid", status="False", reason="Invalid", message="spec.decode: …")


def test_it_is_not_there_while_things_move() -> None:
    assert stalled_conditions((READY, MOVES), VALID) == ()
    assert stalled_conditions((), Condition(type="Valid", status="Unknown", reason="NotReached")) == ()


def test_a_refused_document_stalls_although_the_last_one_serves() -> None:
    said, = stalled_conditions((READY, MOVES), REFUSED)
    assert (said.type, said.status, said.reason, said.message) == ("Stalled", "True", "Invalid", "spec.decode: …")


def test_what_waits_for_a_person_stalls() -> None:
    said, = stalled_conditions((READY, STUCK), VALID)
    assert (said.status, said.reason, said.message) == ("True", "Stuck", "in trouble: qwen-e1")


def said(status: ServiceStatus | None) -> dict[str, tuple[str, str]]:
    assert status is not None
    return {each.type: (each.status, each.reason) for each in status.conditions}


def test_everything_that_is_wrong_is_named() -> None:
    assert service_wide([], VALID, None) == ()
    taken, *others = [(each.reason, each.message) for each in service_wide(["Service qwen"], WRONG, LOST)]
    assert taken == ("NameTaken", "Service qwen is somebody else's; rename or delete it, since this service needs the name")
    assert others == [("Invalid", "spec.x: wrong"), ("MasterLost", "it is gone")]


FOLLOWED = ServiceStatus(url="http://qwen", conditions=(READY, VALID))
"""Of a document that was followed once."""
EARLIER = ServiceStatus(conditions=(Condition(type="Ready", status="False", reason="Unsupported", message="spec.old: …"),
                                    Condition(type="Valid", status="False", reason="Unsupported", message="spec.old: …")))
"""Of one that never was."""


def test_a_service_without_a_key_stays_as_ready_as_it_was() -> None:
    why = Breakage("MasterLost", "it is gone")
    assert said(unplanned_status(FOLLOWED, why)) == {"Ready": ("True", "AllReady"), "Valid": ("True", "Valid"),
                                                     "Degraded": ("True", "MasterLost"), "Stalled": ("True", "MasterLost")}
    assert said(unplanned_status(ServiceStatus(), why))["Ready"] == ("False", "MasterLost")


@pytest.mark.parametrize(("before", "ready"), [
    (ServiceStatus(), ("False", "Invalid")), (EARLIER, ("False", "Invalid")), (FOLLOWED, ("True", "AllReady"))])
def test_a_refused_document_takes_nothing_from_what_runs_and_gives_its_reason_to_what_never_did(
    before: ServiceStatus, ready: tuple[str, str],
) -> None:
    """Also after a document before it was refused for something else."""
    status = unplanned_status(before, Breakage(WRONG.reason, WRONG.message), WRONG)
    assert said(status) == {"Ready": ready, "Valid": ("False", "Invalid"), "Stalled": ("True", "Invalid")}
    assert not any("spec.old" in each.message for each in status.conditions)


def test_what_cannot_be_told_at_present_is_not_stalled() -> None:
    unknown = Condition(type="Valid", status="Unknown", reason="NotReached", message="away")
    found = said(unplanned_status(EARLIER, Waiting("NotReached", "away"), unknown))
    assert found == {"Ready": ("False", "NotReached"), "Valid": ("Unknown", "NotReached")}


def ready(pool: PoolStatus) -> tuple[str, str, str]:
    found, = (each for each in pool.conditions if each.type == "Ready")
    return found.status, found.reason, found.message


def test_a_pool_is_ready_once_it_has_what_is_wanted() -> None:
    world, want = World(), desired(1, 2)
    world.tick(want)
    starts = pool_status(think(want, world.observe(), world.now), service(), Role.DECODE)
    assert (starts.replicas, starts.ready_replicas) == (2, 0)
    assert ready(starts) == ("False", "NotReady", "0 of 2 ready")
    world.run(want)
    serves = pool_status(think(want, world.observe(), world.now), service(), Role.DECODE)
    assert (serves.replicas, serves.ready_replicas) == (2, 2)
    assert ready(serves) == ("True", "AllReady", "2 of 2 ready")


def test_what_a_round_could_not_do_and_what_waits_is_said_beside_what_was_found() -> None:
    world, want = World(), desired(1, 2)
    world.run(want)

    def degraded(*failures: str, holds: str = "") -> tuple[str, str, str]:
        done = msgspec.structs.replace(think(want, world.observe(), world.now), failures=failures)
        told = service_status(done, service(), KubeSettings(sidecar_image="sidecar:1"), valid=VALID,
                              after=(Waiting("Refused", holds),) if holds else ())
        found, = (each for each in told.conditions if each.type == ("Progressing" if holds else "Degraded"))
        return found.status, found.reason, found.message

    assert degraded()[0] == "False"
    assert degraded("creating qwen-e3: no") == ("True", "Failed", "creating qwen-e3: no")
    assert degraded(holds="quota is used up") == ("True", "Waiting", "quota is used up")
    for _ in range(3):
        world.crash("qwen-e2")
    _, reason, words = degraded()
    assert reason not in ("Failed", "Healthy")
    assert degraded("creating qwen-e3: no") == ("True", reason, f"{words}; creating qwen-e3: no"), "the cause stays"
