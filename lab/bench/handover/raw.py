"""What a hand-over's bytes need on the link alone: publisher and receiver of lab/bench/kv in two idle processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = Path(__file__).parents[1] / "kv"


class Link:
    """The shipped link of one host (decode maps prefill's copies; with checksum)."""

    def __init__(self, size: int, block: int, name: str = "ours_shm") -> None:
        """``size``: bytes of a transfer; ``block``: of each of its blocks."""
        self._block = block
        environment = dict(os.environ) | {"PYTHONPATH": str(HERE)}
        self._sides = [subprocess.Popen([sys.executable, "peer.py", name, role, str(size)], cwd=HERE, env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for role in "pd"]

    def __enter__(self) -> Self:
        said = []
        for side in self._sides:
            while not (line := self._hear(side)).startswith("{"):
                pass
            said.append(json.loads(line))
        for side, other in zip(self._sides, reversed(said), strict=True):
            self._say(side, json.dumps(other))
        for side in self._sides:
            while self._hear(side) != "met":
                pass
        self.seconds()  # connects
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for side in self._sides:
            side.kill()
            side.wait()

    def seconds(self) -> float:
        """One transfer, from the order until all is in place."""
        prefill, decode = self._sides
        order = f"{self._block} 1 0"
        self._say(prefill, order)
        while self._hear(prefill) != "ready":
            pass
        self._say(decode, order)
        taken, right, _ = self._hear(decode).split()
        if right != "1":
            raise RuntimeError("the link brought wrong bytes")
        return float(taken)

    @staticmethod
    def _say(side: subprocess.Popen[str], line: str) -> None:
        assert side.stdin is not None
        side.stdin.write(line + "\n")
        side.stdin.flush()

    @staticmethod
    def _hear(side: subprocess.Popen[str]) -> str:
        assert side.stdout is not None
        line = side.stdout.readline()
        if not line:
            raise RuntimeError(f"the link's process ended with {side.wait()}")
        return line.strip()
