"""The parent of both engines: starts them, sends each prompt's two legs as the router does, and takes the times.

Both legs of a prompt go at once; the first token counts when decode has made it (``router.firstToken: decode``). What the
router itself takes is added; the HTTP of the engines' own servers is in the plain figures from which steps have their time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from lab.scripted_device import counting, engine, engine_loop, parameters
from xpyd_sidecar.contract import keys, legs, record
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, ...] = ("prefill", "decode")
DEADLINE_S = 60.0
START_S = 120.0


class Answer:
    """When the tokens of one request were made."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.times: list[float] = []
        self.over = threading.Event()

    def wait(self) -> list[float]:
        """Seconds from the request to each token."""
        if not self.over.wait(DEADLINE_S):
            raise TimeoutError(f"{len(self.times)} tokens after {DEADLINE_S:.0f} s")
        return [at - self.began for at in self.times]


class EngineProcess:
    """One child."""

    def __init__(self, side: Side, folder: Path, config: Any, room: int) -> None:
        self.folder = folder
        self._answers: dict[str, Answer] = {}
        self._told: queue.Queue[tuple[str, float, Any]] = queue.Queue()
        self._encoder = MsgpackEncoder()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engine.main, args=(side, folder, config, theirs, room), name=side,
                                        daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> float:
        """Wait until it serves; by how much its waits are late."""
        if not self._pipe.poll(START_S):
            raise TimeoutError("an engine does not start")
        _, late_s, _ = self._pipe.recv()
        threading.Thread(target=self._read, daemon=True).start()
        return float(late_s)

    def _read(self) -> None:
        while True:
            try:
                what, when, more = self._pipe.recv()
            except (EOFError, OSError):
                return
            if what != "token":
                self._told.put((what, when, more))
                continue
            name, count, over = more
            answer = self._answers[name]
            answer.times += [when] * count
            if over:
                del self._answers[name]
                answer.over.set()

    def ask(self, tokens: Sequence[int], most: int, leg: dict[str, Any] | None = None) -> Answer:
        """Send a request of exactly ``most`` tokens."""
        name = f"cmpl-{uuid.uuid4().hex}"
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0,
                                extra_args=leg and {"kv_transfer_params": leg})
        made = EngineCoreRequest(name, list(tokens), None, params, None, time.time(), None, None, None)
        [message] = self._encoder.encode(made)
        answer = self._answers[name] = Answer()
        self._pipe.send_bytes(message)
        return answer

    def counted(self) -> dict[str, float]:
        """Its counters."""
        self._pipe.send_bytes(engine.COUNT)
        found: dict[str, float] = self._told.get(timeout=DEADLINE_S)[2]
        return found

    def anew(self) -> None:
        """Its counters' spans begin anew."""
        self._pipe.send_bytes(engine.ANEW)

    def peer(self) -> legs.Peer:
        """As the router knows it."""
        known = record.read(self.folder, 0)
        assert known is not None
        return legs.Peer(InstanceName("decode"), known.incarnation, known.control)

    def stop(self) -> None:
        """End it."""
        with suppress(OSError):  # it has ended
            self._pipe.send_bytes(engine.STOP)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Pair:
    """One prefill and one decode engine."""

    def __init__(self, engines: dict[Side, EngineProcess], late_s: dict[Side, float]) -> None:
        self.late_s = late_s
        """By how much waits of each are late, and therefore shortened."""
        self._engines = engines
        self._random = random.Random(1)
        self._peer = engines["decode"].peer()

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has seen."""
        return self._random.choices(range(10, 500), k=tokens)

    def plain(self, tokens: int, most: int) -> Answer:
        """A prompt to the prefill engine alone, which hands nothing over."""
        return self._engines["prefill"].ask(self.prompt(tokens), most)

    def handed(self, tokens: int, most: int) -> Answer:
        """A prompt to both. What decode answers."""
        prompt, transfer = self.prompt(tokens), TransferId(uuid.uuid4().hex)
        there = legs.Leg(legs.VERSION, Role.PREFILL, transfer, Attempt(1), DEADLINE_S, self._peer)
        here = legs.Leg(legs.VERSION, Role.DECODE, transfer, Attempt(1), DEADLINE_S)
        self._engines["prefill"].ask(prompt, 1, legs.encode(there))
        answer = self._engines["decode"].ask(prompt, most, legs.encode(here))
        answer.began -= parameters.ROUTER_S
        return answer

    def anew(self) -> None:
        """Spans of both begin anew."""
        for one in self._engines.values():
            one.anew()

    def counted(self) -> dict[Side, dict[str, float]]:
        """The counters of both."""
        return {side: one.counted() for side, one in self._engines.items()}

    def settled(self, pause_s: float) -> dict[Side, dict[str, float]]:
        """The same when nothing is handed over any more: no two takes, so far apart, differ.

        Raises:
            TimeoutError: something goes on and on.
        """
        end, before = time.monotonic() + DEADLINE_S, self.counted()
        while time.monotonic() < end:
            time.sleep(pause_s)
            found = self.counted()
            if all(counting.handed_over(found[side]) == counting.handed_over(before[side]) for side in SIDES):
                return found
            before = found
        raise TimeoutError(f"messages and copies after {DEADLINE_S:.0f} s")


@contextmanager
def pair(folder: Path, options: KvOptions, room: int = 0) -> Iterator[Pair]:
    """Both engines, started and at last ended. ``room``: as of ``device.install``."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(engine_loop.HF_CONFIG))
    config = engine_loop.vllm_config(str(folder / "model"), options)
    key = keys.ServiceKey(os.urandom(32))
    engines: dict[Side, EngineProcess] = {}
    try:
        for side in SIDES:
            (folder / side).mkdir()
            keys.write(folder / side / "key", key)
            engines[side] = EngineProcess(side, folder / side, config, room)
        late_s = {side: one.ready() for side, one in engines.items()}
        yield Pair(engines, late_s)
    finally:
        for one in engines.values():
            one.stop()
