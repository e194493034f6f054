"""What the processes of a router tell each other of requests that end engines: both sides, without processes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from rosters import make

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.fleet.member import DeathVerdict
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.poison_sharing import GATHER_S, OwnerPoison, WorkerPoison

LOOPS = ("virtual",)
D1, D2 = (InstanceName("d1"), Incarnation("i1")), (InstanceName("d2"), Incarnation("i2"))
A, B, C = (RequestHash(name * 16) for name in (b"a", b"b", b"c"))


class One:
    """A request that may be held."""

    alone = True

    def __init__(self, request: RequestHash) -> None:
        self.request = request
        self.where: list[InstanceName] = []
        self.said: list[str] = []

    def request_hash(self) -> RequestHash:
        return self.request

    def instances(self) -> list[InstanceName]:
        return self.where

    def go_on(self) -> None:
        self.said.append("go on")
        self.where = [InstanceName("d9")]

    def condemn(self, fault: HttpFault) -> None:
        self.said.append(f"{fault.status} {fault.code}")


class Site:
    """An owner and workers, whose messages go at once."""

    def __init__(self, workers: int) -> None:
        loop, self.roster = asyncio.get_running_loop(), make()
        self.owner = OwnerPoison(loop, self.roster, self.tell, lambda number, turn: self.workers[number].on_message(turn))
        self.workers = [
            WorkerPoison(loop, self.roster, partial(self.owner.on_message, number)) for number in range(workers)]

    def tell(self, message: Any) -> None:
        for worker in self.workers:
            worker.on_message(message)


async def suspects(site: Site, *requests: RequestHash) -> None:
    """Two engines died with these requests of different workers."""
    for engine in (D1, D2):
        for worker, request in zip(site.workers, requests, strict=False):
            worker.noted(*engine, request)
        site.owner.judged(*engine, DeathVerdict.DIED)
    await asyncio.sleep(GATHER_S + 1)


async def test_a_death_is_judged_when_every_worker_has_said_whose_legs_it_had() -> None:
    site = Site(2)
    site.workers[0].noted(*D1, A)
    site.owner.judged(*D1, DeathVerdict.DIED)
    await asyncio.sleep(GATHER_S + 1)
    site.workers[0].noted(*D2, A)
    site.owner.judged(*D2, DeathVerdict.DIED)
    site.workers[1].noted(*D2, B)
    await asyncio.sleep(GATHER_S + 1)
    assert not site.owner.ledger.convictions(), "A was not alone"
    assert [worker.ledger.cases() == site.owner.ledger.cases() for worker in site.workers] == [True, True]
    site.workers[1].whole(B)
    assert B not in site.owner.ledger.cases()[D2].present


async def test_who_is_convicted_is_refused_by_all() -> None:
    site = Site(3)
    one = One(A)
    for engine in (D1, D2):
        site.workers[0].noted(*engine, A)
        site.owner.judged(*engine, DeathVerdict.DIED)
    assert site.workers[0].comes(one)
    await asyncio.sleep(GATHER_S + 1)
    assert one.said == ["502 poison_request"]
    for worker in site.workers:
        with pytest.raises(HttpFault) as caught:
            worker.refuse(A)
        assert caught.value.outcome == "poison"


async def test_an_engine_that_lives_is_told_to_all() -> None:
    site = Site(2)
    for engine in (D1, D2):
        site.workers[0].noted(*engine, A)
    assert [worker.alert for worker in site.workers] == [True, True]
    site.owner.judged(*D1, DeathVerdict.LIVES)
    assert [worker.alert for worker in site.workers] == [False, False]
    assert [list(worker.ledger.cases()) for worker in site.workers] == [[D2], [D2]]


async def test_suspects_run_in_one_worker_at_a_time() -> None:
    site = Site(3)
    await suspects(site, A, B, C)
    ones = [One(A), One(B), One(C)]
    for worker, one in zip(site.workers, ones, strict=True):
        assert worker.comes(one)
    await asyncio.sleep(0.1)
    assert [one.said for one in ones] == [["go on"], [], []]
    site.workers[0].closed(ones[0], whole=True)
    await asyncio.sleep(0.1)
    assert [one.said for one in ones] == [["go on"], ["go on"], []]
    site.owner.left(1)  # the worker's process has ended
    await asyncio.sleep(0.1)
    assert [one.said for one in ones] == [["go on"]] * 3


async def test_a_turn_that_comes_when_its_wish_is_over_is_not_taken() -> None:
    site = Site(2)
    await suspects(site, A, B)
    given: list[Any] = []
    site.owner._give_turn = lambda number, turn: given.append((number, turn))
    one = One(A)
    assert site.workers[0].comes(one)
    await asyncio.sleep(0.1)
    site.workers[0].closed(one, whole=False)
    await asyncio.sleep(0.1)
    again = One(A)
    assert site.workers[0].comes(again)
    await asyncio.sleep(0.1)
    [(_, first), (_, second)] = given
    site.workers[0].on_message(first)
    await asyncio.sleep(0.1)
    assert again.said == []
    site.workers[0].on_message(second)
    await asyncio.sleep(0.1)
    assert again.said == ["go on"]


async def test_a_worker_that_did_not_read_gets_all_of_it() -> None:
    site = Site(2)
    await suspects(site, A, B)
    late = WorkerPoison(asyncio.get_running_loop(), site.roster, lambda _: None)
    late.noted(*D2, C)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(site.owner.evidence()), type=li.Evidence)
    late.on_message(message)
    assert late.ledger.cases() == site.owner.ledger.cases()
    assert (late.alert, late.watching) == (True, True)
    late.on_message(li.Evidence([], []))
    assert (late.alert, late.watching) == (False, False)
