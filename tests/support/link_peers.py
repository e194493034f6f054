"""A rank of prefill or of decode in a process of its own, which a test may kill in the middle of transfers.

    python link_peers.py prefill LINK FOLDER              has two blocks of the six of a prompt, and says where it is
    python link_peers.py decode LINK FOLDER ADDRESS LIFE  takes two blocks of one prompt, and has none for those of another
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from manifest_ranks import At, DecodeRank, PrefillRank, RankPlace, key, wait_until

from xpyd_sidecar.contract.ids import HostPort, Incarnation

HEAD_BYTES = 1 << 14
"""Of a rank in a process of its own, and so of its peer."""
TIMEOUT_S = 60.0
"""Of both: that a process was killed shows in its connections."""


class PeerProcess:
    """The process; killed at the end."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().split()

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


class PrefillProcess(PeerProcess):
    """Of prefill."""

    def __init__(self, link: str, folder: Path) -> None:
        super().__init__("prefill", link, str(folder))
        self.place = HostPort(self.said[0]), Incarnation(self.said[1])


class DecodeProcess(PeerProcess):
    """Of decode, in the middle of transfers."""

    def __init__(self, link: str, folder: Path, source: RankPlace) -> None:
        super().__init__("decode", link, str(folder), *source.place)
        assert self.said == [link]


def prefill(link: str, folder: str) -> None:
    with PrefillRank(transport=link, folder=Path(folder), store_bytes=16 << 20, head_bytes=HEAD_BYTES,
                     timeout_s=TIMEOUT_S) as p:
        p.compute(key(), 0, 2)
        print(*p.place, flush=True)
        time.sleep(120)


def decode(link: str, folder: str, address: str, life: str) -> None:
    source = At(HostPort(address), Incarnation(life))
    with DecodeRank(transport=link, folder=Path(folder), head_bytes=HEAD_BYTES, timeout_s=TIMEOUT_S) as d:
        d.want(key(), source, (9, 3, 4, 5, 30, 31))
        d.want(key(2), source, None)
        wait_until(lambda: d.has(key(), 0, 2))
        print(*d.links, flush=True)
        time.sleep(120)


def main() -> None:
    {"prefill": prefill, "decode": decode}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
