"""Asks the agent in a run folder: ``python -m xpyd_sidecar.agent.ask WHAT [--run-dir DIR] [--timeout S]``.

    status, undrain   what the agent has
    drain             waits until the instance is drained: the preStop hook of an engine's container
    live              whether its engine is to go on: the probe of an engine's container. Of one that is to be ended it has
                      the stacks written, by the processes that it finds beside itself. An agent that does not answer says
                      nothing against its engine

Needs the standard library alone beside the contract, so that it starts at once in whatever image the engine has.

Exit code: 0 done; 1 not drained in time, or to be ended (the reason on stderr); 2 nobody answers (but for ``live``), or
wrong usage.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xpyd_sidecar.contract.launch import AGENT_SOCKET, ENV_RUN_DIR
from xpyd_sidecar.contract.liveness import STACKS_SIGNAL, catches

ANSWER_S = 5.0
PROBE_S = 2.0
"""The same for each question of a probe, which has a time-out of its own."""
PROC = Path("/proc")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, run_dir: Path, timeout_s: float) -> None:
        super().__init__("agent", timeout=timeout_s)
        self._run_dir = run_dir

    def connect(self) -> None:
        # Through the folder's descriptor, since a unix socket's path holds 107 bytes only.
        folder = os.open(self._run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{AGENT_SOCKET}")
        finally:
            os.close(folder)


def ask(run_dir: Path, method: str, path: str, timeout_s: float = ANSWER_S) -> tuple[int, dict[str, Any]]:
    """One request to the agent: status and decoded answer.

    Raises:
        OSError: nobody answers in time.
        ValueError: the answer is not JSON.
    """
    connection = _UnixConnection(run_dir, timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body: dict[str, Any] = json.loads(answer.read(1 << 20))
    except http.client.HTTPException as error:
        raise OSError(f"{run_dir / AGENT_SOCKET}: {error!r}") from error
    finally:
        connection.close()
    return answer.status, body


def live(run_dir: Path) -> str:
    """Why the engine of this container is to be ended; empty: it is to go on, or its agent does not say."""
    try:
        status, body = ask(run_dir, "GET", "/live", PROBE_S)
        why = str(body["hangs"]) if status == 200 else ""
        if why and ask(run_dir, "POST", "/stacks", PROBE_S)[1].get("first"):
            write_stacks()
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"no agent in {run_dir}, which says nothing of its engine: {error}\n")
        return ""
    return why


def write_stacks() -> list[int]:
    """Have every process of this container that can do so write its stacks to its log; which those were."""
    asked = []
    for entry in PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if catches((entry / "status").read_text("utf-8", "replace"), STACKS_SIGNAL):
                os.kill(int(entry.name), STACKS_SIGNAL)
                asked.append(int(entry.name))
        except OSError as error:  # it has ended meanwhile, or is another user's
            sys.stderr.write(f"no stacks of process {entry.name}: {error}\n")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="xpyd_sidecar.agent.ask", description="Ask the agent of an instance.")
    parser.add_argument("what", choices=["status", "drain", "undrain", "live"])
    parser.add_argument("--run-dir", type=Path, default=os.environ.get(ENV_RUN_DIR), help=f"default: ${ENV_RUN_DIR}")
    parser.add_argument("--timeout", type=float, help="drain: seconds to wait, at most the agent's own drain time-out")
    args = parser.parse_args(argv)
    if args.run_dir is None:
        parser.error(f"--run-dir is required where ${ENV_RUN_DIR} is not set")
    if args.timeout is not None and not args.timeout > 0:
        parser.error("--timeout must be above 0")
    run_dir = Path(args.run_dir)
    if args.what == "live":
        why = live(run_dir)
        sys.stderr.write(f"{why}\n" if why else "")
        return int(bool(why))
    try:
        if args.what == "drain":
            query = "" if args.timeout is None else f"&timeout_s={args.timeout:g}"
            wait_s = None if args.timeout is None else args.timeout + ANSWER_S
            status, body = ask(run_dir, "POST", f"/drain?wait=1{query}", wait_s or 24 * 3600.0)
        else:
            status, body = ask(run_dir, "GET" if args.what == "status" else "POST", f"/{args.what}")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"no agent in {run_dir}: {error}\n")
        return 2
    if status >= 400:
        sys.stderr.write(f"agent in {run_dir}: {body.get('error', status)}\n")
        return 2
    if args.what == "drain" and not body["drained"]:
        sys.stderr.write(f"not drained: {body['reason']}\n")
        return 1
    sys.stdout.write(json.dumps(body, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
