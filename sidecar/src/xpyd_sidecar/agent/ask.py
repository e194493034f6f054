"""Asks the agent in a run folder: ``python -m xpyd_sidecar.agent.ask status|drain|undrain [--run-dir DIR] [--timeout S]``.

``drain`` waits until the instance is drained: it is the preStop hook of an engine's container. Needs the standard library
alone beside the contract, so that it starts at once in whatever image the engine has.

Exit code: 0 done; 1 not drained in time (the reason on stderr); 2 nobody answers, or wrong usage.
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

ANSWER_S = 5.0


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


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="xpyd_sidecar.agent.ask", description="Ask the agent of an instance.")
    parser.add_argument("what", choices=["status", "drain", "undrain"])
    parser.add_argument("--run-dir", type=Path, default=os.environ.get(ENV_RUN_DIR), help=f"default: ${ENV_RUN_DIR}")
    parser.add_argument("--timeout", type=float, help="drain: seconds to wait, at most the agent's own drain time-out")
    args = parser.parse_args(argv)
    if args.run_dir is None:
        parser.error(f"--run-dir is required where ${ENV_RUN_DIR} is not set")
    if args.timeout is not None and not args.timeout > 0:
        parser.error("--timeout must be above 0")
    run_dir = Path(args.run_dir)
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
