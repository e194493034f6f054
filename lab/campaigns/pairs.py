"""What a peer costs: memory and file descriptors of one engine that has met hundreds of others, into a results file.

    python -m lab campaign-pairs            four parts, a minute in all: data and control, as prefill and as decode

This process is the one that is measured; its peers live in a process of their own. Each has been greeted, and for data one
block of each of three arrays has been fetched over TCP. Blocks are small, so copies are not what is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

import zmq  # noqa: E402 (tests/support is not on the path before)
from manifest_ranks import DecodeRank, PrefillRank, wait_until  # noqa: E402

from xpyd_sidecar.contract import keys  # noqa: E402
from xpyd_sidecar.contract.fingerprint import FingerprintFields  # noqa: E402
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId  # noqa: E402
from xpyd_sidecar.contract.legs import Peer  # noqa: E402
from xpyd_sidecar.contract.membership import Parallel  # noqa: E402
from xpyd_sidecar.kv import messages  # noqa: E402
from xpyd_sidecar.kv.keys import Key, Outcome  # noqa: E402
from xpyd_sidecar.kv.mapping import Array, ArrayKind, geometry  # noqa: E402
from xpyd_sidecar.kv.messages import Announce, Control, Hello, ListeningRank, Ping, Pong, Prefix, Welcome  # noqa: E402
from xpyd_sidecar.kv.receiving import Confirm  # noqa: E402
from xpyd_sidecar.process import curve  # noqa: E402
from xpyd_sidecar.session.control import ControlThread  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_pairs.json"
SERVICE = keys.ServiceKey(bytes(range(32)))
LIFE = Incarnation("d" * 32)
FIELDS = FingerprintFields("m", "f", "f", 128, "H", "", "0")
SHAPE = geometry(1, [[Array(f"layer{n}", ArrayKind("float32", 4, (8, 8), 256, 4)) for n in range(32)]])
TIMEOUT_S = 120.0
"""Hundreds of peers in one process are slow to answer."""


class RankAt(NamedTuple):
    """A rank of prefill, wherever it is."""

    place: tuple[HostPort, Incarnation]


class Use(NamedTuple):
    """Of this process."""

    resident: int
    descriptors: int


def use() -> Use:
    """Now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Use(pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd")))


def name(at: int) -> Key:
    """Of a peer's only transfer."""
    return Key(TransferId(f"{at:032x}"), Attempt(1), 1)


@contextmanager
def peers(part: str, count: int, address: str) -> Iterator[list[str]]:
    """A process with ``count`` peers; what they say first (their addresses)."""
    command = [sys.executable, __file__, "--peers", part, "--count", str(count), "--address", address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
        process.communicate("end\n", timeout=60)
    finally:
        process.kill()
        process.wait()


# --- the measured side ---


def prefill_data(count: int) -> tuple[Use, Use]:
    """One publisher and ``count`` receivers."""
    p = PrefillRank(transport="tcp", store_bytes=count << 12, keep_s=TIMEOUT_S, send_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
    try:
        for at in range(count):
            p.compute(name(at), 0, 1)
        before, outcomes = use(), list[Outcome]()
        with peers("prefill_data", count, " ".join(p.place)):
            wait_until(lambda: outcomes.extend(one.outcome for one in p.publisher.take_reports()) or len(outcomes) == count,
                       TIMEOUT_S)
            assert set(outcomes) == {Outcome.OK}
            return before, use()
    finally:
        p.stop()


def decode_data(count: int) -> tuple[Use, Use]:
    """One receiver and ``count`` publishers."""
    d = DecodeRank(transport="tcp", blocks=count, timeout_s=TIMEOUT_S)
    try:
        with peers("decode_data", count, "") as places:
            before = use()
            for at, place in enumerate(places):
                d.want(name(at), rank_at(place), (at,), whole=1)
            for at in range(count):
                wait_until(partial(d.has, name(at), 0, 1), TIMEOUT_S)
                d.receiver.carry_out(Confirm(name(at), 0, 1))
            return before, use()
    finally:
        d.stop()


def rank_at(place: str) -> RankAt:
    """What a peer has said of itself: its address and its life."""
    address, life = place.split()
    return RankAt((HostPort(address), Incarnation(life)))


class Handler:
    """An engine's control half that only greets."""

    def __init__(self) -> None:
        self.met: set[str] = set()
        self.peers: set[Peer] = set()
        self.thread = ControlThread(self, SERVICE, host="127.0.0.1", port=0, peer_timeout_s=TIMEOUT_S)

    def from_prefill(self, peer: bytes, message: Control) -> None:
        """Answer HELLO."""
        if isinstance(message, Hello):
            self.met.add(peer.hex())
            self.thread.post(peer, Welcome(InstanceName("d"), LIFE))

    def unreadable(self, peer: bytes, prefix: Prefix) -> None:
        """Never here."""
        raise AssertionError(prefix)

    def from_decode(self, peer: Peer, message: Control) -> None:
        """DROP is the peer's answer to the announcement."""
        self.met.add(peer.control)

    def decode_lost(self, peer: Peer, outcome: Outcome, reason: str) -> None:
        """Never here."""
        raise AssertionError(reason)

    def tell_again(self, peer: Peer) -> None:
        """In the end, when the peers have ended: nothing is open."""

    def open_peers(self) -> set[Peer]:
        """All of them."""
        return set(self.peers)

    def greeting(self, peer: Peer) -> Hello:
        """As an engine of 32 layers says it."""
        return Hello(InstanceName("p"), Incarnation("e" * 32), peer.incarnation, FIELDS, Parallel(), SHAPE)

    def tick(self, now: float) -> None:
        """Nothing to do."""


def prefill_control(count: int) -> tuple[Use, Use]:
    """One that announces to ``count`` decode engines."""
    handler = Handler()
    handler.thread.start()
    with peers("prefill_control", count, "") as addresses:
        before = use()
        for at, address in enumerate(addresses):
            peer = Peer(InstanceName(f"d{at}"), LIFE, HostPort(address))
            handler.peers.add(peer)
            handler.thread.post(peer, Announce(*name(at), b"i" * 32, 5, 4, (ListeningRank(HostPort("127.0.0.1:1"), LIFE),)))
        wait_until(lambda: len(handler.met) == count, TIMEOUT_S)
        after = use()
    handler.thread.stop()
    return before, after


def decode_control(count: int) -> tuple[Use, Use]:
    """One that ``count`` prefill engines greet."""
    handler = Handler()
    handler.thread.start()
    before = use()
    with peers("decode_control", count, handler.thread.address):
        wait_until(lambda: len(handler.met) == count, TIMEOUT_S)
        after = use()
    handler.thread.stop()
    return before, after


PARTS: dict[str, Callable[[int], tuple[Use, Use]]] = {
    "prefill_data": prefill_data, "decode_data": decode_data, "prefill_control": prefill_control,
    "decode_control": decode_control}


# --- the peers' process ---


def be_peers(part: str, count: int, address: str) -> None:
    """Until stdin ends."""
    started = [threading.Thread(target=sys.stdin.readline)]
    if part == "prefill_data":
        say([])
        ranks = [DecodeRank(transport="tcp", blocks=1, timeout_s=TIMEOUT_S) for _ in range(count)]
        for at, rank in enumerate(ranks):
            rank.want(name(at), rank_at(address), (0,), whole=1)
        for at, rank in enumerate(ranks):
            wait_until(partial(rank.has, name(at), 0, 1), TIMEOUT_S)
            rank.receiver.carry_out(Confirm(name(at), 0, 1))
        started[0].run()
    elif part == "decode_data":
        made = [PrefillRank(transport="tcp", store_bytes=1 << 12, keep_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
                for _ in range(count)]
        for at, one in enumerate(made):
            one.compute(name(at), 0, 1)
        say([" ".join(one.place) for one in made])
        started[0].run()
    else:
        started[0].daemon = True
        started[0].start()
        (_answer if part == "prefill_control" else _greet)(count, HostPort(address), started[0])
    os._exit(0)  # hundreds of threads need not be joined


def say(addresses: Sequence[str]) -> None:
    """To the parent."""
    sys.stdout.write(json.dumps(list(addresses)) + "\n")
    sys.stdout.flush()


def _answer(count: int, address: HostPort, ends: threading.Thread) -> None:
    """Decode engines: one socket each, one thread for all."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 100)
    poller = zmq.Poller()
    addresses = []
    for _ in range(count):
        sock = context.socket(zmq.ROUTER)
        curve.serve(sock, SERVICE, "control")
        addresses.append(f"127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}")
        poller.register(sock, zmq.POLLIN)
    say(addresses)
    while ends.is_alive():
        for sock, _ in poller.poll(200):
            peer, _, body = sock.recv_multipart()
            message = messages.unpack(body)
            answer: Control = Welcome(InstanceName("d"), LIFE)
            if isinstance(message, Announce):
                answer = messages.Drop(*message.key, Outcome.UNUSED, "x")
            elif isinstance(message, Ping):
                answer = Pong(message.seq, LIFE)
            sock.send_multipart([peer, *messages.pack(answer)])


def _greet(count: int, address: HostPort, ends: threading.Thread) -> None:
    """Prefill engines."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 100)
    say([])
    socks = []
    for at in range(count):
        sock = context.socket(zmq.DEALER)
        curve.connect(sock, SERVICE, "control")
        sock.connect(f"tcp://{address}")
        hello = Hello(InstanceName(f"p{at}"), Incarnation(f"{at:032x}"), LIFE, FIELDS, Parallel(), SHAPE)
        sock.send_multipart(messages.pack(hello))
        socks.append(sock)
    ends.join()


def measure(part: str, count: int) -> dict[str, float]:
    """Of one part, per peer."""
    before, after = PARTS[part](count)
    return {"peers": count, "kib_per_peer": round((after.resident - before.resident) / 1024 / count, 1),
            "descriptors_per_peer": round((after.descriptors - before.descriptors) / count, 2),
            "mib_for_1000": round((after.resident - before.resident) / (1 << 20) / count * 1000, 1)}


def main() -> None:
    """The command: each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--peers", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peers:
        be_peers(options.peers, options.count, options.address)
    elif options.part:
        sys.stdout.write(json.dumps(measure(options.part, options.count)) + "\n")
    else:
        told = {}
        for part in PARTS:
            command = [sys.executable, __file__, "--part", part, "--count", str(options.count)]
            told[part] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600).stdout)
            sys.stderr.write(f"{part} {told[part]}\n")
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
