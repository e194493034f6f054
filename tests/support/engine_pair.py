"""A prefill and a decode engine with the wire between them; both legs of a request are sent straight to them.

    pair = Pair(folder, policy="recompute")
    for pair in started(pair):                     a fixture's body: both are ready, and killed afterwards
        pair.both(prompt)                          → decode's tokens
        pair.wire.hold.set()                       (``wire``)
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from engines import HTTP_TIMEOUT_S, MODEL_NAME, Engine, held
from processes import free_port
from wire import Wire

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import (
    Attempt,
    Fingerprint,
    HostPort,
    Incarnation,
    InstanceName,
    Role,
    TransferId,
    join_host_port,
)
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.router.fleet.member import EngineTarget, FleetMember
from xpyd_sidecar.router.upstream.pool import CancelNotices, EnginePool

PEER_TIMEOUT_S, LOAD_TIMEOUT_S = 20.0, 80.0
SOON_S = 120.0
"""For what nothing is waited for, on a machine that is full."""
UNHURRIED = KvOptions(claim_s=SOON_S, peer_timeout_s=PEER_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S)
"""For engines of which it is counted what was handed over."""
OUTPUT = 12


P = TypeVar("P", bound="Pair")


class Pair:
    """A prefill and a decode engine, and the wire from prefill's data port to decode."""

    def __init__(self, folder: Path, *, policy: Literal["recompute", "fail"], prefill_args: Sequence[str] = (),
                 decode_args: Sequence[str] = (), prefill_env: Mapping[str, str] | None = None,
                 env: Mapping[str, str] | None = None, beside: Sequence[Mapping[str, Any]] = (), model: Path | None = None,
                 blocks: int = 34, **options: Any) -> None:
        """``env``: of both engines, ``prefill_env``: of prefill besides. ``beside``: connectors after ours, of both.
        ``blocks``: of each cache."""
        port = self.data_port = free_port()
        self.wire = Wire(port, sealed=options.get("encryption") == "enabled")
        self.pool = ThreadPoolExecutor(48)
        self.answer_s = HTTP_TIMEOUT_S
        """How long an answer of a leg is waited for."""
        small = ("--num-gpu-blocks-override", str(blocks), "--max-num-batched-tokens", "512")
        common = {"transport": "tcp", "peer_timeout_s": PEER_TIMEOUT_S, "load_timeout_s": LOAD_TIMEOUT_S, **options}
        p_env = {**(env or {}), **(prefill_env or {})} or None
        self.p = Engine("p", folder, args=(*small, *prefill_args), env=p_env, beside=beside, model=model, options=KvOptions(
            data_port=port, advertise_data=join_host_port("127.0.0.1", self.wire.port), **common))
        self.d = Engine("d", folder, args=(*small, *decode_args), env=env, on_load_failure=policy, beside=beside,
                        model=model, options=KvOptions(**common))

    def peer(self, **changes: Any) -> legs.Peer:
        """Decode, as a prefill leg names it."""
        known = self.d.record()
        assert known is not None
        return legs.Peer(**{"instance": self.d.name, "incarnation": known.incarnation, "control": known.control, **changes})

    def d_leg(self, prompt: list[int], transfer: str, *, attempt: int = 1, wait_s: float = 30.0, n: int = OUTPUT
              ) -> Future[list[int]]:
        """Send decode's leg."""
        leg = legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(attempt), wait_s)
        return self.pool.submit(ask, self.d, prompt, n, legs.encode(leg), self.answer_s)

    def p_leg(self, prompt: list[int], transfer: str, *, attempt: int = 1, engine: Engine | None = None,
              **peer: Any) -> Future[list[int]]:
        """Send prefill's leg. ``peer``: fields of the peer that differ."""
        leg = legs.Leg(legs.VERSION, Role.PREFILL, TransferId(transfer), Attempt(attempt), 30.0, self.peer(**peer))
        return self.pool.submit(ask, engine or self.p, prompt, 1, legs.encode(leg), self.answer_s)

    def both(self, prompt: list[int], n: int = OUTPUT) -> list[int]:
        """Both legs at once."""
        transfer = new()
        decode = self.d_leg(prompt, transfer, n=n)
        self.p_leg(prompt, transfer).result(self.answer_s)
        return decode.result(self.answer_s)

    def plain(self, prompt: list[int], n: int = OUTPUT) -> list[int]:
        """What prefill answers without a transfer."""
        return ask(self.p, prompt, n, None)

    def computed(self) -> float:
        """Tokens that decode has computed; those of its last step are counted once it is empty (``wait_empty``)."""
        return self.d.metric("vllm:iteration_tokens_total_sum")

    def outcomes(self, engine: Engine, side: str, outcome: str) -> float:
        """Transfers of an engine that have ended so."""
        return engine.metric(metrics.TRANSFERS + "_total", side=side, outcome=outcome)

    def wait_kept(self) -> None:
        """Until prefill says that it keeps what decode may ask for."""
        wait_until(lambda: self.p.metric(metrics.SENDS_OPEN) == 1, SOON_S, "kept")

    def wait_parked(self) -> None:
        """Until decode waits for an announcement."""
        wait_until(lambda: self.d.metric(metrics.RECEIVES_OPEN) == 1, SOON_S, "parked")

    def wait_loading(self) -> None:
        """Until decode has given blocks to a load."""
        wait_until(lambda: self.d.metric("vllm:kv_cache_usage_perc") > 0, SOON_S, "loading")

    def wait_empty(self, *engines: Engine, deadline_s: float = SOON_S) -> None:
        """Until no request is there, no transfer open and no block in use, by one page of metrics."""
        for engine in engines or [one for one in (self.p, self.d) if one.alive()]:
            wait_until(lambda url=engine.url: not held(url), deadline_s, f"{engine.name} empty")


async def say_farewell(engine: Engine, leg: legs.Leg) -> None:
    """Take a decode leg back as the router does, and wait for the engine's answer."""
    loop = asyncio.get_running_loop()
    pool = EnginePool(loop)
    notices = CancelNotices(loop, pool)
    address = HostPort(engine.address)
    name = InstanceName(engine.name)
    notices.send(EngineTarget(name, Incarnation(""), Fingerprint(""), address, HostPort(""), FleetMember(name)), leg)
    end = loop.time() + SOON_S
    while len(notices):
        assert loop.time() < end, "the engine does not answer"
        await asyncio.sleep(0.01)
    pool.close()


def ask(engine: Engine, prompt: list[int], n: int, leg: dict[str, Any] | None,
        timeout_s: float = HTTP_TIMEOUT_S) -> list[int]:
    """The ids of ``n`` greedy tokens."""
    more = {"kv_transfer_params": leg} if leg else {}
    tokens: list[int] = engine.complete(prompt, n, timeout_s=timeout_s, **more)["token_ids"]
    return tokens


def leave(engine: Engine, prompt: list[int], leg: dict[str, Any], after: Callable[[], None]) -> None:
    """Send a leg as a client that goes away once ``after`` has returned."""
    host, port = engine.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "stream": True, "kv_transfer_params": leg}),
        {"Content-Type": "application/json"})
    after()
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait; AssertionError after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not {what} within {deadline_s} s"
        time.sleep(0.05)


def new() -> str:
    """A transfer id."""
    return uuid.uuid4().hex


def tokens(n: int, seed: object = None) -> list[int]:
    """A random prompt."""
    source = random.Random(str(seed) if seed is not None else new())
    return [source.randrange(3, 500) for _ in range(n)]


def started(pair: P) -> Iterator[P]:
    """A fixture's body: both ready, and killed afterwards."""
    with pair.wire, pair.p, pair.d:
        try:
            pair.p.wait_ready()
            pair.d.wait_ready()
            yield pair
        finally:
            pair.pool.shutdown(wait=False, cancel_futures=True)
