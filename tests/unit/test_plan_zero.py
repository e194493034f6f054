"""To no instances and back: what idle is, when it pays, and what routers are told meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube_documents import service

from xpyd_operator.api import notes
from xpyd_operator.errors import SpecError
from xpyd_operator.plan.absent import Breakage, Waiting
from xpyd_operator.plan.counts import Counts, counts
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.plan.zero import (
    GAPS_MAX,
    WORTH,
    IdleHistory,
    agreed_idle_s,
    can_serve,
    comes_soon,
    first_counts,
    reason_to_stay,
    wake_call,
)
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.waking import WORDS_MAX, WakeCall

AFTER_S, COLD_S = 600.0, 60.0


def asleep(**spec: Any) -> Any:
    return service(**{"prefill": {"scaling": {"min": 0, "max": 4}}, "decode": {"scaling": {"min": 0, "max": 4}},
                      "router": {"placement": "deployment", "hold": "10m"}} | spec)


def told(idle_s: float | None, *, draining: bool = False, in_flight: int = 0, **load: Any) -> Fleet:
    one = FleetInstance(InstanceName("d0"), Role.DECODE, 1, State.READY, Incarnation("i"), Fingerprint("f"), (), (), "m",
                        Load(**load), drained=False, in_flight=in_flight, beat_age_s=0.0)
    return Fleet(ServiceName("qwen"), "r0", 10.0, settled=True, instances=(one,), draining=draining, idle_s=idle_s)


def one(role: Role = Role.DECODE, phase: Phase = Phase.STARTING, **fields: Any) -> Instance:
    return Instance(InstanceName("qwen-e0"), 0, role, Revision("r"), phase, **fields)


def test_idle_is_what_the_busiest_router_says() -> None:
    assert agreed_idle_s([told(700.0), told(650.0)]) == 650.0
    assert agreed_idle_s([told(700.0), told(0.0)]) == 0.0
    assert agreed_idle_s([]) is None


@pytest.mark.parametrize("other", [
    None, told(None), told(900.0, draining=True), told(900.0, in_flight=1), told(900.0, running=1),
    told(900.0, waiting=1), told(900.0, transfers=1),
])
def test_one_who_does_not_tell_or_has_work_keeps_all(other: Fleet | None) -> None:
    assert agreed_idle_s([told(900.0), other]) is None


def test_nothing_goes_before_its_time_nor_before_three_starts() -> None:
    none = IdleHistory()
    assert reason_to_stay(none, AFTER_S - 1, AFTER_S, COLD_S) == "idle for 599 s of 600 s"
    assert reason_to_stay(none, AFTER_S, AFTER_S, COLD_S) == ""
    assert reason_to_stay(none, AFTER_S, AFTER_S, 240.0) == "idle for 600 s of 720 s"
    assert reason_to_stay(none, 720.0, AFTER_S, 240.0) == ""


def test_a_load_that_comes_back_soon_after_keeps_its_instances() -> None:
    every_quarter = IdleHistory(last=1.0, gaps=(900.0,) * 4)
    assert "within 100 s, and a start takes 60 s" in reason_to_stay(every_quarter, 800.0, AFTER_S, COLD_S)
    assert reason_to_stay(every_quarter, 700.0, AFTER_S, COLD_S) == "", "three starts and more are left of such a gap"
    assert reason_to_stay(every_quarter, 1070.0, AFTER_S, COLD_S), "it may be late"
    assert reason_to_stay(every_quarter, 1081.0, AFTER_S, COLD_S) == "", "it is longer than any before"
    assert reason_to_stay(IdleHistory(1.0, (900.0, 9000.0, 9000.0)), 800.0, AFTER_S, COLD_S) == "", "most are longer"


def test_gaps_are_learned_from_what_any_router_says() -> None:
    history = IdleHistory().with_request(0.0, 1000.0, AFTER_S)
    assert history == IdleHistory(1000.0)
    history = history.with_request(500.0, 1600.0, AFTER_S)
    assert history == IdleHistory(1100.0), "a pause of 100 s is none that is worth remembering"
    assert history.with_request(900.0, 1700.0, AFTER_S) == history, "another router had one later"
    history = history.with_request(5.0, 2005.0, AFTER_S)
    assert history == IdleHistory(2000.0, (900.0,))
    for _ in range(2 * GAPS_MAX):
        history = history.with_request(0.0, history.last + AFTER_S, AFTER_S)
    assert len(history.gaps) == GAPS_MAX


def test_a_clock_that_was_set_back_is_believed_again() -> None:
    history = IdleHistory(last=5000.0, gaps=(900.0,)).with_request(10.0, 1000.0, AFTER_S)
    assert history == IdleHistory(990.0, (900.0,))


@given(st.lists(st.floats(1.0, 1e6), max_size=40), st.floats(0.0, 1e6), st.floats(1.0, 1e5), st.floats(1.0, 1e4))
def test_no_gap_shorter_than_three_starts_ends_in_one(gaps: list[float], idle: float, after: float, cold: float) -> None:
    if not reason_to_stay(IdleHistory(1.0, tuple(gaps)), idle, after, cold):
        assert idle >= max(after, WORTH * cold)


@pytest.mark.parametrize(("gap", "wakes"), [(150.0, 0), (700.0, 1), (5000.0, 8)])
def test_a_load_with_a_period_wakes_as_often_as_pays(gap: float, wakes: int) -> None:
    """Eight gaps, looked at every 5 s: short ones never end in a start, long ones each do, those between teach."""
    history, now, found = IdleHistory(), 10_000.0, 0
    for _ in range(8):
        history, last = history.with_request(0.0, now, AFTER_S), now
        up = True
        while now < last + gap:
            now += 5.0
            if up and not reason_to_stay(history, now - last, AFTER_S, COLD_S):
                up, found = False, found + 1
    assert found == wakes


def test_back_is_one_of_each_within_the_limits() -> None:
    def first(**spec: Any) -> tuple[int, int]:
        found = first_counts(asleep(**spec))
        return found.prefill, found.decode

    assert first() == (1, 1)
    assert first(prefill={"replicas": 0}) == (0, 1)
    assert first(limits={"maxInstances": 1}) == (0, 1), "decode alone serves"


def test_without_decode_there_is_no_prefill_whoever_wrote_it() -> None:
    found = counts(asleep(), {Role.PREFILL: 3, Role.DECODE: 0})
    assert (found.prefill, found.decode) == (0, 0)
    assert counts(asleep(), {}).decode == 0, "it begins with none"


@pytest.mark.parametrize(("more", "path", "right"), [
    ({"router": {"hold": "10m"}}, "spec.router.placement", "write router.placement: deployment, or decode.scaling.min: 1"),
    ({"router": {"placement": "deployment"}}, "spec.router.hold", "write at least 1m, e.g. 10m, not 30s"),
    ({"prefill": {"scaling": {"min": 1, "max": 2}}}, "spec.prefill.scaling.min", "write prefill.scaling with min 0"),
    ({"prefill": {"replicas": 1}}, "spec.prefill.replicas", "write prefill.scaling with min 0, or prefill.replicas: 0"),
    ({"decode": {"replicas": 0}}, "spec.decode.replicas", "write decode.scaling with min 0"),
])
def test_what_it_needs_is_asked_for_with_what_to_write(more: dict[str, Any], path: str, right: str) -> None:
    with pytest.raises(SpecError) as refused:
        asleep(**more)
    assert [(fault.path, right in fault.message) for fault in refused.value.faults] == [(path, True)]


def test_without_keys_it_is_warned_of_and_with_them_not() -> None:
    open_ = [fault.path for fault in notes.wakes(asleep())]
    assert open_ == ["spec.decode.scaling.min"]
    keys = {"placement": "deployment", "hold": "10m", "apiKeySecret": {"name": "clients", "key": "keys"}}
    assert not list(notes.wakes(asleep(router=keys)))
    assert not list(notes.wakes(service()))


def test_what_cannot_be_made_or_cannot_run_is_refused_and_what_waits_is_not() -> None:
    assert wake_call(0, [one()], "a quota") == WakeCall(0), "nothing is wanted, so nothing is refused"
    assert wake_call(1, []) == WakeCall(1)
    assert wake_call(1, [], "exceeded quota:\n gpus") == WakeCall(1, refused="exceeded quota: gpus")
    assert wake_call(1, [], failed="the API server does not answer") == WakeCall(1, waits="the API server does not answer")
    assert wake_call(1, [one(Role.PREFILL)], "exceeded quota").refused == "exceeded quota", "prefill serves nobody"
    assert wake_call(1, [one()], "exceeded quota") == WakeCall(1, waits="qwen-e0: it starts"), "decode is on its way"
    assert wake_call(1, [one(phase=Phase.STOPPING)], "exceeded quota").refused == "exceeded quota"
    broken = one(absent=Breakage("ImagePull", "no such image", "correct engine.image"))
    assert wake_call(1, [broken]) == WakeCall(1, refused="qwen-e0: no such image; correct engine.image")
    assert wake_call(2, [broken, one()]).refused == "", "another one may come"
    queued = one(absent=Waiting("Queued", "it waits for Kueue", place=True))
    assert wake_call(1, [queued]) == WakeCall(1, waits="qwen-e0: it waits for Kueue")
    replaced = one(absent=Breakage("Evicted", "it was evicted", replaced=True))
    assert wake_call(1, [replaced]).refused == "", "another one is made in its place"
    assert len(wake_call(1, [], "x" * 5000).refused) == WORDS_MAX


def test_a_pool_that_cannot_be_written_is_said_to_who_waits_for_it() -> None:
    assert wake_call(0, [], failed="pools are forbidden") == WakeCall(0, waits="pools are forbidden")


def test_where_decode_may_not_serve_alone_who_waits_for_prefill_hears_of_it() -> None:
    reject = asleep(router={"placement": "deployment", "hold": "10m", "onNoPrefill": "reject"})
    decode, prefill = one(phase=Phase.READY), one(Role.PREFILL, Phase.READY)
    assert can_serve(asleep(), Counts(1, 1), [decode]), "decode serves alone until prefill is there"
    assert not can_serve(reject, Counts(1, 1), [decode])
    assert can_serve(reject, Counts(1, 1), [decode, prefill])
    assert can_serve(reject, Counts(0, 1), [decode]), "nobody will come"
    assert not can_serve(asleep(), Counts(1, 1), [prefill])
    assert not can_serve(asleep(), Counts(0, 0), [decode]), "it is about to go"
    assert wake_call(1, [decode], "exceeded quota").refused == "exceeded quota"
    assert wake_call(1, [decode, one(Role.PREFILL)]) == WakeCall(1, waits="qwen-e0: it starts")


def test_a_start_that_takes_longer_than_clients_wait_is_not_given_up_before_its_end() -> None:
    assert comes_soon([one()])
    assert not comes_soon([one(Role.PREFILL)]), "nobody is served by it"
    assert not comes_soon([one(), one(phase=Phase.READY)]), "another one may come later"
    assert not comes_soon([one(phase=Phase.STOPPING)])
    assert not comes_soon([one(absent=Breakage("CrashLoop", "it crashed"))]), "it would keep its devices for ever"
    assert not comes_soon([one(absent=Waiting("Starting", "it starts", late=True))])
    assert not comes_soon([one(absent=Waiting("Unschedulable", "no node", place=True))])
    assert not comes_soon([])
