"""A router of several real processes before scripted engines: kill -9, drains, sums, silence."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from beats import SERVICE, beat, bye
from processes import free_port
from prometheus_client.parser import text_string_to_metric_families
from router_fleet import KEY, Answer, read_answer, request_bytes
from scripted_engine import Play
from worker_fleet import several

from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.ids import InstanceName, State
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.contract.timeline import HEADER, Traces
from xpyd_sidecar.errors import ConfigError, SidecarError
from xpyd_sidecar.router.workers import owner as ow

LOOPS = ("router",)
pytestmark = pytest.mark.unsanitized


def gone(pid: int) -> bool:
    """No such process."""
    return not Path(f"/proc/{pid}").exists()


async def test_workers_share_the_port_the_roster_and_the_counts() -> None:
    async with several() as f:
        for _ in range(40):
            assert (await f.ok(stream=True)).text == "t0 t1 t2 "
        await f.wait(lambda: f.context.observer.metrics.requests_total == 40, "all records")
        fleet = await f.fleet()
        assert (fleet.requests_total, fleet.requests_failed, fleet.in_flight) == (40, 0, 0)
        assert [i.instance for i in fleet.instances] == ["d0", "d1", "p0"]
        text = (await f.get("/metrics")).body.decode()
        served = [s.value for m in text_string_to_metric_families(text) for s in m.samples
                  if s.name == "xpyd_router_requests_total"]
        assert served == [40]
        call = signing.sign(keys.derive(KEY, "admin call"), signing.SignedCall("GET", "/fleet", f.router.context.name))
        asked = [(await f.get("/fleet", headers={signing.HEADER: call})).status for _ in range(6)]
        assert asked == [200, 401, 401, 401, 401, 401], "whichever worker has it, a call is taken once"
        traced = await f.get("/trace", headers={"Authorization": f"Bearer {keys.admin_token(KEY)}", HEADER: "last 3"})
        traces = msgspec.json.decode(traced.body, type=Traces)
        assert (traces.remembered, len(traces.found)) == (40, 3)
        assert "p0" in traces.silent, "scripted engines have no control socket"
        assert (await f.get("/fleet")).status == (await f.get("/trace")).status == 401
        assert (await f.get("/health")).status == 200
        assert len({f.d[0].seen[i].connection for i in range(len(f.d[0].seen))}) > 1


async def test_each_process_is_shown_in_the_metrics_by_its_number() -> None:
    async with several() as f:
        held = [await f.connect() for _ in range(6)]

        def shown(name: str) -> dict[str, float]:
            families = text_string_to_metric_families(f.context.observer.metrics.text().decode())
            return {s.labels["worker"]: s.value for m in families for s in m.samples if s.name == name}

        await f.wait(lambda: sum(shown("xpyd_router_connections").values()) == 6, "what every worker said")
        await f.wait(lambda: min(shown("xpyd_router_loop_lag_seconds_count").values()) > 0, "each one's lag")
        everyone = set(shown("xpyd_router_connections"))
        assert everyone == {"0", *(str(number) for number in range(1, len(everyone)))}
        assert len(everyone) > 2
        assert shown("xpyd_router_connections")["0"] == 0, "the owner serves no clients"
        memory = shown("process_resident_memory_bytes")
        assert set(memory) == everyone
        assert len(set(shown("process_start_time_seconds"))) == len(everyone)
        assert min(memory.values()) > 1 << 20
        for _, writer in held:
            writer.transport.abort()


async def test_kill_9_of_a_worker_in_the_middle_of_load_costs_its_own_requests_alone() -> None:
    async with several(1, 2, workers=3) as f:
        killed = asyncio.Event()
        for engine in f.d:
            engine.default = Play(chunks=20, hold_after=(10, killed))
        tasks = [asyncio.create_task(f.raw(request_bytes("/v1/completions", {
            "model": "tiny", "prompt": "hi", "stream": True}))) for _ in range(60)]
        await f.wait(lambda: sum(engine.open for engine in f.d) == 60, "load")
        victim = f.pids[0]
        os.kill(victim, signal.SIGKILL)
        await f.wait(lambda: gone(victim), "its end")
        killed.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        whole = [r for r in results if isinstance(r, Answer) and r.status == 200 and r.complete]
        assert 20 <= len(whole) < 60, "the victim's requests break, all others end"
        assert all(answer.text == "".join(f"t{i} " for i in range(20)) for answer in whole)
        await f.wait(lambda: all(not m.in_flight for m in f.context.roster.members()), "no legs")
        await f.wait(lambda: not any(engine.open for engine in (*f.p, *f.d)), "engines that heard of it")
        await f.wait(lambda: victim not in f.pids, "a new worker")
        await f.wait_known()
        for engine in f.d:
            engine.default = Play()
        assert [i.instance for i in (await f.fleet()).instances] == ["d0", "d1", "p0"]
        for _ in range(30):
            await f.ok()


async def test_what_one_worker_finds_out_all_know() -> None:
    async with several(0, 2, workers=2) as f:
        f.d[0].refuse()
        for writer in list(f.d[0]._writers):
            writer.transport.abort()
        f.d[0].health = 500
        answers = [await f.complete() for _ in range(10)]
        assert [a.status for a in answers] == [200] * 10, "a refused connection sends the request elsewhere"
        await f.wait(lambda: bool(f.context.roster._members["d0"].suspended), "the verdict")
        await f.wait_known()
        before = f.d[0].connections
        for _ in range(20):
            await f.ok()
        assert f.d[0].connections == before
        f.d[0].health = 200
        await f.d[0].start()
        await f.wait(lambda: not f.context.roster._members["d0"].suspended, "a good probe")
        await f.wait_known()
        for _ in range(20):
            await f.ok()
        assert f.d[0].connections > before
        f.context.watch.on_message(bye("d0"))
        f.context.watch.on_message(bye("d1"))
        await f.wait_known()
        assert (await f.complete(model="other")).status in {404, 503}


async def test_an_ack_tells_the_sum_and_never_none_before_all_workers_know_of_the_drain() -> None:
    async with several(0, 1, workers=3) as f:
        hold = asyncio.Event()
        f.d[0].default = Play(hold=hold)
        tasks = [asyncio.create_task(f.complete()) for _ in range(12)]
        await f.wait(lambda: len(f.d[0].seen) == 12, "load")
        draining = beat("d0", http=f.d[0].address, state=State.DRAINING, interval_s=60.0)
        await f.wait(lambda: f.context.watch.on_message(draining) == 12, "the sum")
        hold.set()
        await asyncio.gather(*tasks)
        await f.wait(lambda: f.context.watch.on_message(draining) == 0, "no legs")
        f.beat(f.d[0], interval_s=60.0)
        await f.wait_known()
        for worker in f.router._workers.values():
            os.kill(worker.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        try:
            assert f.context.watch.on_message(draining) == 1, "some worker may still pick it"
            await asyncio.sleep(0.2)
            assert f.context.watch.on_message(draining) == 1
        finally:
            for pid in f.pids:
                os.kill(pid, signal.SIGCONT)
        await f.wait(lambda: f.context.watch.on_message(draining) == 0, "workers that know")


async def test_legs_that_were_lost_with_a_restart_are_not_taken_from_those_of_the_new_incarnation() -> None:
    async with several(0, 1, workers=2, failover="error") as f:
        hold = asyncio.Event()
        f.d[0].default = Play(chunks=3, hold_after=(1, hold))
        legs = lambda: f.context.roster.members()[0].in_flight  # noqa: E731
        asked = request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True})
        before = [asyncio.create_task(f.raw(asked)) for _ in range(6)]
        await f.wait(lambda: legs() == 6, "legs on the first incarnation")
        f.beat(f.d[0], incarnation="again", interval_s=60.0)
        await asyncio.gather(*before)
        await f.wait_known()
        after = [asyncio.create_task(f.raw(asked)) for _ in range(4)]
        await f.wait(lambda: legs() == 4, "those of the second alone")
        hold.set()
        await asyncio.gather(*after)
        await f.wait(lambda: legs() == 0, "none")


async def test_a_worker_that_does_not_read_is_caught_up_and_one_that_is_silent_is_replaced(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ow, "MAX_UNREAD", 64 << 10)
    async with several(0, 1, workers=2) as f:
        slow = f.router._workers[1]
        os.kill(slow.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        for number in range(4000):
            f.context.watch.on_message(beat(f"x{number % 500}", http=f"127.0.0.1:{number % 500 + 1}", state=State.STARTING,
                                       model=f"m{number}", interval_s=60.0))
            if number % 250 == 249:
                await asyncio.sleep(0)
        assert slow.behind
        for number in range(500):
            f.context.watch.on_message(bye(f"x{number}"))
        os.kill(slow.process.pid, signal.SIGCONT)  # type: ignore[union-attr]
        await f.wait_known()
        models: set[tuple[str, ...]] = set()
        for _ in range(10):
            models.add(tuple(card["id"] for card in (await f.get("/v1/models")).json["data"]))
        assert models == {("tiny",)}
        pid = slow.process.pid  # type: ignore[union-attr]
        os.kill(pid, signal.SIGSTOP)

        def long_silent() -> bool:
            slow.heard_at = f.context.loop.time() - ow.SILENT_S - 1.0  # what it said before it stopped may still come
            return gone(pid)

        await f.wait(long_silent, "its end")
        await f.wait(lambda: pid not in f.pids, "a new worker")
        await f.wait_known()
        await f.ok()


async def test_an_owner_that_stood_still_itself_kills_no_worker() -> None:
    """What they said meanwhile lies unread."""
    async with several(0, 1, workers=2) as f:
        pids, now = f.pids, f.context.loop.time()
        for worker in f.router._workers.values():
            worker.heard_at = now - 2 * ow.SILENT_S
        f.router.awake = now
        f.router._turn()
        await f.wait_known()
        await f.ok()
        assert f.pids == pids


async def test_stop_drains_every_worker_and_turning_away_reaches_them() -> None:
    async with several(1, 1, workers=2) as f:
        f.d[0].default = Play(chunks=10, delay=0.1)
        f.router.turn_away(True)
        status: list[int] = []
        async with asyncio.timeout(30):
            while status[-4:] != [503] * 4:
                status.append((await f.get("/ready")).status)
        f.router.turn_away(False)
        async with asyncio.timeout(30):
            while (await f.get("/ready")).status != 200:
                pass
        tasks = [asyncio.create_task(f.complete(stream=True)) for _ in range(8)]
        await f.wait(lambda: len(f.d[0].seen) == 8, "load")
        pids = f.pids
        await f.router.stop()
        assert [(await task).text for task in tasks] == ["".join(f"t{i} " for i in range(10))] * 8
        await f.wait(lambda: all(gone(pid) for pid in pids), "their end")
        with pytest.raises(ConnectionError):
            await f.connect()


async def test_the_owners_end_is_the_workers() -> None:
    async with several(0, 1, workers=2) as f:
        pids = f.pids
        for worker in f.router._workers.values():
            assert worker.link is not None
            assert worker.link._transport is not None
            f.router._stopping = True
            worker.link._transport.abort()  # what the kernel does when the owner dies
        await f.wait(lambda: all(gone(pid) for pid in pids), "their end")


async def test_a_taken_port_is_a_configuration_error_and_crash_loops_end_the_router(
        monkeypatch: pytest.MonkeyPatch) -> None:
    async with several(0, 1, workers=2) as f:
        with pytest.raises(ConfigError, match=r"router\.port: cannot listen"):
            async with several(0, 0, workers=2, port=f.router.port):
                pass
        monkeypatch.setattr(ow, "DEATHS", 2)
        for pid in f.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SidecarError, match="workers ended 2 times"):
            async with asyncio.timeout(30):
                await f.router.wait_failed()


async def test_passed_requests_and_pipelining_work_through_workers() -> None:
    async with several(1, 1, workers=2) as f:
        reader, writer = await f.connect()
        writer.write(request_bytes("/metrics", method="GET") + request_bytes("/health", method="GET")
                     + request_bytes("/tokenize", {"prompt": "x"}))
        answers = [await read_answer(reader) for _ in range(3)]
        assert [a.status for a in answers] == [200, 200, 200]
        assert b"xpyd_router_requests" in answers[0].body
        assert json.loads(answers[2].body)
        writer.transport.abort()
        counted = b'xpyd_router_passed_requests_total{outcome="complete",path="/tokenize"} 1.0'
        async with asyncio.timeout(30):
            while counted not in (await f.get("/metrics")).body:
                pass
        assert f.context.observer.metrics.requests_total == 0, "no generation"


async def test_generation_in_a_dialect_is_counted_by_the_owner() -> None:
    async with several(1, 1, workers=2) as f:
        hold = asyncio.Event()
        f.d[0].default = Play(hold=hold)
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi" * 50}]}
        tasks = [asyncio.create_task(f.raw(request_bytes("/v1/messages", body))) for _ in range(6)]
        await f.wait(lambda: f.context.observer.metrics.in_flight == 6, "all are served")
        await f.wait(lambda: [m.in_flight for m in f.context.roster.members()] == [6, 0], "all legs of prefill have ended")
        hold.set()
        answers = await asyncio.gather(*tasks)
        assert {answer.status for answer in answers if isinstance(answer, Answer)} == {200}
        await f.wait(lambda: f.context.observer.metrics.requests_total == 6, "all records")
        told = await f.fleet()
        assert (told.totals.arrivals, told.totals.handovers, told.in_flight) == (6, 6, 0)
        assert [(pair.prefill, pair.decode) for pair in told.pairs] in ([], [("p0", "d0")]), "the second may still run"
        counted = [(record.api, record.outcome) for record in f.context.observer.recent]
        assert counted == [("messages", "ok")] * 6


async def test_the_command_runs_workers_and_its_death_is_theirs(tmp_path: Path) -> None:
    keys.write(tmp_path / "key", KEY)
    port, members = free_port(), free_port()
    router = RouterConfig(host="127.0.0.1", port=port, members_port=members, workers=2, heartbeat_s=0.2, resolve_s=0.2)
    config = SidecarConfig(service=SERVICE, instance=InstanceName("r0"), key_file=str(tmp_path / "key"),
                           run_dir=str(tmp_path), router=router)
    command = [sys.executable, "-m", "xpyd_sidecar", "--config-json", msgspec.json.encode(config).decode()]

    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (what is waited for is other processes')
                await asyncio.sleep(0.05)

    for number in (signal.SIGTERM, signal.SIGKILL):
        log = tmp_path / f"log{number}"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(*command, stderr=file)
        await until(lambda log=log: b"router listens" in log.read_bytes())  # type: ignore[misc]
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(number)
        assert await process.wait() == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        await until(lambda workers=workers: all(gone(pid) for pid in workers))  # type: ignore[misc]


