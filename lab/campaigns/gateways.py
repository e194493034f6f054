"""Streams through gateways, while engines of decode are killed: nginx and HAProxy as gateways set them up, before routers.

    python -m lab campaign-gateways        bench/results/campaign_gateways.json

    streams    10,000 through each gateway, while every 10 s an engine of decode ends with all that it serves: each answer
               is compared with what was recorded of a real engine
    first      the time to the first chunk, through each gateway and directly, one client, in interleaved rounds
    weights    10,000 requests on a route of two services, 90 to 10: what each of them got

The gateways' files have what controllers write for an HTTPRoute as xpyd renders it: HTTP/1.1 and connections that stay open
towards the routers, both timeouts, the Service's endpoints, weights (nginx as NGINX Gateway Fabric: ``split_clients``;
HAProxy: weights of servers), no retry. Nothing holds parts of answers back, as docs/gateways.md asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "lab" / "bench" / "router")]

import contenders  # noqa: E402 (its folder is not on the path before)
from contenders import Contender  # noqa: E402
from heart import Heart  # noqa: E402
from judge import judge  # noqa: E402
from processes import Group, free_port  # noqa: E402
from recorded import Request, load  # noqa: E402
from recorded_requests import PATHS  # noqa: E402
from replay import Replay  # noqa: E402
from router_fleet import Answer, RouterFleet, fleet, read_answer, request_bytes  # noqa: E402
from scripted_engine import Play, ScriptedEngine  # noqa: E402

from xpyd_sidecar.contract.ids import Incarnation  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_gateways.json"
STREAMS = 10_000
AT_ONCE = 32
KILL_S = 10.0
STEP_S = 0.01
"""Between two chunks: a stream of some twenty is under way for a fifth of a second."""
AWAY_S = 1.0
"""For so long an engine that was killed is not there."""
ANSWER_S = 60.0
TIMEOUT_S = 620
"""``router.requestTimeout`` and ten seconds."""
ROUNDS, ALONE = 9, 150
READY_S = 20.0
WEIGHTS = (90, 10)
Ports = Sequence[int]


def nginx(folder: Path, *backends: Ports) -> Contender:
    """nginx before the routers of one service, or of two with ``WEIGHTS``."""
    port = free_port()
    upstreams = "".join(
        f"upstream service{number} {{\n{''.join(f'  server 127.0.0.1:{each};' for each in ports)}\n  keepalive 64;\n}}\n"
        for number, ports in enumerate(backends))
    split = "split_clients $request_id $service {\n" + "".join(
        f"  {share}% service{number};\n" for number, share in enumerate(WEIGHTS)) + "}\n" if len(backends) > 1 else ""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(f"""
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
worker_rlimit_nofile 16384;
events {{ worker_connections 4096; }}
http {{
access_log off;
{temporary}{upstreams}{split}server {{
  listen 127.0.0.1:{port} backlog=4096;
  client_max_body_size 64m;
  location / {{
    proxy_pass http://{"$service" if split else "service0"};
    proxy_http_version 1.1;
    proxy_set_header Host $host;
    proxy_set_header Connection "";
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_read_timeout {TIMEOUT_S}s;
    proxy_send_timeout {TIMEOUT_S}s;
    proxy_next_upstream off;
    proxy_buffering off;
  }}
}}
}}
""")
    return _begun("nginx", port, folder, ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")])


def haproxy(folder: Path, *backends: Ports) -> Contender:
    """HAProxy, likewise."""
    port = free_port()
    weights = WEIGHTS if len(backends) > 1 else (100,)
    servers = "".join(f"  server s{number}-{each} 127.0.0.1:{each} weight {weight}\n"
                      for number, (ports, weight) in enumerate(zip(backends, weights, strict=True)) for each in ports)
    (folder / "haproxy.cfg").write_text(f"""
global
  maxconn 8192
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client {TIMEOUT_S}s
  timeout server {TIMEOUT_S}s
  timeout http-keep-alive 60s
  retries 0
  option http-no-delay
frontend clients
  bind 127.0.0.1:{port}
  option forwardfor
  default_backend routers
backend routers
  balance roundrobin
  http-reuse safe
{servers}""")
    return _begun("haproxy", port, folder, ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])


GATEWAYS: dict[str, Callable[..., Contender]] = {"nginx": nginx, "haproxy": haproxy}


def _begun(name: str, port: int, folder: Path, command: list[str]) -> Contender:
    group = Group(command, log=folder / f"{name}.log")

    def listens() -> bool:
        with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(("127.0.0.1", port), 1)):
            return True
        return False

    group.wait_until(listens, READY_S, f"{name} listens")
    return Contender(name, port, group)


@contextlib.asynccontextmanager
async def before(name: str, *fleets: RouterFleet) -> AsyncIterator[Contender]:
    """A gateway before the routers of these services."""
    with tempfile.TemporaryDirectory(prefix="xpyd-gateway-") as folder:
        gateway = await asyncio.to_thread(GATEWAYS[name], Path(folder), *((f.router.port,) for f in fleets))
        try:
            yield gateway
        finally:
            await asyncio.to_thread(gateway.group.stop)


async def ask(port: int, data: bytes) -> Answer:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        writer.write(data)
        return await read_answer(reader, ANSWER_S)
    finally:
        writer.transport.abort()


class Killed:
    """Streams through one gateway, and what came of them."""

    def __init__(self, f: RouterFleet, port: int, count: int, seed: int) -> None:
        self._fleet, self._port, self._count = f, port, count
        self._source = random.Random(seed)
        self._requests = [one for one in load().requests if one.way != "error"]
        self._open = 0
        self.streams = self.failed = self.wrong = self.kills = self.caught = 0
        self.examples: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Until all have ended."""
        began = time.monotonic()
        killer = asyncio.create_task(self._kill())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._ask())
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
        if not killer.cancelled():
            raise RuntimeError("engines were killed no more") from killer.exception()
        return {"streams": self.streams, "failed": self.failed, "wrong": self.wrong, "kills": self.kills,
                "streams_under_way_at_kills": self.caught, "seconds": round(time.monotonic() - began, 1),
                "examples": self.examples[:5]}

    async def _ask(self) -> None:
        while self.streams < self._count:
            self.streams += 1
            request = self._source.choice(self._requests)
            # Means nothing without a beam search; but so no two requests are equal, of which one would be blamed for
            # what the other met.
            body = {"model": "tiny", **request.body, "length_penalty": 1 + self.streams / 1e6, "stream": True}
            try:
                answer = await ask(self._port, request_bytes(PATHS[request.api], body))
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                self.failed += 1
                self.examples.append(f"{request.name}: {error!r}")
            else:
                self._judge(request, answer)

    def _judge(self, request: Request, answer: Answer) -> None:
        verdict = judge(request, answer.events, complete=answer.complete) if answer.status == 200 else None
        if verdict is None or not verdict.finished:
            self.failed += 1
        elif verdict.fault:
            self.wrong += 1
        else:
            return
        words = verdict.fault if verdict is not None else f"{answer.status} {answer.body[-300:].decode(errors='replace')}"
        self.examples.append(f"{request.name}: {words}")

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(KILL_S)
            await self.kill_one()

    async def kill_one(self) -> None:
        """An engine of decode ends with all that it serves, and comes again."""
        engine: ScriptedEngine = self._source.choice(self._fleet.d)
        self.kills += 1
        self.caught += engine.open
        await engine.stop()
        await asyncio.sleep(AWAY_S)
        engine.port = 0  # its old one may be somebody's by now
        await engine.start()
        self._fleet.beat(engine, incarnation=Incarnation(f"again-{self.kills}"), interval_s=600.0)


@contextlib.asynccontextmanager
async def served(prefills: int, decodes: int) -> AsyncIterator[RouterFleet]:
    """A service whose engines answer as was recorded, a chunk every ``STEP_S``."""
    async with fleet(prefills, decodes, replay=Replay(load()), hold_s=10.0) as f:
        for engine in f.d:
            engine.choose = lambda _seen: Play(delay=STEP_S)
        for engine in (*f.p, *f.d):
            f.beat(engine, interval_s=600.0)
        yield f


async def streams(count: int, seed: int) -> dict[str, Any]:
    """All that are served while engines are killed, by gateway."""
    found: dict[str, Any] = {}
    for name in GATEWAYS:
        async with served(2, 4) as f, before(name, f) as gateway:
            found[name] = await Killed(f, gateway.port, count, seed).run()
            print(name, found[name], flush=True)
    return found


async def weights(count: int) -> dict[str, Any]:
    """What two services get of a route with weights, by gateway."""
    found: dict[str, Any] = {}
    data = request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 2})
    for name in GATEWAYS:
        async with fleet(1, 1) as first, fleet(1, 1) as second, before(name, first, second) as gateway:
            records = [first.records(), second.records()]
            asked, failed = 0, 0

            async def go_on(port: int) -> None:
                nonlocal asked, failed
                while asked < count:
                    asked += 1
                    failed += (await ask(port, data)).status != 200

            await asyncio.gather(*(go_on(gateway.port) for _ in range(AT_ONCE)))
            got = [len(each) for each in records]
            found[name] = {"requests": sum(got), "failed": failed, "share": round(got[0] / max(1, sum(got)), 4),
                           "off_percent": round(abs(100 * got[0] / max(1, sum(got)) - WEIGHTS[0]), 3)}
            print(name, found[name], flush=True)
    return found


def _first_us(built: Path, port: int) -> float:
    """The median of one client's times to the first chunk, µs."""
    body = json.dumps({"model": contenders.MODEL, "messages": [{"role": "user", "content": "Say something. " * 64}],
                       "max_tokens": 2, "temperature": 0, "stream": True}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {contenders.CLIENT_KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n").encode()
    command = [str(built / "load"), str(port), "1", str(ALONE), "2", "1000", "120"]
    done = subprocess.run(command, input=head + body, capture_output=True, check=True)
    answers = json.loads(done.stdout)
    if answers["failed"]:
        raise RuntimeError(f"{answers['failed']} of {ALONE} answers failed: {answers['reason']}")
    return float(answers["first_us"][1])


def _rounds(built: Path, places: dict[str, int]) -> Iterator[dict[str, float]]:
    source = random.Random(1)
    for port in places.values():  # every connection is made, and every path taken, once before it counts
        _first_us(built, port)
    for _ in range(ROUNDS):
        yield {name: _first_us(built, places[name]) for name in source.sample([*places], len(places))}


def first(built: Path) -> dict[str, Any]:
    """How much later the first chunk comes through a gateway, µs: medians of rounds, each compared with its own direct."""
    with tempfile.TemporaryDirectory(prefix="xpyd-gateway-") as where, contextlib.ExitStack() as stack:
        folder = Path(where)
        ports = [free_port() for _ in range(3)]
        engines = contenders.Engines(tuple(ports[:1]), tuple(ports[1:]))
        group = Group([str(built / "engine"), "5000", "prefill", str(ports[0]), "decode", *map(str, ports[1:])],
                      log=folder / "engine.log")
        stack.callback(group.kill)
        router, members, key = contenders.xpyd("xpyd", folder, {})
        stack.callback(router.group.kill)
        stack.enter_context(Heart(members, key, engines))
        places = {"direct": router.port}
        for name, make in GATEWAYS.items():
            (folder / f"of-{name}").mkdir()
            gateway = make(folder / f"of-{name}", (router.port,))
            stack.callback(gateway.group.kill)
            places[name] = gateway.port
        rounds = list(_rounds(built, places))
    direct = statistics.median(each["direct"] for each in rounds)
    later = {name: statistics.median(each[name] - each["direct"] for each in rounds) for name in GATEWAYS}
    return {"direct_us": round(direct), "rounds": ROUNDS,
            **{name: {"later_us": round(value)} for name, value in later.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", type=Path, required=True, help="folder with the programs engine and load")
    parser.add_argument("--count", type=int, default=STREAMS, help="streams through each gateway, and requests for weights")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # a line for each death
    told: dict[str, Any] = {"seed": options.seed, "load": os.getloadavg()[0], "first": first(options.built)}
    print(told, flush=True)
    told |= {"streams": uvloop.run(streams(options.count, options.seed)), "weights": uvloop.run(weights(options.count))}
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    if options.write:
        RESULTS.write_text(text)
    sys.stdout.write(text)
    bad = sum(each["failed"] + each["wrong"] for each in told["streams"].values())
    bad += sum(each["failed"] + (each["off_percent"] > 1) for each in told["weights"].values())
    return int(bool(bad) or any(told["first"][name]["later_us"] > 2000 for name in GATEWAYS))


if __name__ == "__main__":
    sys.exit(main())
