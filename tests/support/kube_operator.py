"""The operator as a process of its own, to be started, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
from processes import Group, ProcessFailed, free_port, kept_waiting_s
from releases import Release

READY_S = 240.0
END_S = 60.0
ANSWER_S = 30.0
POLL_S = 0.05
IMAGE = "registry.example/xpyd-sidecar:test"


class OperatorProcess:
    """``python -m patient_operator``. Not started yet; ``start`` returns once it works."""

    def __init__(self, kubeconfig: Path, log: Path, *flags: str, namespace: str = "") -> None:
        self.log = log
        self.port = 0
        self.image = IMAGE
        self.release: Release | None = None
        """Of which it is at its next start; None: of this tree."""
        self._kubeconfig = kubeconfig
        here = (f"--namespace={namespace}", f"--operator-namespace={namespace}") if namespace else ()
        self._flags = (*here, *flags)
        self._group: Group | None = None

    def spawn(self) -> None:
        """Start the process and do not wait."""
        assert self._group is None
        self.port = free_port()
        module = "patient_operator" if self.release is None else "xpyd_operator.kube"
        command = [sys.executable, "-m", module, f"--kubeconfig={self._kubeconfig}",
                   f"--http-port={self.port}", f"--sidecar-image={self.image}", "--log-format=text", *self._flags]
        path = sys.path if self.release is None else [self.release.path_for_python, *sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        self._group = Group(command, log=self.log, env=environment, name="operator")

    async def start(self) -> None:
        """Start it and wait until it works (or, with a Lease that another holds, follows)."""
        self.spawn()
        await self.wait_ready()

    async def wait_ready(self, deadline_s: float = READY_S) -> None:
        """It says that it is ready."""
        end = time.monotonic() + deadline_s
        while (said := await self.said("/readyz")) != "ok":
            group = self._alive()
            if time.monotonic() > end:
                raise ProcessFailed(f"the operator is not ready after {deadline_s:.0f} s: {said}\n{group.tail()}")
            await asyncio.sleep(POLL_S)

    async def said(self, path: str) -> str:
        """Body of one of its own paths; empty while it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with (asyncio.timeout(ANSWER_S), aiohttp.ClientSession() as session,
                        session.get(f"http://127.0.0.1:{self.port}{path}") as answer):
                return (await answer.text()).strip()
        return ""

    async def metric(self, name: str) -> float:
        """Sum over all labels of one metric of its own."""
        lines = (await self.said("/metrics")).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def stop(self) -> int | None:
        """SIGTERM; its exit code, None where it had to be killed."""
        group, self._group = self._group, None
        return None if group is None else await asyncio.to_thread(group.stop, END_S)

    async def kill(self) -> None:
        """SIGKILL."""
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.kill)

    def kept_waiting_s(self) -> float:
        """Seconds so far in which it was ready to run, and the machine had no processor for it."""
        return kept_waiting_s([self.pid])

    def pause(self) -> None:
        """SIGSTOP."""
        self._alive().signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._alive().signal(signal.SIGCONT)

    @property
    def running(self) -> bool:
        """It was started and has not ended."""
        return self._group is not None and self._group.returncode() is None

    @property
    def pid(self) -> int:
        """Of the running process."""
        return self._alive().pid

    def tail(self, lines: int = 60) -> str:
        """The end of its log, over all its lives."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text("utf-8", errors="replace").splitlines()[-lines:])

    def _alive(self) -> Group:
        if self._group is None:
            raise ProcessFailed("the operator was not started")
        code = self._group.returncode()
        if code is not None:
            raise ProcessFailed(f"the operator ended with {code}:\n{self._group.tail()}")
        return self._group
