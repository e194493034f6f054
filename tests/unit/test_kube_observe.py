"""Pods, and what routers tell, as the planner sees them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from kube_documents import UID, pod

from xpyd_operator.kube.client.cache import Entry, WatchCache
from xpyd_operator.kube.podstate.facts import facts
from xpyd_operator.kube.routers.observe import LOST_S, RouterAnswers, front, instances
from xpyd_operator.plan.absent import Breakage
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.render import labels
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.pair_notes import RefusedPeer

NOW = 1_800_000_000.0
SERVICE = ServiceName("qwen")
Body = dict[str, Any]


def text(ago_s: float) -> str:
    return datetime.fromtimestamp(NOW - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status(*, ready: bool = False, ready_for_s: float = 50, main: Body | None = None, phase: str = "Running") -> Body:
    holds = "True" if ready else "False"
    return {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [{"name": "main", "restartCount": 0} | (main or {})],
            "conditions": [{"type": "Ready", "status": holds, "lastTransitionTime": text(ready_for_s)}]}


def running(for_s: float, **more: Any) -> Body:
    return {"state": {"running": {"startedAt": text(for_s)}}} | more


def looping(restarts: int, ran_s: float = 20) -> Body:
    ended = {"exitCode": 1, "startedAt": text(ran_s + 7), "finishedAt": text(7)}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"restartCount": restarts, "state": state, "lastState": {"terminated": ended}}


def one(body: Body, told: RouterAnswers | None = None, now: float = NOW) -> Instance:
    found = instances(SERVICE, UID, [Entry("Pod", body)], told or RouterAnswers(), now)
    assert len(found) == 1
    return found[0]


def made(state: Body, **metadata: Any) -> Body:
    return pod(3, status=state, **({"creationTimestamp": text(100)} | metadata))


@pytest.mark.parametrize(("state", "phase", "since_ago", "crashes"), [
    ({}, Phase.STARTING, 100, 0),
    (status(phase="Pending", ready_for_s=90), Phase.STARTING, 90, 0),
    (status(main=running(30), ready_for_s=90), Phase.STARTING, 30, 0),
    (status(ready=True, main=running(80, ready=True)), Phase.READY, 50, 0),
    (status(main=running(80, started=True), ready_for_s=5), Phase.STARTING, 5, 0),
    (status(main=looping(4)), Phase.CRASHED, 7, 4),
    (status(main=looping(9, ran_s=400)), Phase.CRASHED, 7, 1),
    (status(main={"state": {"terminated": {"exitCode": 1, "finishedAt": text(7)}}}), Phase.CRASHED, 7, 1),
    (status(main=running(20, restartCount=2)), Phase.STARTING, 20, 2),
    (status(ready=True, main=running(350, restartCount=2, ready=True)), Phase.READY, 50, 0),
    (status(phase="Failed") | {"reason": "Evicted"}, Phase.CRASHED, 50, 1),
])
def test_phase_since_and_crashes(state: Body, phase: Phase, since_ago: float, crashes: int) -> None:
    found = one(made(state))
    assert (found.phase, NOW - found.since, found.crashes) == (phase, since_ago, crashes)
    assert (found.role, found.revision, found.ordinal, found.name) == (Role.DECODE, "r1", 3, "qwen-e3")


def test_was_ready_tells_a_hang_from_a_start() -> None:
    assert one(made(status(main=running(80, started=True)))).was_ready
    assert not one(made(status(main=running(80, started=False)))).was_ready


def test_a_pod_that_ends_is_stopping_until_it_is_overdue() -> None:
    ready = status(ready=True, main=running(80, ready=True))
    body = made(ready, deletionTimestamp=text(-20), deletionGracePeriodSeconds=30)
    assert (one(body).phase, one(body).since, one(body).absent) == (Phase.STOPPING, NOW - 10, None)
    assert one(body, now=NOW + 20 + LOST_S - 1).phase is Phase.STOPPING
    lost = one(body, now=NOW + 20 + LOST_S)
    assert (lost.phase, lost.absent and lost.absent.reason) == (Phase.LOST, "Lost")


def test_a_problem_is_told_of_what_does_not_serve() -> None:
    state = status(main={"state": {"waiting": {"reason": "ImagePullBackOff"}}})
    why = one(made(state)).absent
    assert why is not None
    assert why.reason == "ImagePull"


def test_pods_of_others_keep_their_ordinal_and_count_for_nothing() -> None:
    mine, theirs = pod(0), pod(1, owner="another")
    unlabelled = pod(2)
    unlabelled["metadata"]["labels"][labels.ROLE] = "chief"
    ending = pod(4, owner="another", deletionTimestamp=text(-20))
    entries = [Entry("Pod", each) for each in (ending, theirs, unlabelled, mine)]
    found = instances(SERVICE, UID, entries, RouterAnswers(), NOW, taken=["qwen-e7", "other-e1"])
    assert [(each.ordinal, each.phase is Phase.LOST, each.absent.reason if each.absent else "") for each in found] == [
        (0, False, ""), (1, True, "NameTaken"), (2, True, "Unrecognized"), (4, True, ""), (7, True, "NameTaken")]


def test_pods_of_routers_are_no_instances() -> None:
    router = pod(0, labelled={labels.COMPONENT: labels.ROUTERS})
    odd = pod(1)
    odd["metadata"]["name"] = "qwen-router-abc"
    assert instances(SERVICE, UID, [Entry("Pod", router), Entry("Pod", odd)], RouterAnswers(), NOW) == ()


def told_of(number: int, role: Role = Role.DECODE, *, state: State = State.READY, fingerprint: str = "f",
            suspended: str = "", load: int = 0) -> FleetInstance:
    return FleetInstance(
        instance=InstanceName(f"qwen-e{number}"), role=role, epoch=1, state=state, incarnation=Incarnation("i"),
        fingerprint=Fingerprint(fingerprint), http=(HostPort("h:1"),), control=(), model="m",
        load=Load(running=load, waiting=1, transfers=2), drained=False, in_flight=0, beat_age_s=1.0, suspended=suspended)


def told(*known: FleetInstance, settled: tuple[str, ...] = ("qwen-e1",)) -> RouterAnswers:
    return RouterAnswers(Fleet(SERVICE, "qwen-e1", 10.0, settled=True, instances=known), frozenset(settled))


def test_load_fingerprint_and_labels() -> None:
    body = pod(1, labelled={labels.ROSTER: "true", labels.ROUTER: "true"})
    found = one(body, told(told_of(1, load=4)))
    assert (found.load, found.fingerprint, found.roster, found.router, found.settled) == (7, "f", True, True, True)
    refusing = msgspec.structs.replace(told_of(1), links=("over tcp",), refused=(
        RefusedPeer(InstanceName("qwen-e0"), Incarnation("i"), "another model"),))
    found = one(body, told(refusing))
    assert (found.refuses, found.links) == ((("qwen-e0", "another model"),), ("over tcp",))
    assert found.ejected == ""
    for fields, words in (({"ejected": "it hangs", "ejected_by": ("r1",)}, "it hangs"),
                          ({"ejected_by": ("r0", "r1")}, "it was ejected by r0, r1")):
        assert one(body, told(msgspec.structs.replace(told_of(1), **fields))).ejected == words
    alone = one(pod(1))
    assert (alone.refuses, alone.links) == ((), ())
    assert (alone.load, alone.fingerprint, alone.roster, alone.router, alone.settled) == (0, "", False, False, False)


P, D = told_of(0, Role.PREFILL), told_of(1)


@pytest.mark.parametrize(("pods", "fleet", "prefill", "reason"), [
    ([pod(1)], told(P, D), True, "Serving"),
    ([], told(P, D), True, "NoRouter"),
    ([pod(1, deletionTimestamp=text(-20))], told(P, D), True, "NoRouter"),
    ([pod(1, status=status())], told(P, D), True, "RouterNotReady"),
    ([pod(1)], RouterAnswers(), True, "RouterNotSettled"),
    ([pod(1)], told(P, D, settled=("qwen-e2",)), True, "RouterNotSettled"),
    ([pod(1)], told(P), True, "NoDecode"),
    ([pod(1)], told(P, told_of(1, state=State.STARTING)), True, "NoDecode"),
    ([pod(1)], told(P, told_of(1, suspended="it refused connections")), True, "NoDecode"),
    ([pod(1)], told(D), True, "NoPrefill"),
    ([pod(1)], told(D), False, "Serving"),
    ([pod(1)], told(told_of(0, Role.PREFILL, fingerprint="other"), D), True, "NoPair"),
    ([pod(1)], told(told_of(0, Role.PREFILL, fingerprint="other"), P, D), True, "Serving"),
])
def test_front(pods: list[Body], fleet: RouterAnswers, prefill: bool, reason: str) -> None:
    found = front([facts(each) for each in pods], fleet, prefill=prefill)
    assert (found.reason if found is not None else "Serving") == reason
    assert found is None or found.message


def test_front_says_what_is_suspended() -> None:
    found = front([facts(pod(1))], told(P, told_of(1, suspended="it refused connections")), prefill=True)
    assert found is not None
    assert "qwen-e1 (it refused connections)" in found.message


def test_a_thousand_pods_are_seen_fast() -> None:
    cache = WatchCache()
    for number in range(1000):
        cache.on_seen("Pod", pod(number, "prefill" if number % 3 else "decode"))
    fleet = told(*(told_of(number, load=number % 7) for number in range(1000)))
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        found = instances(SERVICE, UID, cache.of_service("Pod", "team-a", "qwen"), fleet, NOW)
        best = min(best, time.process_time() - started)
    assert len(found) == 1000
    print(f"1,000 pods observed in {best * 1000:.1f} ms")
    assert best < 0.1


def test_clients_do_not_reach_a_service_whose_name_is_somebody_elses() -> None:
    found = front([], told(), prefill=True, taken="Service qwen")
    assert isinstance(found, Breakage)
    assert found.reason == "NameTaken"
    assert "Service qwen" in found.message
