"""A prefill rank in a process of its own, which a test may kill or stop.

    python link_peers.py TRANSPORT FOLDER BLOCK COUNT      offers COUNT blocks of every region, and says its address
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kv_ranks import REGIONS, PrefillRank, key

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.engine.links.near import Ways


class PrefillProcess:
    """The process; killed at the end."""

    def __init__(self, transport: str, folder: Path | None, *, block: int, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, transport, str(folder or ""), str(block), str(count)], stdout=subprocess.PIPE,
            text=True)
        assert self.process.stdout is not None
        self.address = HostPort(self.process.stdout.readline().strip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    transport, folder, block, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ways = Ways(transport, Path(folder) if folder else None)
    with PrefillRank(keep_bytes=1 << 30, keep_s=60, block=block, ways=ways) as p:
        for region in range(REGIONS):
            p.copy(key(), region, 0, [bytes([region]) * block] * count)
        print(p.address, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main()
