"""kubectl, from the same build as the API server, with a deadline on every call."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from testcluster.errors import ClusterError, CommandFailed

DEADLINE_S = 120.0
POLL_S = 0.2


class Kubectl:
    """kubectl as one user."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = DEADLINE_S) -> str:
        """Standard output of ``kubectl <arguments>``.

        Raises:
            CommandFailed: it said no; the message is what it said.
        """
        command = self.command(*arguments)
        try:
            done = subprocess.run(command, input=stdin or "", capture_output=True, text=True, timeout=timeout_s,
                                  check=False)
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"kubectl {' '.join(arguments)} did not end within {timeout_s:.0f} s") from None
        if done.returncode:
            raise CommandFailed(f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """The whole command line, for callers that start it themselves.

        What kubectl remembers of an API server is kept beside the kubeconfig: else it goes, for six hours, by what it has
        seen of an earlier cluster at the same address.
        """
        cache = self.kubeconfig.parent / "kubectl-cache"
        return [str(self.program), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={cache}", *arguments]

    def apply(self, *objects: dict[str, Any], server_side: bool = False) -> None:
        """Apply objects."""
        self("apply", *(["--server-side"] if server_side else []), "-f", "-", stdin=yaml.safe_dump_all(objects))

    def get(self, *arguments: str) -> Any:
        """``kubectl get … -o json``, decoded."""
        return json.loads(self("get", *arguments, "-o", "json"))


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll until ``condition()``; an error of kubectl counts as not yet, and is quoted when time is up.

    Raises:
        ClusterError: the deadline passed.
    """
    end = time.monotonic() + deadline_s
    last = ""
    while True:
        try:
            if condition():
                return
            last = ""
        except CommandFailed as error:
            last = f": {error}"
        if time.monotonic() > end:
            raise ClusterError(f"not within {deadline_s:.0f} s: {what}{last}")
        time.sleep(POLL_S)
