"""Leading over a store that may be slow, refuse or be away: the work goes on only while the Lease is held."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.election.leader import Election, Times
from xpyd_operator.kube.election.lease import Candidate, StillWorking

LOOPS = ("virtual",)
TIMES = Times(lease_s=2, renew_s=0.6, retry_s=0.1)
POLL_S: Final = 1 / 64
"""A binary fraction, of which sums are exact: a virtual clock stands still over what is less than a bit of it."""
CRASH_S: Final = 15.0
"""As ``docs/install.md`` has it: after so long another leads, where the leader crashed."""
ORDERLY_S: Final = 3.0
"""And where it ended in order."""


class Store:
    """One Lease in memory, with versions and conflicts like the API server's."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.writes = 0
        self.away = False
        self.hangs = False

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.away:
            raise ApiError(0, "Unreachable", "connection refused")

    def _keep(self, body: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        body["metadata"]["resourceVersion"] = str(self.writes)
        self.lease = body
        return copy.deepcopy(body)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        await self._answer()
        if self.lease is None:
            raise ApiError(404, "NotFound", "no such Lease")
        return copy.deepcopy(self.lease)

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        await self._answer()
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "there is one")
        return self._keep(copy.deepcopy(body))

    async def patch(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        await self._answer()
        if self.lease is None:
            raise ApiError(404, "NotFound", "no such Lease")
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        lease = copy.deepcopy(self.lease)
        lease["spec"] |= body["spec"]
        return self._keep(lease)


class Runner:
    """A candidate with work that notes when it begins and ends."""

    def __init__(self, name: str, store: Store, end_s: float = 0.0, times: Times = TIMES) -> None:
        self.notes: list[str] = []
        self.stop = asyncio.Event()
        self.end_s = end_s
        self.candidate = Candidate(Election("ns", "lock", name, times), store, "ns", "lock",
                                   lambda leading: self.notes.append("leader" if leading else "follower"))
        self.task = asyncio.ensure_future(self.candidate.run(self.work, self.stop, 1.0))

    async def work(self, ending: asyncio.Event) -> None:
        self.notes.append("begins")
        try:
            await ending.wait()
            await asyncio.sleep(self.end_s)
            self.notes.append("ends")
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise

    async def wait_for(self, note: str, within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while note not in self.notes:  # noqa: ASYNC110 (the notes are what is under test)
                await asyncio.sleep(POLL_S)


async def end(*runners: Runner) -> None:
    for each in runners:
        each.stop.set()
        await each.task


async def test_one_works_and_the_other_waits() -> None:
    store = Store()
    one, other = Runner("one", store), Runner("other", store)
    await one.wait_for("begins")
    await asyncio.sleep(0.5)
    assert other.notes == []
    assert store.lease is not None
    assert store.lease["spec"]["holderIdentity"] == "one"
    await end(one, other)


async def test_a_leader_that_ends_in_order_hands_over_at_once() -> None:
    store = Store()
    one, other = Runner("one", store), Runner("other", store)
    await one.wait_for("begins")
    began = asyncio.get_running_loop().time()
    one.stop.set()
    await other.wait_for("begins", 1.0)
    assert asyncio.get_running_loop().time() - began < 1.0
    assert one.notes == ["leader", "begins", "ends", "follower"]
    await end(one, other)
    assert store.lease is not None
    assert store.lease["spec"]["holderIdentity"] == ""
    assert store.lease["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("at_s", [step / 16 for step in range(40)])
@pytest.mark.parametrize("crash", [True, False])
async def test_with_the_times_of_an_operator_another_leads_as_soon_as_is_promised(crash: bool, at_s: float) -> None:
    store = Store()
    one = Runner("one", store, times=Times())
    await one.wait_for("begins")
    await asyncio.sleep(at_s)
    other = Runner("other", store, times=Times())  # it looks at any time between two renewals
    await asyncio.sleep(17 / 8)  # where it has looked right before the last one, the end comes right after that
    if crash:
        one.candidate._store = Store()  # it is heard no more
    else:
        one.stop.set()
    await other.wait_for("begins", CRASH_S if crash else ORDERLY_S)
    assert ("ends" in one.notes) != crash
    await end(one, other)


async def test_the_lease_is_renewed_while_the_work_ends() -> None:
    store = Store()
    one = Runner("one", store, end_s=0.9)
    await one.wait_for("begins")
    writes = store.writes
    await end(one)
    assert store.writes - writes > 5
    assert one.notes[-2:] == ["ends", "follower"]


async def test_work_that_does_not_end_in_order_is_cancelled() -> None:
    one = Runner("one", Store(), end_s=60.0)
    await one.wait_for("begins")
    began = asyncio.get_running_loop().time()
    await end(one)
    assert 0.9 < asyncio.get_running_loop().time() - began < 2.0
    assert one.notes[-2:] == ["cancelled", "follower"]


@pytest.mark.parametrize("fault", ["away", "hangs"])
async def test_a_leader_that_cannot_renew_stops_before_another_begins_and_follows(fault: str) -> None:
    store = Store()
    one = Runner("one", store)
    await one.wait_for("begins")
    began = asyncio.get_running_loop().time()
    setattr(store, fault, True)
    await one.wait_for("cancelled")
    assert TIMES.renew_s - 0.15 < asyncio.get_running_loop().time() - began < TIMES.lease_s
    setattr(store, fault, False)
    if fault == "away":
        one.notes.clear()
        await one.wait_for("begins")
    one.stop.set()
    one.task.cancel()
    await asyncio.wait((one.task,))


async def test_a_leader_whose_lease_is_taken_stops_at_once() -> None:
    store = Store()
    one = Runner("one", store)
    await one.wait_for("begins")
    assert store.lease is not None
    store.lease["spec"]["holderIdentity"] = "thief"
    store.lease["metadata"]["resourceVersion"] = "1000"
    await one.wait_for("cancelled", 1.0)
    await end(one)
    assert store.lease["spec"]["holderIdentity"] == "thief"


async def test_short_troubles_cost_nothing() -> None:
    store = Store()
    one = Runner("one", store)
    await one.wait_for("begins")
    for _ in range(3):
        store.away = True
        await asyncio.sleep(0.3)
        store.away = False
        await asyncio.sleep(0.6)
    assert one.notes == ["leader", "begins"]
    await end(one)


async def ends_early(_: asyncio.Event) -> None:
    """Work that ends by itself."""


async def fails(_: asyncio.Event) -> None:
    raise XpydError("broken")


@pytest.mark.parametrize(("work", "said"), [(ends_early, "without being asked"), (fails, "broken")])
async def test_work_that_ends_by_itself_ends_the_candidate(
        work: Callable[[asyncio.Event], Awaitable[None]], said: str) -> None:
    store = Store()
    candidate = Candidate(Election("ns", "lock", "one", TIMES), store, "ns", "lock")
    with pytest.raises(XpydError, match=said):
        await candidate.run(work, asyncio.Event(), 1.0)
    assert store.lease is not None
    assert store.lease["spec"]["holderIdentity"] == ""


async def test_work_that_cannot_be_stopped_is_reported_before_another_may_begin() -> None:
    store = Store()
    free = asyncio.Event()

    async def stubborn(_: asyncio.Event) -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    candidate = Candidate(Election("ns", "lock", "one", TIMES), store, "ns", "lock")
    task = asyncio.ensure_future(candidate.run(stubborn, asyncio.Event(), 1.0))
    while store.lease is None:  # noqa: ASYNC110 (nobody says when)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.15)
    store.away = True
    began = asyncio.get_running_loop().time()
    with pytest.raises(StillWorking):
        await task
    assert asyncio.get_running_loop().time() - began < TIMES.lease_s
    free.set()
