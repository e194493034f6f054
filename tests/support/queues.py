"""A broadcast queue whose writer and readers are all of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from queue_peers import CHUNK, KEY, Joined

from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import join
from xpyd_sidecar.contract.keys import ServiceKey

WAYS: Final = ("local", "remote", "both")
JOIN_S: Final = 120.0
"""Also for a process that is started on a machine that is busy with other things."""


class Queue:
    """A writer and readers."""

    def __init__(self, way: str = "local", key: ServiceKey | None = KEY, chunks: int = 4, readers: int = 2,
                 message_max: int = 1 << 30) -> None:
        self.dropped: list[tuple[str, str]] = []
        local = [f"l{index}" for index in range(readers)] if way in ("local", "both") else []
        far = [f"r{index}" for index in range(readers)] if way in ("remote", "both") else []
        self.writer = Writer("q", local=local, remote=far, chunks=chunks, chunk_bytes=CHUNK, key=key,
                             message_max=message_max, on_drop=lambda *event: self.dropped.append(event))
        self.readers: dict[str, Joined] = {}
        with ThreadPoolExecutor() as pool:
            joins = {name: pool.submit(join, self.writer.handle, name, note=name.encode(), timeout_s=JOIN_S, key=key)
                     for name in (*local, *far)}
            self.notes = self.writer.wait_ready(JOIN_S)
            self.readers = {name: each.result() for name, each in joins.items()}

    def each(self) -> list[Joined]:
        return list(self.readers.values())

    def close(self) -> None:
        self.writer.close()
        for reader in self.each():
            reader.close()


Make = Callable[..., Queue]


def making() -> Iterator[Make]:
    """For a fixture: what makes queues, all of them closed at the end."""
    made: list[Queue] = []

    def build(*args: object, **options: object) -> Queue:
        made.append(Queue(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for each in made:
        each.close()
