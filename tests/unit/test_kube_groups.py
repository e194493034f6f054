"""Several pods that are one instance: being made, whole, ending, broken; and what the planner sees of each."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from kube_documents import UID, pod

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.gangs.groups import INCOMPLETE
from xpyd_operator.kube.routers.observe import RouterAnswers, instances
from xpyd_operator.plan.absent import QUEUED
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import BROKEN, UNFINISHED, Instance, Phase
from xpyd_operator.plan.placing import HALF_S
from xpyd_operator.render import labels
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load

NOW = 1_800_000_000.0
Body = dict[str, Any]


def text(ago_s: float) -> str:
    return datetime.fromtimestamp(NOW - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status(*, ready: bool = False, started: bool | None = None, why: str = "True", **more: Any) -> Body:
    holds = "True" if ready else "False"
    main = {"name": "main", "ready": ready, "started": ready if started is None else started, "restartCount": 0,
            "state": {"running": {"startedAt": text(80)}}}
    return {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [main],
            "conditions": [{"type": "PodScheduled", "status": why, "lastTransitionTime": text(90)},
                           {"type": "Ready", "status": holds, "lastTransitionTime": text(50)}]} | more


NO_NODE = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                               "message": "0/2 nodes are available", "lastTransitionTime": text(90)}]}


def member(index: int, state: Body | None = None, *, size: int = 2, layout: str = "x", ago_s: float = 100,
           placed: bool = True, **metadata: Any) -> Body:
    notes = {labels.MEMBERS: str(size), labels.LAYOUT: layout}
    given = {"name": f"qwen-e3-{index}", "uid": f"pod-3-{index}", "creationTimestamp": text(ago_s), "annotations": notes}
    body = pod(3, status=status(ready=True) if state is None else state, **(given | metadata))
    return body | {"spec": body["spec"] | ({"nodeName": "n"} if placed else {})}


def heard(state: State = State.READY) -> RouterAnswers:
    seen = FleetInstance(instance=InstanceName("qwen-e3"), role=Role.DECODE, epoch=1, state=state,
                         incarnation=Incarnation("a" * 32), fingerprint=Fingerprint("f"), http=(HostPort("10.0.0.1:8000"),),
                         control=(), model="m", load=Load(running=4), drained=False, in_flight=0, beat_age_s=0.1)
    return RouterAnswers(Fleet(service=ServiceName("qwen"), router="r", uptime_s=9, settled=True, instances=(seen,)),
                         frozenset({"qwen-e3-0"}))


def one(*bodies: Body, told: RouterAnswers | None = None, **more: Any) -> Instance:
    told = told or RouterAnswers()
    found = instances(ServiceName("qwen"), UID, [Entry("Pod", body) for body in bodies], told, NOW, **more)
    assert len(found) == 1
    return found[0]


def ending(ago_s: float = 10.0, grace_s: float = 40.0) -> Body:
    return {"deletionTimestamp": text(ago_s - grace_s), "deletionGracePeriodSeconds": grace_s}


def test_it_is_ready_when_all_are_and_counts_once() -> None:
    found = one(member(1), member(0, labels={**member(0)["metadata"]["labels"], labels.ROUTER: "true"}), told=heard())
    assert (found.name, found.ordinal, found.phase, found.parts) == ("qwen-e3", 3, Phase.READY, 2)
    assert (found.load, found.router, found.settled, found.absent) == (4, True, True, None)
    late = one(member(0), member(1, status()))
    assert (late.phase, late.since) == (Phase.STARTING, NOW - 50)


def test_of_a_crash_the_pod_is_named() -> None:
    ended = {"exitCode": 1, "reason": "Error", "startedAt": text(20), "finishedAt": text(7), "message": "RuntimeError: no"}
    main = {"name": "main", "restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended}}
    found = one(member(0, status()), member(1, status(containerStatuses=[main])))
    assert (found.phase, found.crashes, found.since) == (Phase.CRASHED, 4, NOW - 7)
    assert found.absent is not None
    assert "qwen-e3-1" in found.absent.message


def test_one_that_served_and_does_not_any_more_is_told_of_its_group() -> None:
    late = status(started=True)
    late["conditions"][1]["lastTransitionTime"] = text(70)
    found = one(member(0, late), member(1, late))
    assert (found.phase, found.was_ready) == (Phase.STARTING, True)
    assert found.absent is not None
    assert found.absent.message.startswith("pod qwen-e3-0 served with the others of its instance and does not since")


def test_without_a_leader_it_is_being_made() -> None:
    found = one(member(1, status(), size=3), member(2, status(), size=3))
    assert (found.phase, found.parts, found.missing, found.since) == (Phase.STARTING, 3, 1, NOW - 100)
    assert found.absent is not None
    assert (found.absent.reason, found.absent.message) == (INCOMPLETE, "2 of 3 pods of qwen-e3 are made")


OVER = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"}
AWAY = status() | {"conditions": [{"type": "ContainersReady", "status": "True", "lastTransitionTime": text(90)},
                                  {"type": "Ready", "status": "False", "lastTransitionTime": text(50)}]}
MARKS = member(1)["metadata"]["labels"]


@pytest.mark.parametrize(("bodies", "words"), [
    ((member(0),), "qwen-e3-1 is missing"),
    ((member(0, size=3), member(1, size=3)), "qwen-e3-2 is missing"),
    ((member(0), member(1, OVER)), "qwen-e3-1 has ended for good"),
    ((member(0), member(1, layout="y")), "qwen-e3-1 is of another revision or layout"),
    ((member(0), member(1, size=3), member(2, size=3)), "qwen-e3-1 is of another revision or layout"),
    ((member(0), member(1, labels={**MARKS, labels.REVISION: "r2"})), "qwen-e3-1 is of another revision or layout"),
    ((member(0, annotations={}), member(1, annotations={})), "qwen-e3-0 is of another revision or layout"),
    ((member(0), member(1), member(2)), "3 pods have names of qwen-e3, which has 2"),
    ((member(1),), "qwen-e3-1 was ready, and its leader is missing"),
    ((member(0), member(1, labels={key: one for key, one in MARKS.items() if key != labels.ROLE})), "has lost the label"),
], ids=lambda one: one if isinstance(one, str) else "")
def test_what_lacks_a_part_goes_as_a_whole(bodies: tuple[Body, ...], words: str) -> None:
    found = one(*bodies)
    assert found.absent is not None
    assert (found.phase, found.absent.reason) == (Phase.CRASHED, BROKEN)
    assert words in found.absent.message


@pytest.mark.parametrize("words", ["17", "20000000", "9" * 5000, "-2", "two", ""])
def test_a_number_of_members_that_is_none_breaks_the_group_and_costs_nothing(words: str) -> None:
    """Whoever may annotate a pod may write it, and the operator is everybody's."""
    notes = {labels.MEMBERS: words, labels.LAYOUT: "x"}
    began = time.process_time()
    found = one(member(0, annotations=notes), member(1, annotations=notes))
    assert time.process_time() - began < 1.0
    assert (found.phase, found.parts) == (Phase.CRASHED, 1)


def test_what_cannot_be_finished_in_time_gives_back_what_it_holds() -> None:
    found = one(member(1, status(), ago_s=HALF_S))
    assert found.absent is not None
    assert (found.phase, found.absent.reason) == (Phase.CRASHED, UNFINISHED)
    assert "not all of its 2 pods could be made within 600 s" in found.absent.message


def test_what_cannot_be_finished_is_broken() -> None:
    begun = member(1, status())
    assert one(begun, current=[Revision("r1")]).phase is Phase.STARTING
    assert one(begun, current=[Revision("r2")]).phase is Phase.CRASHED


@pytest.mark.parametrize(("told", "phase"), [
    (None, Phase.STARTING), (heard(), Phase.STARTING), (heard(State.STARTING), Phase.CRASHED)])
def test_a_node_that_is_away_breaks_what_does_not_serve(told: RouterAnswers | None, phase: Phase) -> None:
    assert one(member(0, status()), member(1, AWAY), told=told).phase is phase


def test_one_that_ends_takes_the_others_along_and_a_lost_one_keeps_the_name() -> None:
    found = one(member(0), member(1, **ending()))
    assert (found.phase, found.since, found.leaving) == (Phase.STOPPING, NOW - 10, True)
    assert one(member(0, **ending())).phase is Phase.STOPPING
    lost = one(member(1, AWAY, **ending(ago_s=200)))
    assert (lost.phase, lost.name) == (Phase.LOST, "qwen-e3")
    assert lost.absent is not None
    assert "qwen-e3-1" in lost.absent.message


def test_half_of_it_without_a_node_is_said_in_numbers() -> None:
    found = one(member(0, status()), member(1, NO_NODE, placed=False))
    assert (found.phase, found.placed, found.unplaced, found.unplaced_since) == (Phase.STARTING, 1, 1, NOW - 90)
    assert found.absent is not None
    assert found.absent.reason == "Unschedulable"
    assert found.absent.message.startswith("1 of 2 pods of qwen-e3 find no node: no node takes pod qwen-e3-1: 0/2 nodes")


def test_it_is_half_an_instance_from_when_a_part_of_it_has_a_place() -> None:
    """Not from when it began to wait for a place, which may be hours before."""
    lately = status()
    lately["conditions"][0]["lastTransitionTime"] = text(5)
    assert one(member(0, lately), member(1, NO_NODE, placed=False)).unplaced_since == NOW - 5
    assert one(member(0, NO_NODE, placed=False), member(1, NO_NODE, placed=False)).unplaced_since == NOW - 90


def test_one_that_waits_for_admission_speaks_for_all() -> None:
    gated = member(1, {"phase": "Pending"}, placed=False)
    gated["spec"] = gated["spec"] | {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    found = one(member(0, NO_NODE, placed=False), gated)
    assert found.queued
    assert found.absent is not None
    assert found.absent.reason == QUEUED


def test_a_name_that_somebody_else_has_breaks_what_is_ours_and_then_keeps_the_ordinal() -> None:
    theirs = member(0, owner="99999999-2222-3333-4444-555555555555")
    theirs["metadata"]["ownerReferences"][0]["uid"] = "99999999-2222-3333-4444-555555555555"
    found = one(theirs, member(1, status()))
    assert (found.phase, found.absent is not None and found.absent.reason) == (Phase.CRASHED, BROKEN)
    alone = one(theirs)
    assert (alone.name, alone.phase) == ("qwen-e3", Phase.LOST)
    unseen = one(member(1, status()), taken=["qwen-e3-0"])
    assert (unseen.phase, unseen.name) == (Phase.CRASHED, "qwen-e3")


def test_a_name_that_the_group_does_not_need_is_anybodys() -> None:
    """Whoever may write pods in the namespace could end a group that serves with it."""
    for index in (2, 9, 15):
        stranger = member(index, uid="x", ownerReferences=[])
        assert one(member(0), member(1), stranger).phase is Phase.READY
    assert one(member(0), member(1), taken=["qwen-e3-1"]).phase is Phase.READY, "it was taken, before ours was made"
    assert one(member(0), member(1), taken=["qwen-e3"]).phase is Phase.READY
    assert one(member(1, status()), member(9, uid="x", ownerReferences=[]), taken=["qwen-e3-0"]).phase is Phase.CRASHED


def test_a_pod_of_one_piece_and_members_do_not_mix() -> None:
    found = one(pod(3, creationTimestamp=text(100)), member(0), member(1))
    assert found.phase is Phase.CRASHED
