"""One contender with one number of readers: forks a writer, which forks its readers, and measures every size.

    latency     from just before send until the last reader holds the message; the next one follows when all do
    idle        the same with 20 ms between messages, as between the steps of an engine, and the processor that readers use
    throughput  messages as fast as they go, until the last reader holds the last one

Readers tell through a page of shared memory, one line each, and times are those of the one monotonic clock. While the
writer waits for them it sleeps, so that it does not take a processor from them.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import time
import traceback
from typing import Any

import msgspec
from contenders import CONTENDERS, Contender

SIZES = {100: "100B", 1_000: "1kB", 10_000: "10kB", 100_000: "100kB", 1 << 20: "1MiB", 8 << 20: "8MiB",
         64 << 20: "64MiB"}
COUNTS = {100: (400, 4000), 1_000: (400, 4000), 10_000: (300, 2000), 100_000: (200, 600), 1 << 20: (60, 120),
          8 << 20: (16, 20), 64 << 20: (4, 4)}
"""Messages for latency and for throughput."""
WARM = 3
IDLE_MESSAGES, IDLE_S = 60, 0.02
LIMIT_S = 100
NAP_S = 0.00002
COUNT, STAMP, CPU = 0, 1, 2


class Board:
    """What readers tell: a line of eight numbers each."""

    def __init__(self, readers: int) -> None:
        self._readers = range(readers)
        self._cells = memoryview(mmap.mmap(-1, 64 * readers)).cast("d")

    def tell(self, reader: int, field: int, value: float) -> None:
        """From a reader."""
        self._cells[8 * reader + field] = value

    def wait(self, count: int) -> None:
        """Until every reader has counted that far."""
        while any(self._cells[8 * reader] < count for reader in self._readers):
            time.sleep(NAP_S)

    def last(self) -> float:
        """When the last reader held the message."""
        return max(self._cells[8 * reader + STAMP] for reader in self._readers)

    def cpu(self) -> float:
        """Seconds of processor that all readers have used."""
        return sum(self._cells[8 * reader + CPU] for reader in self._readers)


def plan() -> int:
    """Messages of one run."""
    return IDLE_MESSAGES + 1 + sum(WARM + latency + throughput for latency, throughput in COUNTS.values())


def read(queue: Contender, index: int, board: Board) -> None:
    """A reader's process."""
    take = queue.reader(index)
    for number in range(1, plan() + 1):
        message = take()
        board.tell(index, STAMP, time.perf_counter())
        if message[:8] != number.to_bytes(8, "little") or message[-8:] != number.to_bytes(8, "little"):
            raise AssertionError(f"message {number} is torn or another one")
        used = resource.getrusage(resource.RUSAGE_SELF)
        board.tell(index, CPU, used.ru_utime + used.ru_stime)
        board.tell(index, COUNT, number)


def write(queue: Contender, board: Board) -> dict[str, Any]:
    """The writer's process: every size; the figures."""
    queue.wait_ready()
    figures: dict[str, Any] = {}
    sent = 0

    def send(size: int) -> float:
        nonlocal sent
        sent += 1
        number = sent.to_bytes(8, "little")
        payload = number + bytes(size - 16) + number
        began = time.perf_counter()
        queue.send(payload)
        return began

    send(100)
    board.wait(sent)
    for size, (latency, throughput) in COUNTS.items():
        taken = []
        for _ in range(WARM + latency):
            began = send(size)
            board.wait(sent)
            taken.append(board.last() - began)
        taken = sorted(taken[WARM:])
        began = time.perf_counter()
        for _ in range(throughput):
            send(size)
        board.wait(sent)
        figures[SIZES[size]] = {"p50_us": taken[len(taken) // 2] * 1e6, "p99_us": taken[int(len(taken) * 0.99)] * 1e6,
                                "msg_s": throughput / (board.last() - began)}
    taken, used, since = [], board.cpu(), time.perf_counter()
    for _ in range(IDLE_MESSAGES):
        time.sleep(IDLE_S)
        began = send(100)
        board.wait(sent)
        taken.append(board.last() - began)
    figures["idle"] = {"p50_us": sorted(taken)[len(taken) // 2] * 1e6,
                       "reader_cpu": (board.cpu() - used) / (time.perf_counter() - since)}
    return figures


def run(name: str, readers: int) -> dict[str, Any]:
    """Figures of one contender: of each size ``p50_us``, ``p99_us``, ``msg_s``; and ``idle``.

    Raises:
        RuntimeError: a process of it failed or took too long.
    """
    inward, outward = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(inward)
        _guarded(lambda: os.write(outward, msgspec.json.encode(_lead(name, readers))))
    os.close(outward)
    with os.fdopen(inward, "rb") as pipe:
        raw = pipe.read()
    os.waitpid(pid, 0)
    if not raw:
        raise RuntimeError(f"{name} with {readers} readers failed or took more than {LIMIT_S} s")
    figures: dict[str, Any] = msgspec.json.decode(raw)
    return figures


def _lead(name: str, readers: int) -> dict[str, Any]:
    queue = CONTENDERS[name](readers)
    board = Board(readers)
    children = []
    for index in range(readers):
        pid = os.fork()
        if pid == 0:
            _guarded(lambda index=index: read(queue, index, board))  # type: ignore[misc]
        children.append(pid)
    try:
        figures = write(queue, board)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        queue.close()
    return figures


def _guarded(call: Any) -> None:
    """Run it as a forked process: never returns, and ends in time."""
    signal.alarm(LIMIT_S)
    try:
        call()
    except BaseException:  # noqa: BLE001 (a forked process must not return into the parent's code)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
