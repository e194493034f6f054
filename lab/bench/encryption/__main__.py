"""What encrypting KV costs: bytes per second and processor time of a stripe with a thread at each end, beside one in clear.

    python -m lab bench-encryption                   a look
    python -m lab bench-encryption --write           into results/encryption.json

Both ends are in one process, over TCP on loopback, and nothing else goes on there: a copy of 64 MiB is fetched in pieces of
2 MiB into rows with sums. In a round each of the two has its turns, in an order that is drawn; a figure is the median over
rounds, and ``share`` that of the ratios within rounds. Processor time is the threads' own, from the scheduler.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import select
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.transport._stripes import Pool
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.tcp import cipher
from xpyd_sidecar.transport.tcp.places import place_of
from xpyd_sidecar.transport.tcp.sockets import tune

RESULTS = Path(__file__).resolve().parents[3] / "bench/results/encryption.json"
TASKS: Final = Path("/proc/self/task")
COPY: Final = 64 << 20
PIECE: Final = 2 << 20
PART: Final = 256 << 10
"""That has one sum: a run of one head."""
KEY: Final = bytes(28)
LEAST_S: Final = 60.0
"""In which a fetch must have come."""
WAYS: Final = {"disabled": b"", "enabled": bytes(range(64))}


class Figures(NamedTuple):
    """Of one fetch: seconds, and seconds of the processor at each end."""

    wall: float
    prefill: float
    decode: float


def stripe_threads() -> set[str]:
    """Numbers of this process's threads of stripes."""
    return {task.name for task in TASKS.iterdir() if (task / "comm").read_text().startswith("xpyd-stripe")}


def on_cpu(thread: str) -> float:
    """Seconds that a thread has had of a processor."""
    return int((TASKS / thread / "schedstat").read_text().split()[0]) / 1e9


class Stripe:
    """One, between two pools of a thread each."""

    def __init__(self, store: mmap.mmap, keys: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        self._memory = mmap.mmap(-1, COPY)
        self._decode, self._prefill = Pool(1, 600), Pool(1, 600)
        self._session = self._decode.open()
        before = stripe_threads()
        self._attach(self._decode, near, self._session, keys, serves=False)
        (self._decodes,) = stripe_threads() - before
        before = stripe_threads()
        self._attach(self._prefill, far, self._prefill.open(), keys, serves=True)
        (self._serves,) = stripe_threads() - before
        self._prefill.add(KEY, store, 0)
        self._orders = 0

    @staticmethod
    def _attach(pool: Pool, sock: socket.socket, session: int, keys: bytes, *, serves: bool) -> None:
        tune(sock)
        pool.attach(session, sock.detach(), serves, keys)
        deadline = time.monotonic() + LEAST_S
        while pool.stripes != 1 and time.monotonic() < deadline:
            time.sleep(0.001)

    def fetch(self) -> Figures:
        """All of the copy, once."""
        memory, parts, rows = memoryview(self._memory), [], []
        for at in range(0, COPY, PIECE):
            parts.append(place_of(((at, PIECE),)))
            rows.append(Scatter(memory[at:at + PIECE], PIECE, 1, None, 0, 0, PART))
        self._orders += 1
        began, decode, prefill = time.monotonic(), on_cpu(self._decodes), on_cpu(self._serves)
        self._decode.order(self._session, self._orders, KEY, b"".join(parts), tuple(rows), None)
        select.select([self._decode], [], [], LEAST_S)
        answers, _, _ = self._decode.collect()
        wall = time.monotonic() - began
        if list(answers) != [(self._orders, True)]:
            raise RuntimeError(f"a fetch has not come: {answers}")
        return Figures(wall, on_cpu(self._serves) - prefill, on_cpu(self._decodes) - decode)

    def right(self, store: mmap.mmap) -> bool:
        """Whether what has come last is what there was."""
        return self._memory[:] == store[:]

    def close(self) -> None:
        """End both."""
        self._decode.close()
        self._prefill.close()


@contextmanager
def stripes(store: mmap.mmap) -> Iterator[dict[str, Stripe]]:
    """One of each."""
    made = {way: Stripe(store, keys) for way, keys in WAYS.items()}
    try:
        yield made
    finally:
        for one in made.values():
            one.close()


def measured(rounds: int, fetches: int) -> dict[str, object]:
    """All figures."""
    dice = random.Random(73)
    store = mmap.mmap(-1, COPY)
    store[:] = dice.randbytes(COPY)
    found: dict[str, list[Figures]] = {way: [] for way in WAYS}
    with stripes(store) as made:
        for one in made.values():
            one.fetch()
            if not one.right(store):
                raise RuntimeError("other bytes have come than there were")
        for _ in range(rounds):
            for way in dice.sample(list(WAYS), len(WAYS)):
                turns = [made[way].fetch() for _ in range(fetches)]
                found[way].append(Figures(*(statistics.median(each) for each in zip(*turns, strict=True))))
    out: dict[str, object] = {}
    for way, figures in found.items():
        out[way] = {
            "gb_per_s": round(COPY / statistics.median(one.wall for one in figures) / 1e9, 2),
            "prefill_cpu_s_per_gb": round(statistics.median(one.prefill for one in figures) / COPY * 1e9, 3),
            "decode_cpu_s_per_gb": round(statistics.median(one.decode for one in figures) / COPY * 1e9, 3)}
    shares = [clear.wall / sealed.wall for clear, sealed in zip(found["disabled"], found["enabled"], strict=True)]
    return out | {"share": round(statistics.median(shares), 2), "worst_share": round(min(shares), 2)}


def cipher_rate() -> float | None:
    """What OpenSSL's own program says of the cipher alone, in a core's cache; None: it is not here."""
    try:
        said = subprocess.run(["openssl", "speed", "-evp", "aes-256-gcm", "-bytes", "65536", "-seconds", "1", "-mr"],
                              capture_output=True, text=True, check=True, timeout=LEAST_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rates = [line.rpartition(":")[2] for line in said.splitlines() if line.startswith("+F:")]
    return round(float(rates[-1]) / 1e9, 2) if rates else None


def processor() -> str:
    """What this machine calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fetches", type=int, default=5, help="of each in a round; their median counts")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    args = parser.parse_args()
    if reason := cipher.lack():
        parser.error(reason)
    figures = measured(args.rounds, args.fetches)
    print(json.dumps(figures, indent=2))
    if args.write:
        about = {"at": datetime.now(UTC).date().isoformat(), "processor": processor(), "kernel": platform.release(),
                 "load": round(os.getloadavg()[0], 1), "cipher_gb_per_s": cipher_rate(),
                 "rounds": args.rounds, "fetches": args.fetches, "copy_bytes": COPY, "piece_bytes": PIECE}
        RESULTS.write_text(json.dumps(about | figures, indent=2) + "\n")


main()
