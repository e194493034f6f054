"""Scenarios without engines: both sides of the connector over real sockets, stepped as vLLM would step them.

    report = run_life(folder, seed=1, first=0, count=25)

Four engines live for one life, two of them prefill. Each has few blocks, so requests wait for some, and what is freed is
marked: a byte that is written into a block that nobody holds is seen when the block is given out again. With ``late`` they
run on scripted GPUs (``copies``): both marking and looking are kernels then.
"""

from __future__ import annotations

import contextlib
import random
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from connector_sides import BLOCK, BLOCKS, Engine, decode_leg, idle, prefill_leg, request
from copies import Clock
from processes import free_port
from scenario import LEAK_S, SCRIPTED, Fault, Report, Scenario, draw
from wire import Wire

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.transport.tcp import cipher

Work = tuple[Any, list[int], int, int]
"""What a request does in a step: it, its new blocks, tokens computed before, and now."""
LONGEST = 19 * BLOCK
LEG_S = 4.0
HANG_S = 40.0
SPAN_S = 2.0
"""Scenarios of a life begin within it."""


@dataclass(eq=False)
class Job:
    """A leg."""

    leg: Any
    prompt: int
    begins: float
    first: int = 0
    """Decode: blocks that it has already."""
    leaves: float | None = None
    """Share of the prompt after which prefill's client leaves, or seconds after which decode's does."""
    preempted: bool = False
    """Prefill: will be, once."""
    after: Callable[[], None] | None = None
    """Called when the leg is over."""
    ids: list[int] = field(default_factory=list)
    done: int = 0
    known: bool = False
    loading: bool = False
    aborted: bool = False
    over: str = ""

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return int(self.leg.num_prompt_tokens)

    @property
    def handed(self) -> int:
        """Tokens that prefill hands over."""
        return self.tokens - 1

    def end(self, how: str) -> None:
        """The leg is over."""
        self.over = how
        if self.after is not None:
            self.after()


class Stage:
    """One engine with a scheduler of a few lines."""

    def __init__(self, name: str, folder: Path, report: Report, source: random.Random, **options: Any) -> None:
        self.name, self.folder, self.report, self.source = name, folder, report, source
        self.wire: Wire | None = None
        if options.get("tensor", 1) == 1:
            port = free_port()
            self.wire = Wire(port, sealed=options.get("encryption") == "enabled")
            options |= {"data_port": port, "advertise_data": HostPort(f"127.0.0.1:{self.wire.port}")}
        self.options = options
        self.jobs: list[Job] = []
        self.stalled = 0.0
        self.life = 0
        self.start()

    def start(self) -> None:
        """A new life, under the same name and addresses."""
        self.life += 1
        self.report.lives += 1
        home = self.folder / f"{self.name}-{self.life}"
        home.mkdir()
        self.engine = Engine(self.name, home, **self.options)
        self.free = list(range(1, BLOCKS))  # 0 stands for none in vLLM's tables
        for block in self.free:
            self._mark(block)
        self.seen = 0
        self.held: dict[str, list[int]] = {}
        """By request that has ended: blocks that are not copied out yet."""

    def kill(self) -> None:
        """The end of all its sockets and requests, and the next life."""
        self.engine.stop()
        if self.wire is not None:
            self.wire.cut()
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            if job.known:
                job.end("killed")
            else:
                self.jobs.append(job)
        self.start()

    def close(self) -> None:
        """The end."""
        self.engine.stop()
        if self.wire is not None:
            self.wire.close()

    def _kernel(self, block: int, call: Callable[[Any], None]) -> None:
        """On a block of each cache."""
        for caches, device in zip(self.engine.caches, self.engine.devices, strict=True):
            for cache in caches.values():
                device.compute(0.0, partial(call, cache[block]))

    def _mark(self, block: int) -> None:
        self._kernel(block, lambda data: data.fill_(-1 - block))

    def take(self, count: int) -> list[int]:
        """Blocks, looked at: nobody may have written into them."""
        ids = [self.free.pop(self.source.randrange(len(self.free))) for _ in range(count)]
        for block in ids:
            self._kernel(block, partial(self._look, block))
        return ids

    def _look(self, block: int, data: Any) -> None:
        if not bool((data == -1 - block).all()):
            self.report.blame("stray", f"{self.name}: block {block} was written to while nobody held it")

    def give(self, job: Job) -> None:
        """Free a job's blocks."""
        self._free(job.ids)
        job.ids = []

    def _free(self, ids: list[int]) -> None:
        for block in ids:
            self._mark(block)
        self.free += ids

    def _preempt(self, now: float) -> None:
        """Take blocks from jobs that are running, as a scheduler does that has too few."""
        jobs = [one for one in self.jobs if one.begins <= now and one.preempted and one.done and one.ids]
        if not jobs:
            return
        self.engine.step(preempted=tuple(one.leg for one in jobs))
        for job in jobs:
            job.preempted = False
            self.report.preemptions += 1
            self.give(job)
            job.done = 0

    def step(self, now: float) -> None:
        """One step of the engine."""
        if now < self.stalled:
            return
        self._preempt(now)
        new: list[Work] = []
        cached: list[Work] = []
        for job in [one for one in self.jobs if one.begins <= now]:
            if not job.known:
                job.known = True
                self.engine.scheduler.new_request(job.leg)
            if job.leg.kv_transfer_params["role"] == "decode":
                self._decode(job, now)
            elif (work := self._prefill(job)) is not None:
                (cached if work[2] else new).append(work)
        self.engine.step(new=tuple(new), cached=tuple(cached))
        for job in [one for one in self.jobs if one.done == one.tokens and not one.over]:
            self._leave(job, "prefilled")
        for name in [name for name in self.held if name in self.engine.sent]:
            self._free(self.held.pop(name))
        loaded, self.seen = self.engine.recved[self.seen:], len(self.engine.recved)
        for name in loaded:
            job = next(one for one in self.jobs if one.leg.request_id == name)
            self._loaded(job, failed=name in self.engine.failed)
        self.jobs = [one for one in self.jobs if not one.over]

    def _leave(self, job: Job, how: str) -> None:
        if self.engine.scheduler.on_request_ended(job.leg):
            self.held[job.leg.request_id], job.ids = job.ids, []
        self.give(job)
        job.end(how)

    def _prefill(self, job: Job) -> Work | None:
        if job.leaves is not None and job.done >= job.leaves * job.tokens:
            self._leave(job, "left")
            return None
        fresh = not job.ids
        if fresh:
            need = -(-job.tokens // BLOCK)
            if len(self.free) < need:
                return None
            job.ids = self.take(need)
            self.engine.scheduler.on_allocated(job.leg, (job.ids,), 0)
        before = job.done
        job.done = min(job.tokens, before + self.source.randrange(1, 3 * BLOCK))
        whole = job.ids if job.done >= job.handed else job.ids[:job.done // BLOCK]
        self.engine.fill(whole, job.prompt)
        return job.leg, job.ids if fresh else [], before, job.done - before

    def _decode(self, job: Job, now: float) -> None:
        if job.leaves is not None and now >= job.begins + job.leaves and not job.aborted:
            if not job.loading:
                self._leave(job, "left")
                return
            job.aborted = True
            self.engine.scheduler.on_request_ended(job.leg)
        if job.loading:
            return
        external, later = self.engine.scheduler.match_tokens(job.leg, job.first * BLOCK)
        need = -(-job.tokens // BLOCK)
        if external is None or len(self.free) < need:
            return
        job.ids = self.take(need)
        self.engine.scheduler.on_allocated(job.leg, (job.ids,), external)
        job.loading = later
        if not later:
            self._leave(job, "computed")

    def _loaded(self, job: Job, *, failed: bool) -> None:
        came = job.ids[job.first:-(-job.handed // BLOCK)]
        if not failed and not job.aborted and not self.engine.holds(came, job.prompt, job.first):
            self.report.blame("wrong", f"{self.name}: {job.leg.kv_transfer_params} of prompt {job.prompt}")
        if job.aborted:
            self.give(job)
            job.end("left")
        else:
            self._leave(job, "failed" if failed else "loaded")


class Life:
    """Four engines and the scenarios that run on them."""

    def __init__(self, folder: Path, seed: int, report: Report, *, leak_s: float = LEAK_S, late: bool = False,
                 **options: Any) -> None:
        self.leak_s = leak_s
        self.source = source = random.Random(seed)
        self.report = report
        unit = 3 * 2 * BLOCK * 4 * 4  # of KV, per block
        common: dict[str, Any] = {
            "transport": source.choice(("tcp", "tcp", "auto")), "tensor": source.choice((1, 1, 1, 2)),
            "keep_bytes": source.choice((12, 40, 1000)) * unit, "buffer_bytes": source.choice((8, 30, 300)) * unit,
            "host_pool_bytes": source.choice((0, 0, 10)) * unit, "peer_timeout_s": 2.0, "load_timeout_s": 6.0,
            "claim_s": 2.0, "keep_ttl_s": 4.0, "put_wait_s": 0.02, "window_bytes": 2 * unit,
            "clock": Clock() if late else None,
            "encryption": "disabled" if cipher.lack() else random.Random(f"cipher {seed}").choice(("disabled", "enabled")),
            **options}
        modes = {"p": ("put_async", "put_async", "put"), "d": ("put_async", "put_async", "get")}
        self.prefills, self.decodes = ([
            Stage(f"{role}{n}", folder, report, source, **common, mode=source.choice(modes[role]),
                  recompute=source.random() < 0.7) for n in range(2)] for role in "pd")
        self.stages = [*self.prefills, *self.decodes]
        self.open: dict[Scenario, list[Job]] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []

    def begin(self, scenario: Scenario, now: float) -> None:
        """Give the legs of a scenario to engines, and put down when its fault comes."""
        fault, source, prompt = scenario.fault, self.source, scenario.number + 1
        start = now + source.random() * SPAN_S
        tokens = max(1, int(LONGEST * (1.0 if fault is Fault.BURST else scenario.size ** 2)))
        p, d = source.choice(self.prefills), source.choice(self.decodes)
        transfer = uuid.uuid4().hex
        jobs = self.open[scenario] = []

        def decode(first: int) -> None:
            jobs.append(Job(request(decode_leg(transfer, wait_s=LEG_S), tokens, prompt), prompt, start, first))
            d.jobs.append(jobs[-1])

        def prefill(stage: Stage, attempt: int = 1, of: int = prompt, delay_s: float = 0.0, **more: Any) -> Job:
            leg = request(prefill_leg(transfer, d.engine, attempt=attempt), tokens, of)
            if fault is Fault.OTHER_LIFE:
                leg.kv_transfer_params["peer"]["incarnation"] = "0" * 32
            jobs.append(Job(leg, of, start + delay_s, **more))
            stage.jobs.append(jobs[-1])
            return jobs[-1]

        held = source.randrange(-(-tokens // BLOCK)) if source.random() < 0.3 else 0
        if fault is not Fault.NO_DECODE:
            decode(held)
            if fault is Fault.LATE_DECODE:
                jobs[-1].begins += scenario.seconds
            if fault is Fault.DECODE_LEAVES:
                jobs[-1].leaves = scenario.seconds / 3
        if fault is Fault.SECOND_LEG:
            decode(held)
        if fault is Fault.NO_PREFILL:
            return
        one = prefill(p, of=prompt + 9000 if fault is Fault.OTHER_PROMPT else prompt, preempted=fault is Fault.PREEMPTED,
                      delay_s=scenario.seconds if fault is Fault.LATE_PREFILL else 0.0)
        other = next(stage for stage in self.prefills if stage is not p)
        if fault in {Fault.PREFILL_LEAVES, Fault.RETRIED}:
            one.leaves = scenario.at
        if fault is Fault.RETRIED:
            def again() -> None:
                prefill(other, attempt=2)
            one.after = again
        if fault is Fault.TWO_TRIES:
            prefill(other, attempt=2, delay_s=scenario.seconds / 4)
        self._break(scenario, p, d, start + scenario.at * 0.1)

    def _break(self, scenario: Scenario, p: Stage, d: Stage, when: float) -> None:
        wire = p.wire
        acts: dict[Fault, Callable[[], None]] = {
            Fault.STALL: lambda: setattr(p if scenario.at < 0.5 else d, "stalled", time.monotonic() + scenario.seconds),
            Fault.KILL_PREFILL: p.kill, Fault.KILL_DECODE: d.kill}
        if wire is not None:
            acts |= {Fault.CORRUPT: lambda: setattr(wire, "corrupt", 1), Fault.CUT: wire.cut,
                     Fault.CORRUPT_HEADER: lambda: setattr(wire, "ruin_header", 1),
                     Fault.HALF_FRAME: lambda: setattr(wire, "half", 1),
                     Fault.HOLD: wire.hold.set, Fault.SLOW: lambda: setattr(wire, "slow_s", 0.01)}
            end = when + scenario.seconds * (3 if scenario.fault is Fault.HOLD else 1)
            if scenario.fault is Fault.HOLD:
                self.later.append((end, wire.hold.clear))
            if scenario.fault is Fault.SLOW:
                self.later.append((end, lambda: setattr(wire, "slow_s", 0.0)))
        if scenario.fault in acts:
            self.later.append((when, acts[scenario.fault]))

    def run(self, scenarios: list[Scenario]) -> None:
        """All of them, and then nothing may be held any more."""
        now = began = time.monotonic()
        for scenario in scenarios:
            self.begin(scenario, now)
        while self.open or self.later:
            now = time.monotonic()
            due = [one for one in self.later if one[0] <= now]
            self.later = [one for one in self.later if one[0] > now]
            for _, act in due:
                act()
            for stage in self.stages:
                stage.step(now)
            for scenario, jobs in list(self.open.items()):
                if all(job.over for job in jobs):
                    self._ended(scenario, jobs)
            if now - began > HANG_S:
                for scenario, jobs in self.open.items():
                    self.report.blame("hangs", f"{scenario}: {[(job.leg.kv_transfer_params, job.over) for job in jobs]}")
                return
            time.sleep(0.001)
        self._leaks()

    def _ended(self, scenario: Scenario, jobs: list[Job]) -> None:
        del self.open[scenario]
        ends = [job.over for job in jobs if job.leg.kv_transfer_params["role"] == "decode"] or ["none asked"]
        self.report.add(scenario, ends[0])
        self.report.answers_200 += ends[0] in {"loaded", "computed", "failed"}

    def _leaks(self) -> None:
        end = time.monotonic() + self.leak_s
        while left := [words for stage in self.stages for words in _held(stage)]:
            if time.monotonic() > end:
                self.report.blame("leaked", "; ".join(left))
                return
            for stage in self.stages:
                stage.step(time.monotonic())
            time.sleep(0.001)

    def close(self) -> None:
        """End the engines."""
        for stage in self.stages:
            stage.close()


def _held(stage: Stage) -> list[str]:
    found = [] if idle(stage.engine) else [f"{stage.name} is not idle: {stage.engine.counts}"]
    if len(stage.free) != BLOCKS - 1:
        found.append(f"{stage.name} holds {BLOCKS - 1 - len(stage.free)} blocks")
    found += [f"{stage.name} has {worker._receiver.buffered_bytes} bytes in its buffer" for worker in stage.engine.workers
              if any(worker._receiver.buffered_bytes)]
    return found


def run_life(folder: Path, seed: int, first: int, count: int, weights: Mapping[Fault, int] = SCRIPTED,
             **options: Any) -> Report:
    """Scenarios beside each other on engines of their own; what came of them. ``options``: not drawn, but so;
    ``leak_s``: how long something may still be held at the end; ``late``: copies are complete later."""
    report = Report()
    life = Life(folder, seed, report, **options)
    try:
        life.run(draw(life.source, first, count, weights))
    except Exception:  # noqa: BLE001 (a hook that raises is the end of a real engine)
        report.blame("deaths", traceback.format_exc(limit=-6))
    finally:
        with contextlib.suppress(OSError):
            life.close()
    return report
