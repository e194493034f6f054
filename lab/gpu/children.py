"""Processes that a check starts besides its own: they obey lines of JSON on stdin, and answer with lines. Free of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from lab.gpu.findings import NotHeldError

ROOT: Final = Path(__file__).resolve().parents[2]
Order = dict[str, Any]
Answer = dict[str, Any]


class Child:
    """One of them, killed at the end of a ``with``."""

    def __init__(self, module: str, *arguments: str, environ: Mapping[str, str] | None = None,
                 pass_fds: Collection[int] = ()) -> None:
        """``module``: of this package, which runs as a program. ``environ``: what is set besides."""
        self._child = subprocess.Popen([sys.executable, "-m", f"lab.gpu.{module}", *arguments], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **(environ or {})},
                                       pass_fds=pass_fds)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def hear(self) -> Answer:
        """The next answer.

        Raises:
            NotHeldError: it has ended by itself, or says why it cannot go on.
        """
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        answer: Answer = json.loads(line) if line else {"why": "a process of this check has ended by itself"}
        if "why" in answer:
            raise NotHeldError(answer["why"], {})
        return answer

    def tell(self, order: Order) -> None:
        """Give an order."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()

    def ask(self, order: Order) -> Answer:
        """Have an order carried out; raises as ``hear``."""
        self.tell(order)
        return self.hear()

    def kill(self) -> None:
        """Kill -9."""
        self._child.kill()
        self._child.wait()


def say(answer: Answer) -> None:
    """What a child answers: one line."""
    print(json.dumps(answer), flush=True)


def apart(name: str) -> dict[str, str]:
    """Settings with which NCCL takes two processes of one GPU for those of two hosts, and moves through sockets."""
    return {"NCCL_HOSTID": f"check-{name}", "NCCL_SOCKET_IFNAME": "lo"}
