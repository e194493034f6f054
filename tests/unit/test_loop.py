"""The loop over a backend made of plain values."""

from __future__ import annotations

import asyncio

import pytest
from plan_world import World, desired

from xpyd_operator import loop
from xpyd_operator.errors import LocalError, NotYet, ServiceGone, XpydError
from xpyd_operator.plan.actions import Action, Create
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import ObservedService
from xpyd_operator.plan.round import Round

LOOPS = ("virtual",)


class FakeBackend:
    """The planner's world as a backend; faults on request."""

    def __init__(self) -> None:
        self.world = World(start_s=1, drain_s=1, stop_s=1)
        self.want: DesiredService | Exception = desired(1, 1)
        self.blind = 0
        self.clumsy = 0
        self.lacks = ""
        """What actions wait for."""
        self.unprepared: XpydError | None = None
        self.gone_after: int | None = None
        """Actions after which the service does not exist any more."""
        self.rounds: list[Round] = []
        self.prepared: list[Round] = []

    width = 4

    async def prepare(self, round_: Round) -> None:
        self.prepared.append(round_)
        if self.unprepared is not None:
            raise self.unprepared

    async def desired_service(self) -> DesiredService:
        if isinstance(self.want, Exception):
            raise self.want
        return self.want

    async def observe(self, now: float) -> ObservedService:
        if self.blind:
            self.blind -= 1
            raise LocalError("cannot look")
        return self.world.observe()

    async def apply(self, action: Action) -> None:
        if self.lacks:
            raise NotYet(self.lacks)
        if self.gone_after is not None:
            if len(self.world.log) >= self.gone_after:
                raise ServiceGone("it is being deleted")
            await asyncio.sleep(0)
        if self.clumsy:
            self.clumsy -= 1
            raise LocalError("cannot act")
        self.world.apply(action)

    def report(self, round_: Round) -> None:
        self.rounds.append(round_)
        self.world.advance(1.0)


async def run(backend: FakeBackend, until: int = 40) -> Round:
    def finished(done: Round) -> bool:
        return (done.plan.settled and not done.failures and done.observed.instances != ()) or len(backend.rounds) >= until

    return await loop.run(backend, lambda: backend.world.now, asyncio.Event(), interval_s=0.001, until=finished)


async def test_converges_and_reports_every_round() -> None:
    backend = FakeBackend()
    done = await run(backend)
    assert done.plan.settled
    assert len(backend.rounds) >= 2
    assert backend.rounds[0].plan.actions


async def test_a_round_that_cannot_look_is_tried_again() -> None:
    backend = FakeBackend()
    backend.blind = 3
    assert (await run(backend)).plan.settled


async def test_an_action_that_fails_is_reported_and_planned_again() -> None:
    backend = FakeBackend()
    backend.clumsy = 1
    assert (await run(backend)).plan.settled
    assert backend.rounds[0].failures == ("start the router: none runs: cannot act",)
    assert backend.world.log.count("start the router: none runs") == 1


async def test_a_service_that_goes_under_a_round_ends_it_without_a_word_for_each_action(
        caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    backend.want, backend.gone_after = desired(4, 4), 1
    with pytest.raises(ServiceGone, match="it is being deleted"):
        await loop.converge(backend, 0.0)
    assert len(backend.world.log) == 1
    assert backend.rounds == [], "nothing is said of it"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
    for backend.gone_after, backend.unprepared, backend.want in (
            (None, ServiceGone("it is being deleted"), desired(1, 1)), (None, None, ServiceGone("it is being deleted"))):
        with pytest.raises(ServiceGone):
            await loop.converge(backend, 0.0, last=desired(1, 1))
    assert len(backend.world.log) == 1


async def test_what_waits_for_something_that_is_not_there_is_no_failure_and_planned_again() -> None:
    backend = FakeBackend()
    backend.lacks, backend.unprepared = "the policy is not there yet", NotYet("a Deployment waits for the policy")
    done = await loop.converge(backend, 0.0)
    assert done.plan.actions
    assert (done.failures, backend.world.log) == ((), [])
    assert done.postponed == ("what goes with the service waits: a Deployment waits for the policy",
                              "making instances waits: the policy is not there yet"), "once, however many wait"
    backend.unprepared = LocalError("cannot prepare")
    assert (await loop.converge(backend, 0.0)).failures == ("what goes with the service: cannot prepare",)
    backend.lacks, backend.unprepared = "", None
    assert (await run(backend)).plan.settled


async def test_while_the_wish_cannot_be_read_the_last_one_counts() -> None:
    backend = FakeBackend()
    await run(backend)
    backend.want = LocalError("no document")
    backend.rounds.clear()
    done = await loop.converge(backend, backend.world.now, last=desired(1, 1))
    assert done.failures == ("what is wanted: no document",)
    assert done.plan.settled
    with pytest.raises(LocalError):
        await loop.converge(backend, backend.world.now)


async def test_a_dry_run_plans_and_does_nothing() -> None:
    backend = FakeBackend()
    done = await loop.converge(backend, 0.0, dry_run=True)
    assert done.plan.actions
    assert backend.world.log == []
    assert backend.rounds == []


async def test_by_default_it_ends_when_a_service_that_was_to_end_is_gone() -> None:
    backend = FakeBackend()
    await run(backend)
    backend.want = desired(1, 1, stopping=True)
    async with asyncio.timeout(5):
        done = await loop.run(backend, lambda: backend.world.now, asyncio.Event(), interval_s=0.001)
    assert done.gone
    assert backend.world.engines == {}


async def test_a_wake_begins_the_next_round_at_once() -> None:
    backend, wake = FakeBackend(), asyncio.Event()
    task = asyncio.create_task(loop.run(backend, lambda: backend.world.now, wake, interval_s=60.0, until=lambda _: False))
    async with asyncio.timeout(30):
        for count in range(1, 4):
            while len(backend.rounds) < count:  # noqa: ASYNC110 (the rounds are under test)
                await asyncio.sleep(0.001)
            wake.set()
    task.cancel()


class SlowBackend(FakeBackend):
    """An API server that takes its time, and answers in the order in which it was asked."""

    width = 64

    def __init__(self, prefill: int, decode: int) -> None:
        super().__init__()
        self.want = desired(prefill, decode)
        self.under_way = 0
        self.answered = 0
        self.begun: list[str] = []
        self.twenty = asyncio.Event()
        """So many were answered for."""
        self.most: list[tuple[int, int]] = []
        """Under way, and answered by then."""

    async def apply(self, action: Action) -> None:
        if isinstance(action, Create):
            self.begun.append(action.role.value)
            self.under_way += 1
            self.most.append((self.under_way, self.answered))
            await asyncio.sleep(0.001)
            self.under_way -= 1
            self.answered += 1
            if self.answered == 20:
                self.twenty.set()
        self.world.apply(action)


async def test_the_next_of_a_pair_is_made_when_the_one_before_is_answered_for() -> None:
    backend = SlowBackend(2, 2)
    await loop.converge(backend, 0.0)
    assert backend.begun == ["prefill", "decode", "prefill", "decode"]
    assert [under for under, _ in backend.most] == [1, 1, 1, 1]


async def test_of_many_an_eighth_as_many_are_under_way_as_were_answered_for_and_the_ratio_holds() -> None:
    backend = SlowBackend(100, 200)
    await loop.converge(backend, 0.0)
    assert len(backend.begun) == 300
    assert all(under <= max(1, answered // 8) for under, answered in backend.most)
    assert max(under for under, _ in backend.most) > 20
    for count in range(3, 300):
        assert abs(backend.begun[:count].count("decode") - count * 2 / 3) <= 1


async def test_when_a_round_is_cut_off_nothing_goes_on_being_made() -> None:
    backend = SlowBackend(100, 200)
    round_ = asyncio.ensure_future(loop.converge(backend, 0.0))
    await backend.twenty.wait()
    round_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await round_
    begun = len(backend.begun)
    await asyncio.sleep(0.01)
    assert len(backend.begun) == begun < 300
