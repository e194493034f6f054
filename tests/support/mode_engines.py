"""Three real engines, one of each mode; every pair of them makes a transfer in one mode.

    put_async: a → b        put: b → a        get: a → c        (prefill's mode decides put, decode's get)
"""

from __future__ import annotations

import random
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from engines import Engine

from xpyd_sidecar.contract import keys, legs, metrics
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions

MODES = ("put_async", "put", "get")


class Answer(NamedTuple):
    """Of one transfer: decode's tokens, and seconds from the start until either leg was answered."""

    tokens: list[int]
    prefill_s: float
    decode_s: float


class Trio:
    """The engines."""

    def __init__(self, folder: Path, *, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None,
                 c: dict[str, Any] | None = None, d_args: tuple[str, ...] = (), model: Path | None = None) -> None:
        """``a``, ``b``, ``c``: options of those engines that differ from the defaults; ``d_args``: arguments of b and c."""
        key = folder / "key"
        keys.write(key, keys.mint())
        self.a = Engine("a", folder, key_file=key, model=model,
                        options=KvOptions(mode="put_async", transport="tcp", **(a or {})))
        self.b = Engine("b", folder, key_file=key, model=model, args=d_args,
                        options=KvOptions(mode="put", transport="tcp", **(b or {})))
        self.c = Engine("c", folder, key_file=key, model=model, args=d_args,
                        options=KvOptions(mode="get", transport="tcp", **(c or {})))
        self.pool = ThreadPoolExecutor(16)

    def pair(self, mode: str) -> tuple[Engine, Engine]:
        """Who prefills and who decodes in a mode."""
        return {"put_async": (self.a, self.b), "put": (self.b, self.a), "get": (self.a, self.c)}[mode]

    def send(self, mode: str, prompt: list[int], n: int) -> Future[Answer]:
        """Both legs at once."""
        return self.pool.submit(self._send, *self.pair(mode), prompt, n)

    def _send(self, p: Engine, d: Engine, prompt: list[int], n: int) -> Answer:
        known = d.record()
        assert known is not None
        transfer = TransferId(uuid.uuid4().hex)
        peer = legs.Peer(InstanceName(d.name), known.incarnation, known.control)
        began = time.perf_counter()
        decode = self.pool.submit(self.timed, d, prompt, n, legs.Leg(legs.VERSION, Role.DECODE, transfer, Attempt(1), 60.0))
        _, prefill_s = self.timed(p, prompt, 1, legs.Leg(legs.VERSION, Role.PREFILL, transfer, Attempt(1), 60.0, peer))
        tokens, _ = decode.result(120)
        return Answer(tokens, prefill_s, time.perf_counter() - began)

    @staticmethod
    def timed(engine: Engine, prompt: list[int], n: int, leg: legs.Leg | None = None) -> tuple[list[int], float]:
        """One request, its tokens and seconds."""
        more = {"kv_transfer_params": legs.encode(leg)} if leg is not None else {}
        began = time.perf_counter()
        tokens: list[int] = engine.complete(prompt, n, **more)["token_ids"]
        return tokens, time.perf_counter() - began

    def total(self, engine: Engine, name: str) -> float:
        """A counter of ``contract.metrics``."""
        return engine.metric(name + "_total")

    def wait_empty(self, deadline_s: float = 60.0) -> None:
        """Wait until nothing moves and nothing is kept."""
        end = time.monotonic() + deadline_s
        series = (metrics.SENDS_OPEN, metrics.RECEIVES_OPEN, metrics.KEPT_BYTES, metrics.BUFFER_USED, metrics.POOL_USED)
        while held := {(one.name, name): value for one in (self.a, self.b, self.c) for name in series
                       if (value := one.metric(name))}:
            assert time.monotonic() < end, held
            time.sleep(0.2)

    def __enter__(self) -> Self:
        for engine in (self.a, self.b, self.c):
            engine.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=True, wait=False)
        for engine in (self.a, self.b, self.c):
            engine.kill()

    def wait_ready(self) -> None:
        """Wait until all answer."""
        for engine in (self.a, self.b, self.c):
            engine.wait_ready()


def prompt_of(length: int, draw: random.Random) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [draw.randrange(5, 250) for _ in range(length)]
