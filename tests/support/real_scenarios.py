"""Scenarios on real engines: legs sent straight to them, faults on the wires between them, and signals.

    run = Run(hosts, references, report, random.Random(1))
    run.wave(draw(…))                      scenarios beside each other; then nothing may be held after 5 s
    run.signalled(scenario, victim)        kill -9 or SIGSTOP of one engine in the middle of its transfers

Every engine prefills and decodes, for each other and, where a scenario wants it, for itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import select
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Hung
from dataclasses import dataclass
from typing import Any

import corpus
from corpus import Case, Reference
from engines import MODEL_NAME, Engine, HttpError, get
from patience import MOST_S, Patience
from scenario import LEAK_S, Fault, Report, Scenario
from wire import Wire

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.kv.keys import Outcome

HANG_S = 90.0
LEG_S = 4.0
STOP_MOST_S = 20.0
BUSY_S = 3.0
"""A signal waits so long at most until somebody else holds something for the victim."""
SERIES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", metrics.SENDS_OPEN,
          metrics.RECEIVES_OPEN, metrics.KEPT_BYTES, metrics.BUFFER_USED, metrics.POOL_USED)
BLOCKS = "vllm:kv_cache_usage_perc"
OUTPUT = 16
LINKS = ("tcp", "shm", "nccl", "nixl")
"""What may move KV, as engines count it."""


def cases(count: int = 200) -> tuple[Case, ...]:
    """The prompts, by length: block edges, chunk edges, and a draw in which short ones are more."""
    source = random.Random("scenarios")
    edges = [edge + off for edge in (128, 256, 512, 1024) for off in (-1, 0, 1)]
    lengths = [1, 2, *edges, *(1 + int(1890 * source.random() ** 2) for _ in range(count - len(edges) - 2))]
    return tuple(Case(f"scenario {at}", corpus.tokens_of(f"scenario {at}", length), OUTPUT)
                 for at, length in enumerate(sorted(lengths)))


@dataclass(eq=False)
class Host:
    """An engine, the wire before its data port if there is one, and whether it is there now."""

    engine: Engine
    wire: Wire | None = None
    fails: bool = False
    """A load that failed is an error, not computed again."""
    up: bool = True

    def held(self) -> dict[str, float]:
        """What it still holds."""
        text = get(f"{self.engine.url}/metrics", MOST_S)
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([a-z_:]+)\{?[^\n]*? ([0-9.e+-]+)$", text, re.MULTILINE):
            if name in SERIES and float(value):
                found[name] = found.get(name, 0) + float(value)
        return found


def answered(host: Host, case: Case, leg: dict[str, Any], n: int) -> dict[str, Any]:
    """The choice that an engine answers. Raises HttpError, OSError, and TimeoutError with what it did meanwhile."""
    patience = Patience(host.engine, HANG_S)
    with contextlib.closing(http.client.HTTPConnection(host.engine.address, timeout=MOST_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(
            {**case.body(MODEL_NAME), "max_tokens": n, "kv_transfer_params": leg}), {"Content-Type": "application/json"})
        while not select.select([connection.sock], [], [], 1.0)[0]:
            if patience.over():
                raise TimeoutError(f"no answer of {host.engine.name} within {patience.told()}")
        response = connection.getresponse()
        text = response.read()
    if response.status != 200:
        raise HttpError(host.engine.url, response.status, text.decode(errors="replace"))
    choice: dict[str, Any] = json.loads(text)["choices"][0]
    return choice


class Run:
    """Scenarios on these hosts."""

    def __init__(self, hosts: Sequence[Host], references: dict[Case, Reference], report: Report, source: random.Random,
                 *, leak_s: float = LEAK_S, cut: bool = False) -> None:
        """``cut``: prefill computes prompts without their last token, so what it answers is not compared."""
        self._cut = cut
        self.leak_s = leak_s
        self.hosts = list(hosts)
        self.references = references
        self.cases = sorted(references, key=lambda case: len(case.prompt))
        self.report = report
        self.source = source
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(48)

    def close(self) -> None:
        """No more requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def up(self) -> list[Host]:
        """Who is there."""
        return [host for host in self.hosts if host.up]

    # --- requests ---

    def _leg(self, role: Role, transfer: str, d: Host, attempt: int = 1, *, wait_s: float = LEG_S, other: bool = False
             ) -> dict[str, Any]:
        peer = None
        if role is Role.PREFILL:
            known = d.engine.record()
            assert known is not None, f"{d.engine.name} is not known"
            life = Incarnation("0" * 32) if other else known.incarnation
            peer = legs.Peer(InstanceName(d.engine.name), life, known.control)
        return legs.encode(legs.Leg(legs.VERSION, role, TransferId(transfer), Attempt(attempt), wait_s, peer))

    def _ask(self, host: Host, case: Case, leg: dict[str, Any], n: int, words: str) -> str:
        """One leg; how it ended."""
        life, began = host.engine.group.pid, time.monotonic()
        try:
            answer = answered(host, case, leg, n)
        except HttpError as error:
            if host.fails and error.status == 500:
                return "failed"
            return self._died(host, life, f"{words}: {error}")
        except TimeoutError as error:
            self._blame("hangs", f"{words}: {error}; load {os.getloadavg()[0]:.0f}")
            return "hang"
        except (OSError, http.client.HTTPException) as error:
            return self._died(host, life, f"{words}: {error!r}")
        with self._lock:
            self.report.late += time.monotonic() - began > HANG_S
        reference = self.references[case]
        if self._cut and leg["role"] == Role.PREFILL and len(case.prompt) > 1:
            return "answered"
        known = Reference(reference.tokens[:n], reference.gaps[:n])
        verdict = corpus.judge(known, tuple(answer["token_ids"]))
        with self._lock:
            self.report.answers_200 += 1
            self.report.near_ties += verdict is corpus.Verdict.NEAR_TIE
        if verdict is corpus.Verdict.WRONG:
            self._blame("wrong", f"{words} at {host.engine.name}: {known.tokens} expected, {answer['token_ids']} got")
        return "answered"

    def _died(self, host: Host, life: int, words: str) -> str:
        if not host.up or host.engine.group.pid != life:
            return "killed"
        self._blame("deaths", f"{words}\n{host.engine.tail()[-1500:]}")
        return "died"

    def _blame(self, kind: str, words: str) -> None:
        with self._lock:
            self.report.blame(kind, words)

    def _leave(self, host: Host, case: Case, leg: dict[str, Any], after_s: float) -> str:
        """A leg whose client goes away."""
        address, port = host.engine.address.split(":")
        connection = http.client.HTTPConnection(address, int(port), timeout=30)
        with contextlib.suppress(OSError):
            connection.request("POST", "/v1/completions", json.dumps({
                "model": MODEL_NAME, "prompt": list(case.prompt), "max_tokens": OUTPUT, "stream": True,
                "kv_transfer_params": leg}), {"Content-Type": "application/json"})
            time.sleep(after_s)
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        return "left"

    # --- one scenario ---

    def case_of(self, scenario: Scenario) -> Case:
        """The prompt; a burst's are long."""
        share = 0.8 + scenario.size / 5 if scenario.fault is Fault.BURST else scenario.size
        return self.cases[min(len(self.cases) - 1, int(share * len(self.cases)))]

    def _legs(self, scenario: Scenario, p: Host, d: Host) -> list[Future[str]]:
        """Send what the scenario wants; the answers, decode's first."""
        fault, case, transfer = scenario.fault, self.case_of(scenario), uuid.uuid4().hex
        words = f"{scenario.number} ({fault}, {len(case.prompt)} tokens, {p.engine.name} to {d.engine.name}, {transfer})"

        def later(delay_s: float, call: Callable[..., str], *arguments: Any) -> Future[str]:
            def wait() -> str:
                time.sleep(delay_s)
                return call(*arguments)
            return self._pool.submit(wait)

        def decode(of: str, prompt: Case, delay_s: float = 0.0, wait_s: float = LEG_S) -> Future[str]:
            leg = self._leg(Role.DECODE, of, d, wait_s=wait_s)
            if fault is Fault.DECODE_LEAVES:
                return later(delay_s, self._leave, d, prompt, leg, scenario.seconds / 3)
            return later(delay_s, self._ask, d, prompt, leg, prompt.max_tokens, words)

        def prefill(of: str, prompt: Case, host: Host = p, attempt: int = 1, delay_s: float = 0.0) -> Future[str]:
            leg = self._leg(Role.PREFILL, of, d, attempt, other=fault is Fault.OTHER_LIFE)
            if fault in {Fault.PREFILL_LEAVES, Fault.RETRIED} and attempt == 1:
                return later(delay_s, self._leave, host, prompt, leg, scenario.at * 0.3)
            return later(delay_s, self._ask, host, prompt, leg, 1, words)

        late = scenario.seconds
        if fault is Fault.NO_DECODE:
            return [prefill(transfer, case)]
        if fault is Fault.NO_PREFILL:
            return [decode(transfer, case, wait_s=late)]
        if fault is Fault.BURST:
            near = [self.case_of(scenario._replace(size=(scenario.size + n / 5) % 1)) for n in range(4)]
            names = [uuid.uuid4().hex for _ in near]
            return [*map(decode, names, near), *map(prefill, names, near)]
        answers = [decode(transfer, case, delay_s=late if fault is Fault.LATE_DECODE else 0.0)]
        if fault is Fault.SECOND_LEG:
            answers.append(decode(transfer, case))
        of = self.cases[(self.cases.index(case) + 7) % len(self.cases)] if fault is Fault.OTHER_PROMPT else case
        answers.append(prefill(transfer, of, delay_s=late if fault is Fault.LATE_PREFILL else 0.0))
        if fault in {Fault.RETRIED, Fault.TWO_TRIES}:
            other = self.source.choice([host for host in self.up if host is not p])
            wait = scenario.at * 0.3 if fault is Fault.RETRIED else late / 4
            answers.append(prefill(transfer, case, other, attempt=2, delay_s=wait))
        return answers

    def _break(self, scenario: Scenario, wire: Wire) -> Callable[[], None]:
        """Have the wire do it, a moment later; what to call when the scenario is over."""
        begin: dict[Fault, Callable[[], None]] = {
            Fault.CORRUPT: lambda: setattr(wire, "corrupt", 1),
            Fault.CORRUPT_HEADER: lambda: setattr(wire, "ruin_header", 1),
            Fault.HALF_FRAME: lambda: setattr(wire, "half", 1), Fault.CUT: wire.cut, Fault.HOLD: wire.hold.set,
            Fault.SLOW: lambda: setattr(wire, "slow_s", 0.02)}
        timers: list[threading.Timer] = []
        if scenario.fault in begin:
            timers.append(threading.Timer(scenario.at * 0.15, begin[scenario.fault]))
        if scenario.fault is Fault.HOLD:
            timers.append(threading.Timer(scenario.at * 0.15 + 3 * scenario.seconds, wire.hold.clear))
        for timer in timers:
            timer.start()

        def end() -> None:
            for timer in timers:
                timer.join()
            wire.slow_s, wire.corrupt, wire.ruin_header, wire.half = 0.0, 0, 0, 0

        return end

    def wave(self, scenarios: Sequence[Scenario]) -> None:
        """Scenarios at once; and nothing is held when they are over."""
        waiting = []
        for scenario in scenarios:
            p, d = self.source.sample(self.up, 2)
            ends = self._break(scenario, p.wire) if p.wire is not None else (lambda: None)
            waiting.append((scenario, self._legs(scenario, p, d), ends))
        for scenario, answers, ends in waiting:
            self._finish(scenario, answers)
            ends()
        self.wait_empty()

    def _finish(self, scenario: Scenario, answers: Sequence[Future[str]]) -> None:
        got = []
        for answer in answers:
            try:
                got.append(answer.result(MOST_S + 20))
            except Hung:
                self._blame("hangs", f"{scenario}")
                got.append("hang")
        with self._lock:
            self.report.add(scenario, got[0])

    def wait_empty(self) -> None:
        """Whoever still holds something after 5 s has leaked it; an engine that does not answer has died."""
        for host, patience in [(host, Patience(host.engine, self.leak_s)) for host in self.up]:
            try:
                while left := host.held():
                    if patience.over():
                        self._blame("leaked", f"{host.engine.name}: {left} after {patience.told()}")
                        self._wait_free([host], 60.0)
                        break
                    time.sleep(0.05)
            except (OSError, HttpError) as error:
                self._blame("deaths", f"{host.engine.name}: {error!r}\n{host.engine.tail()[-1500:]}")

    # --- signals ---

    def signalled(self, scenario: Scenario, victim: Host) -> None:
        """A signal in the middle of transfers from or to ``victim``: how long the others hold something for it."""
        as_prefill = scenario.fault in {Fault.STOP_PREFILL, Fault.KILL_PREFILL}
        others = [host for host in self.up if host is not victim]
        answers: list[Future[str]] = []
        held = [host.wire for host in ([victim] if as_prefill else others) if host.wire is not None]
        for wire in held if scenario.seconds > 0.4 else ():  # so that it comes after READY and before the last block
            wire.hold.set()
        for n in range(3):
            other = others[n % len(others)]
            size = (scenario.size + n / 3) % 1
            answers += self._legs(scenario._replace(size=size), *((victim, other) if as_prefill else (other, victim)))
        end = time.monotonic() + BUSY_S
        while not any(host.held() for host in others) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(scenario.at * 0.1)
        kill = scenario.fault in {Fault.KILL_PREFILL, Fault.KILL_DECODE}
        group = victim.engine.group
        if kill:
            self.count(victim)
            victim.up = False
            group.signal_all(signal.SIGKILL)
        else:
            group.signal_all(signal.SIGSTOP)
        for wire in held:
            wire.hold.clear()
        try:
            blocks, everything = self._wait_free(others, STOP_MOST_S)
        finally:
            if kill:
                victim.engine.kill()
            else:
                group.signal_all(signal.SIGCONT)
        self._finish(scenario, answers)
        with self._lock:
            self.report.signals[str(scenario.fault)] = [*self.report.signals.get(str(scenario.fault), []),
                                                        [round(blocks, 2), round(everything, 2)]]
        self.wait_empty()

    def count(self, host: Host) -> None:
        """Add what an engine has counted in its life."""
        with self._lock:
            self.report.preemptions += int(host.engine.metric("vllm:num_preemptions_total"))
            for outcome in Outcome:
                seen = int(host.engine.metric(metrics.TRANSFERS + "_total", side="receive", outcome=outcome))
                self.report.transfers.update({str(outcome): seen} if seen else {})
            for link in LINKS:
                moved = int(host.engine.metric(metrics.LINK_BYTES + "_total", link=link))
                self.report.links.update({link: moved} if moved else {})

    def _wait_free(self, hosts: Sequence[Host], most_s: float) -> tuple[float, float]:
        """Seconds until these hold no block, and nothing at all; ``most_s`` where it takes longer."""
        began = time.monotonic()
        blocks = 0.0
        while (took := time.monotonic() - began) < most_s:
            left: dict[str, float] = {}
            for host in hosts:
                left |= host.held()
            if left.get(BLOCKS):
                blocks = time.monotonic() - began
            if not left:
                return blocks, took
            time.sleep(0.02)
        return most_s if left.get(BLOCKS) else blocks, most_s
