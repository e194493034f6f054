"""The processes of a cluster: started, watched until ready, and signalled by who they are, never by a bare number."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from testcluster.errors import ClusterError, ComponentFailed
from testcluster.state import Folder, Record
from xpyd_operator.local import procs

TAIL_LINES = 25
STOP_S = 20.0
KILL_S = 10.0
POLL_S = 0.1

Probe = Callable[[], str]
"""Why something is not ready yet; empty once it is."""


class Component(msgspec.Struct, frozen=True):
    """How one process is started, and how it is known to be ready."""

    name: str
    command: Sequence[str]
    ready: Probe
    deadline_s: float = 60.0
    environment: Mapping[str, str] = {}


class Runner:
    """Starts and ends the components of one cluster and keeps its record true."""

    def __init__(self, folder: Folder, record: Record) -> None:
        self.folder = folder
        self.record = record
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def alive(self, name: str) -> bool:
        """Whether the recorded process lives (stopped by SIGSTOP counts)."""
        identity = self.record.processes.get(name)
        return identity is not None and procs.alive(identity)

    def launch(self, component: Component) -> None:
        """Start the process, if it does not live. Returns before it is ready."""
        if self.alive(component.name):
            return
        log = self.folder.log(component.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            try:
                child = subprocess.Popen(component.command, cwd=self.folder.path, env=self._environment(component),
                                         stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                         start_new_session=True)
            except OSError as error:
                raise ComponentFailed(f"{component.name} cannot be started: {error}") from None
        identity = procs.identify(child.pid)
        self._children[component.name] = child
        if identity is not None:
            self.record.processes[component.name] = identity
            self.folder.save(self.record)

    def wait_ready(self, component: Component) -> None:
        """Wait until the component answers.

        Raises:
            ComponentFailed: it ended, or the deadline passed.
        """
        end = time.monotonic() + component.deadline_s
        while reason := component.ready():
            if not self.alive(component.name):
                raise ComponentFailed(f"{component.name} ended before it was ready ({reason}); "
                                      f"{self.quote(component.name)}")
            if time.monotonic() > end:
                raise ComponentFailed(f"{component.name} is not ready after {component.deadline_s:.0f} s ({reason}); "
                                      f"{self.quote(component.name)}")
            time.sleep(POLL_S)

    def start(self, component: Component) -> None:
        """Start and wait."""
        self.launch(component)
        self.wait_ready(component)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, grace_s: float = STOP_S) -> None:
        """Signal the process and wait until it is gone; killed when it stays. Nothing happens where none lives."""
        identity = self.record.processes.get(name)
        if identity is not None and procs.alive(identity):
            procs.send(identity.pid, identity.start, number)
            if number != signal.SIGKILL:
                procs.send(identity.pid, identity.start, signal.SIGCONT)
            if not self._gone(identity, grace_s):
                procs.send(identity.pid, identity.start, signal.SIGKILL)
                if not self._gone(identity, KILL_S):
                    raise ComponentFailed(f"{name} (pid {identity.pid}) lives on after SIGKILL")
        if self.record.processes.pop(name, None) is not None:
            self.folder.save(self.record)
        self._reap(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a component that must live.

        Raises:
            ClusterError: it does not.
        """
        identity = self.record.processes.get(name)
        if identity is None or not procs.send(identity.pid, identity.start, number):
            raise ClusterError(f"{name} does not run in {self.folder.path}")

    def collect(self) -> None:
        """Take note of the ends of all processes of this runner, which somebody else has killed."""
        for name in list(self._children):
            self._reap(name)

    def quote(self, name: str) -> str:
        """The last lines of a log, with its path."""
        return f"{self.folder.log(name)}:\n{tail(self.folder.log(name))}"

    def _environment(self, component: Component) -> dict[str, str]:
        """Little of ours, and the mark by which every process of the cluster is found again."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        return kept | path | {procs.MARKER: marker(self.folder)} | dict(component.environment)

    def _gone(self, identity: procs.Identity, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while procs.alive(identity):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def _reap(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.wait(KILL_S)


def marker(folder: Folder) -> str:
    """What every process that this program starts for a cluster carries in its environment."""
    return f"testcluster:{folder.path}"


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log; a sentence where there is none."""
    try:
        return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error.strerror})"
