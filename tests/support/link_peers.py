"""A prefill or a decode rank in a process of its own, which a test may kill or stop.

    python link_peers.py prefill TRANSPORT FOLDER BLOCK COUNT          offers COUNT blocks of every region, says its address
    python link_peers.py decode LINK FOLDER BLOCK COUNT ADDRESS        asks for them, takes some, and says so
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kv_ranks import REGIONS, DecodeRank, PrefillRank, key

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.session.receiver_events import Arrived


class PrefillProcess:
    """The process; killed at the end."""

    def __init__(self, transport: str, folder: Path | None, *, block: int, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "prefill", transport, str(folder or ""), str(block), str(count)],
            stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = HostPort(self.process.stdout.readline().strip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


class DecodeProcess:
    """The process, in the middle of a transfer; killed at the end."""

    def __init__(self, link: str, folder: Path, address: HostPort, *, block: int, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "decode", link, str(folder), str(block), str(count), address],
            stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said == link

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def prefill(transport: str, folder: str, block: int, count: int) -> None:
    ways = LinkOptions(transport, Path(folder) if folder else None)
    with PrefillRank(keep_bytes=1 << 30, keep_s=60, block=block, ways=ways) as p:
        for region in range(REGIONS):
            p.copy(key(), region, 0, [bytes([region]) * block] * count)
        print(p.address, flush=True)
        time.sleep(60)


def decode(link: str, folder: str, block: int, count: int, address: HostPort) -> None:
    ways = LinkOptions(link, Path(folder))
    with DecodeRank(block=block, chunks=2, ways=ways, timeout_s=30) as d:
        d.load("r", key(), address, first=0, count=count)
        while not d.receiver.inbox:  # two chunks hold the rest up
            time.sleep(0.01)
        first = d.receiver.inbox[0]
        print(first.way if isinstance(first, Arrived) else first, flush=True)
        time.sleep(60)


def main() -> None:
    role, way, folder, block, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    if role == "prefill":
        prefill(way, folder, block, count)
    else:
        decode(way, folder, block, count, HostPort(sys.argv[6]))


if __name__ == "__main__":
    main()
