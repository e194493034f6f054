"""What is told of a round."""

from __future__ import annotations

import msgspec
from pod_world import PodWorld, wish

from xpyd_operator.api.status import Condition
from xpyd_operator.plan.desired import STARTUP_S, DesiredService
from xpyd_operator.plan.disaggregating import is_news
from xpyd_operator.plan.news import News, news
from xpyd_operator.plan.round import Round, think
from xpyd_sidecar.contract.intake import Disaggregation


class Reporter:
    """Runs a world and collects what is told, as ``instance reason`` or ``reason``."""

    def __init__(self) -> None:
        self.world = PodWorld()
        self.before: Round | None = None
        self.told: list[News] = []

    def run(self, want: DesiredService, rounds: int) -> list[str]:
        begin = len(self.told)
        for _ in range(rounds):
            done = think(want, self.world.observe(), self.world.now)
            for action in done.plan.actions:
                self.world.apply(action)
            self.told += news(self.before, done)
            self.before = done
            self.world.advance(1.0)
        return [f"{one.instance} {one.reason}" if one.instance else one.reason for one in self.told[begin:]]


def test_a_start_tells_who_is_made_and_ready_and_when_requests_are_answered() -> None:
    assert Reporter().run(wish(1, 1), 40) == [
        "qwen-e0 Created",
        "qwen-e1 Created",
        "qwen-e0 InstanceReady",
        "qwen-e1 InstanceReady",
        "Ready",
        "Compatible",
    ]


def test_nothing_changed_nothing_told() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 1), 60)
    assert reporter.run(wish(1, 1), 60) == []


def test_a_rollout_begins_and_ends() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 1), 60)
    assert reporter.run(wish(1, 1, "r1", "r2"), 60) == [
        "RolloutStarted",
        "qwen-e2 Created",
        "qwen-e2 InstanceReady",
        "qwen-e1 Draining",
        "qwen-e1 Gone",
        "RolloutFinished",
    ]
    assert reporter.told[-1].message == "decode is at revision r2"


def test_failures_are_warnings_that_name_the_instance() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 2), 60)
    reporter.world.crash("qwen-e1")
    told = reporter.run(wish(1, 2), 60)
    assert told == ["qwen-e1 Crashed", "qwen-e1 InstanceReady"]
    assert reporter.told[-2] == News("Warning", "Crashed", "exit code 1: no", reporter.told[-2].instance)
    reporter.world.fail("qwen-e2")
    assert reporter.run(wish(1, 2), 14) == [
        "qwen-e2 Evicted",
        "qwen-e2 Removed",
        "qwen-e3 Created",
        "qwen-e2 Gone",
    ]


def test_a_pod_that_vanishes_is_a_warning() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 1), 60)
    del reporter.world.pods["qwen-e1"]
    told = reporter.run(wish(1, 1), 1)
    assert "qwen-e1 Gone" in told
    assert "NotReady" in told
    assert [one.type for one in reporter.told if one.reason == "Gone"] == ["Warning"]


def test_limits_are_told_once() -> None:
    reporter = Reporter()
    want = wish(1, 1, held="limits.maxInstances 2 makes 1P3D 1P1D")
    assert reporter.run(want, 60).count("LimitsHeld") == 1


def test_who_begins_to_wait_in_a_queue_is_told_once_and_is_no_warning() -> None:
    reporter = Reporter()
    reporter.world.quota = 2
    told = reporter.run(wish(1, 2), 60)
    assert [each for each in told if "Queued" in each] == ["qwen-e2 Queued"]
    reporter.world.quota = 3
    told += reporter.run(wish(1, 2), 60)
    assert "qwen-e2 InstanceReady" in told
    assert [each for each in told if each.endswith(("Queued", "Degraded"))] == ["qwen-e2 Queued"]


def test_what_failed_is_told_once_and_not_as_done() -> None:
    world = PodWorld()
    done = think(wish(1, 1), world.observe(), world.now)
    action = done.plan.actions[0]
    failed = msgspec.structs.replace(done, failures=(f"{action}: 500",))
    assert [one.reason for one in news(None, failed)] == ["Created", "Failed"]
    assert [one.reason for one in news(failed, failed)] == ["Created"]


def test_after_a_restart_of_the_operator_only_what_is_wrong_is_told() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 2), 60)
    reporter.before = None
    assert reporter.run(wish(1, 2), 5) == []
    reporter.world.room = 0
    reporter.run(wish(1, 3), 10)
    reporter.before = None
    assert reporter.run(wish(1, 3), 5) == []
    reporter.world.advance(STARTUP_S)
    reporter.before = None
    assert reporter.run(wish(1, 3), 5) == ["Degraded"]


def test_who_finds_no_node_is_told_of_at_once_and_is_a_warning_once_it_waits_too_long() -> None:
    reporter = Reporter()
    reporter.world.room = 1
    want = wish(1, 1)
    assert [each for each in reporter.run(want, 60) if "Unschedulable" in each] == ["qwen-e1 Unschedulable"]
    assert reporter.told[-1].type == "Normal"
    reporter.world.advance(STARTUP_S)
    assert reporter.run(want, 60) == ["qwen-e1 Unschedulable", "Degraded"]
    assert [one.type for one in reporter.told[-2:]] == ["Warning", "Warning"]


def test_an_instance_that_routers_eject_and_pick_again_is_told_of() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 1), 60)
    assert reporter.before is not None
    instances = reporter.before.observed.instances
    hung = [msgspec.structs.replace(one, ejected="it hangs" if one.name == "qwen-e1" else "") for one in instances]
    away = msgspec.structs.replace(reporter.before, observed=msgspec.structs.replace(
        reporter.before.observed, instances=tuple(hung)))
    assert [(one.type, one.instance, one.reason, one.message) for one in news(reporter.before, away) if one.instance] == [
        ("Warning", "qwen-e1", "Ejected", "routers send it nothing: it hangs")]
    assert [one for one in news(away, away) if one.instance] == []
    assert [(one.type, one.instance, one.reason) for one in news(away, reporter.before) if one.instance] == [
        ("Normal", "qwen-e1", "Readmitted")]


def test_disaggregation_that_turns_is_told_and_what_is_asked_for_is_not() -> None:
    def turned(*, was: str, now: str) -> bool:
        def condition(word: str) -> Condition:
            holds, _, reason = word.partition(" ")
            return Condition(type="Disaggregating", status=holds, reason=reason)

        return is_news(condition(was) if was else None, condition(now))

    assert turned(was="True Receiving", now="False LoadsFail")
    assert turned(was="True Receiving", now="False NoPrefill")
    assert turned(was="False LoadsFail", now="True Receiving")
    assert turned(was="Unknown NoTraffic", now="False LoadsFail")
    assert not turned(was="", now="True Receiving")
    assert not turned(was="False LoadsFail", now="False LoadsFail")
    assert not turned(was="Unknown NoDecode", now="False NoPrefill"), "instances come up in any order"
    assert not turned(was="True Receiving", now="False SkippedByRule"), "the document asks for it"
    assert not turned(was="False DecodeAlone", now="True Receiving")


def test_an_event_tells_that_decode_computes_prompts() -> None:
    reporter = Reporter()
    reporter.run(wish(1, 1), 60)
    for told in (Disaggregation("True", "Receiving", "all"), Disaggregation("False", "LoadsFail", "3 of 3 loads failed")):
        assert reporter.before is not None
        found = msgspec.structs.replace(reporter.before.observed, disaggregation=told)
        done = think(reporter.before.desired, found, 1000.0)
        said = news(reporter.before, done)
        reporter.before = done
    assert [(one.type, one.reason, one.message) for one in said] == [
        ("Warning", "NotDisaggregating", "LoadsFail: 3 of 3 loads failed")]
