"""What a request costs our router beside the kernel, by its steps: thread time within one process.

    python lab/bench/router/parts.py [--reads 1|2|3|0] [--error] [--rounds 40]

PYTHONPATH chooses the tree that is measured.

Clients and engines are transports that keep what they are given, so nothing of the kernel or the event loop counts. 64
requests take each step in turn, so that each finds the caches as the others left them; of many rounds the least counts.
``--reads``: in how many reads decode's answer comes (3: its first event, what is between, the last); 0: one for each chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import msgspec
import uvloop

import xpyd_sidecar
from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig
from xpyd_sidecar.contract.membership import Heartbeat
from xpyd_sidecar.process import logs
from xpyd_sidecar.router.app import GC_THRESHOLD
from xpyd_sidecar.router.endpoints.application import Paths
from xpyd_sidecar.router.endpoints.probes import Probes
from xpyd_sidecar.router.http import connection
from xpyd_sidecar.router.http.server import RequestBounds, Server
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.upstream import call as engine_connection

KEY = "k" * 32
MODEL = "tiny"
STREAMS = 64
CHUNKS = 8
WARM = 8
PROMPT = "What a router costs is seen best where engines cost nothing at all. " * 16
IDS = b"[" + b",".join(b"%d" % number for number in range(1000, 1256)) + b"]"
DATE = b"date: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"


class Paper:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.out: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.out.append(data)

    def get_extra_info(self, name: str) -> None:
        """Nothing is known: so nothing is written to a socket."""

    def set_write_buffer_limits(self, high: int) -> None:
        """Nothing is bounded."""

    def is_closing(self) -> bool:
        """Never."""
        return False


class Keys:
    """The client key."""

    keys = (KEY.encode(),)


def request() -> bytes:
    """The one that ``lab/bench/router`` asks."""
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": CHUNKS,
                                "temperature": 0, "stream": True})
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n")
    return head.encode() + body


def prefilled() -> bytes:
    """Prefill's answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": " t"}, "logprobs": None, "finish_reason": "length"}
    body = msgspec.json.encode({"id": "chatcmpl-p", "object": "chat.completion", "created": 1763750000, "model": MODEL,
                                "choices": [choice], "usage": {"prompt_tokens": 256, "completion_tokens": 1}})
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b" % (DATE, len(body), body)


def decoded(name: bytes, ids: bool, reads: int) -> list[bytes]:
    """Decode's answer as engines write it, in so many reads."""
    head = b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" % DATE
    before = b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1763750000,"model":"tiny",' % name
    shape = before + b'"choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b'
    parts = [head + chunk_of(shape % (b'"role":"assistant","content":""', b"null")
                             + b'}],"prompt_token_ids":%b}\n\n' % (IDS if ids else b"null"))]
    for number in range(1, CHUNKS):
        reason = b'"length","stop_reason":null' if number == CHUNKS - 1 else b"null"
        token = b"[%d]" % number if ids else b"null"
        parts.append(chunk_of(shape % (b'"content":" t%d"' % number, reason) + b',"token_ids":%b}]}\n\n' % token))
    parts[-1] += chunk_of(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    cuts = {0: range(CHUNKS + 1), 1: (0, CHUNKS), 2: (0, 1, CHUNKS), 3: (0, 1, CHUNKS - 1, CHUNKS)}[reads]
    return [b"".join(parts[start:end]) for start, end in pairwise(cuts)]


class Router:
    """One router without sockets."""

    def __init__(self, *, error: bool) -> None:
        router = RouterConfig(host="127.0.0.1", port=0, members_port=0, admin_port=0, model=MODEL,
                              failover="error" if error else "continue")
        config = SidecarConfig(service=ServiceName("bench"), instance=InstanceName("r"), key_file="", run_dir="",
                               router=router)
        self.context = RequestContext(config)
        paths = Paths(self.context, Keys(), Probes(self.context))  # type: ignore[arg-type]
        server = Server(paths, RequestBounds(64 << 10, 64 << 20, 30.0), connect=connection.ClientConnection)
        self.legs: dict[engine_connection.EngineConnection, Paper] = {}
        self.clients: list[tuple[connection.ClientConnection, Paper]] = []
        for port, role in ((1, Role.PREFILL), (2, Role.DECODE), (3, Role.DECODE)):
            self._join(HostPort(f"127.0.0.1:{port}"), role)
        for _ in range(STREAMS):
            made, paper = connection.ClientConnection(server), Paper()
            made.connection_made(paper)  # type: ignore[arg-type]
            self.clients.append((made, paper))

    def _join(self, address: HostPort, role: Role) -> None:
        self.context.watch.on_message(Heartbeat(
            v=1, service=ServiceName("bench"), instance=InstanceName(f"{role}-{address[-1]}"), seq=1, role=role, epoch=1,
            state=State.READY, agent=AgentId("a"),
            incarnation=Incarnation(f"i{address[-1]}"), http=(address,), control=(address,), model=MODEL,
            max_model_len=32768, fingerprint=Fingerprint("f" * 32), interval_s=3.0))
        for _ in range(STREAMS + 4):
            made, paper = engine_connection.EngineConnection(self.context.pool, address), Paper()
            made.connection_made(paper)  # type: ignore[arg-type]
            self.legs[made] = paper
            self.context.pool.release(made, address)

    async def round(self, reads: int) -> dict[str, float]:
        """All clients once; µs a request, by step.

        Raises:
            RuntimeError: an answer is not whole.
        """
        spent: dict[str, float] = {}
        spent["request"] = timed(lambda: [client.data_received(REQUEST) for client, _ in self.clients])
        asked = [(made, b"".join(paper.out)) for made, paper in self.legs.items() if paper.out]
        prefills = [made for made, data in asked if b'"return_token_ids":true' not in data and b'"max_tokens":1,' in data]
        answers = [(made, decoded(id_of(data), b'"return_token_ids":true' in data, reads))
                   for made, data in asked if made not in prefills]
        spent["prefill"] = timed(lambda: [made.data_received(PREFILLED) for made in prefills])
        for number in range(len(answers[0][1])):
            name = "decode" if len(answers[0][1]) == 1 else f"decode, read {number + 1}"
            spent[name] = timed(lambda at=number: [made.data_received(parts[at]) for made, parts in answers])  # type: ignore[misc]
        spent["record"] = timed(self._record)
        await asyncio.sleep(0)
        for _, paper in self.clients:
            answer = b"".join(paper.out)
            if not answer.startswith(b"HTTP/1.1 200") or not answer.endswith(b"0\r\n\r\n") or b'"token_ids":[' in answer:
                raise RuntimeError(f"not a whole answer: {answer[:200]!r}")
            paper.out.clear()
        for paper in self.legs.values():
            paper.out.clear()
        return spent | {"all": sum(spent.values())}

    def _record(self) -> None:
        self.context.observer.settle()
        logging.getLogger().handlers[0].flush()


def id_of(asked: bytes) -> bytes:
    """The request id that a leg was sent with."""
    return asked.partition(b"x-request-id: ")[2].partition(b"\r\n")[0]


def timed(work: Callable[[], object]) -> float:
    """Thread time of it, µs a request."""
    before = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - before) / 1000 / STREAMS


def least(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each step."""
    found: dict[str, float] = {}
    for each in rounds:
        for name, value in each.items():
            found[name] = min(value, found.get(name, value))
    return found


async def measured(args: argparse.Namespace) -> dict[str, float]:
    """The figures, by step."""
    router = Router(error=args.error)
    for _ in range(WARM):
        await router.round(args.reads)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    return least([await router.round(args.reads) for _ in range(args.rounds)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=1, choices=(0, 1, 2, 3))
    parser.add_argument("--error", action="store_true", help="failover: error")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    with Path("/dev/null").open("w") as nowhere:
        logs.configure("info", "json", nowhere, service="bench", instance="r")
        found = uvloop.run(measured(args))
        logs.configure("info", "json", service="bench", instance="r")
    shown = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
    print(f"{xpyd_sidecar.__path__[0]}: {shown} us a request")


REQUEST, PREFILLED = request(), prefilled()

if __name__ == "__main__":
    main()
