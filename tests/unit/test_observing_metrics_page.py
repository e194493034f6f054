"""The page of metrics is made at most every quarter of a second, whoever asks for it how often."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from router_fleet import RouterFleet, fleet, read_answer, request_bytes

from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.auth import Admin, ClientKeys
from xpyd_sidecar.router.http.reply import HttpRequest, RequestHandler
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.worker import ASK_S, WorkerPaths

LOOPS = ("router",)
EVERY_S = 0.25
GET = request_bytes("/metrics", method="GET")


def counted(f: RouterFleet) -> list[float]:
    """When the page was made."""
    made: list[float] = []
    text = f.context.observer.metrics.text

    def count() -> bytes:
        made.append(asyncio.get_running_loop().time())
        return text()

    f.context.observer.metrics.text = count
    return made


async def test_many_requests_for_metrics_make_the_page_a_few_times() -> None:
    async with fleet(0, 1) as f:
        made = counted(f)
        reader, writer = await f.connect()
        began = asyncio.get_running_loop().time()
        writer.write(GET * 1000)
        for _ in range(1000):
            answer = await read_answer(reader)
            assert (answer.status, b"xpyd_router_in_flight" in answer.body) == (200, True)
        took = asyncio.get_running_loop().time() - began
        assert len(made) <= 1 + took / EVERY_S
        assert all(later - sooner >= EVERY_S for sooner, later in itertools.pairwise(made))
        writer.transport.abort()


async def test_a_page_is_made_anew_once_it_is_old() -> None:
    async with fleet(0, 1) as f:
        await f.complete()
        line = b'xpyd_router_requests_total{api="completions",outcome="ok"} '
        first = (await f.get("/metrics")).body
        assert line + b"1.0" in first
        await f.complete()
        await f.wait_quiet()
        async with asyncio.timeout(20):
            while line + b"2.0" not in (await f.get("/metrics")).body:
                pass


class Link:
    """What a worker asks the owner."""

    def __init__(self) -> None:
        self.asked: list[li.AskOwner] = []

    def send(self, message: li.AskOwner) -> None:
        self.asked.append(message)


class Caught:
    """The answer to one client."""

    private = True

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        assert not self.status, "a second answer"
        self.status, self.body = status, body

    def fault(self, fault: HttpFault) -> None:
        self.whole(fault.status, [], fault.body())


class Worker:
    """The paths of a worker, and its clients."""

    def __init__(self, f: RouterFleet) -> None:
        self.link = Link()
        self.paths = WorkerPaths(f.context, ClientKeys(None), Admin(ServiceKey(bytes(32)), "w"))
        self.paths.link = self.link  # type: ignore[assignment]

    def get(self, path: str = "/metrics", method: str = "GET") -> tuple[Caught, RequestHandler | None]:
        reply: Any = Caught()
        try:
            return reply, self.paths.handle(HttpRequest(method, path, {b"host": b"localhost"}, b"", "r"), reply)
        except HttpFault as fault:
            reply.fault(fault)
            return reply, None

    def answer(self, body: bytes) -> None:
        self.paths.answer(li.OwnerAnswer(self.link.asked[-1].number, 200, [], body))


async def test_clients_of_a_worker_share_one_question_to_the_owner() -> None:
    async with fleet(0, 1) as f:
        worker = Worker(f)
        first, second, third = worker.get(), worker.get(), worker.get(method="HEAD")
        assert len(worker.link.asked) == 1
        assert second[1] is not None
        second[1].on_client_gone()
        worker.answer(b"page")
        assert [(one.status, one.body) for one, _ in (first, second, third)] == [(200, b"page"), (0, b""), (200, b"page")]
        again, handler = worker.get()
        assert (again.body, handler, len(worker.link.asked)) == (b"page", None, 1)
        await asyncio.sleep(EVERY_S + 0.01)
        later, _ = worker.get()
        assert (later.status, len(worker.link.asked)) == (0, 2)
        worker.answer(b"newer")
        assert later.body == b"newer"


async def test_what_is_each_clients_own_is_asked_for_each() -> None:
    async with fleet(0, 1) as f:
        worker = Worker(f)
        asked = [worker.get("/fleet"), worker.get("/fleet"), worker.get("/metrics"), worker.get("/dashboard/data")]
        assert [ask.path for ask in worker.link.asked] == ["/fleet", "/fleet", "/metrics", "/dashboard/data"]
        for ask in worker.link.asked:
            worker.paths.answer(li.OwnerAnswer(ask.number, 200, [], b"%d" % ask.number))
        assert [one.body for one, _ in asked] == [b"1", b"2", b"3", b"4"]


async def test_an_owner_that_does_not_answer_costs_every_client_that_waits_a_503_and_is_asked_again() -> None:
    async with fleet(0, 1) as f:
        worker = Worker(f)
        first, second = worker.get(), worker.get()
        worker.paths._answered(worker.link.asked[0].number, None)
        assert [first[0].status, second[0].status] == [503, 503]
        worker.get()
        assert len(worker.link.asked) == 2
        assert ASK_S <= 5.0
