"""A stand-in for ``python`` whose engines have data-parallel ranks; sidecars and launchers are real.

    make_rank_stand_in(folder) → path of an executable to put in the place of the interpreter

    <it> -m vllm.entrypoints.launchers.api_server.entry …   an engine's server with its share of the ranks
    <it> anything else                                  the real interpreter

An engine writes the record of each of its ranks, answers what agents and routers ask, and serves completions: each request
is a line of ``asked`` in its run folder, ``<role of the leg> <X-data-parallel-rank, or ->``. It serves nothing before
all ranks of its life are there, as vLLM's would.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ENGINE = "vllm.entrypoints.launchers.api_server.entry"
TOGETHER_S = 60.0


def make_rank_stand_in(folder: Path) -> str:
    path = folder / "python-of-ranks"
    engine = f"{sys.executable} {Path(__file__)} {folder}"
    path.write_text(f"#!/bin/sh\nif [ \"$2\" = {ENGINE} ]; then exec {engine} \"$@\"; fi\n"
                    f"exec {sys.executable} \"$@\"\n")
    path.chmod(0o700)
    return str(path)


class Given:
    """What the engine was started with."""

    def __init__(self, arguments: list[str]) -> None:
        def value(option: str, default: str) -> str:
            return arguments[arguments.index(option) + 1] if option in arguments else default

        self.model = value("--served-model-name", "tiny")
        self.address = (value("--host", ""), int(value("--port", "0")))
        self.size = int(value("--data-parallel-size", "1"))
        self.first = int(value("--data-parallel-start-rank", "0"))
        self.count = int(value("--data-parallel-size-local", str(self.size)))
        self.meeting = f"{value('--data-parallel-address', '')}:{value('--data-parallel-rpc-port', '')}"
        self.life = json.loads(value("--kv-transfer-config", "{}")).get("engine_id", str(os.getpid()))
        self.run_dir = Path(os.environ["XPYD_RUN_DIR"])


def write_records(given: Given) -> None:
    from xpyd_sidecar.contract import record
    from xpyd_sidecar.contract.fingerprint import FingerprintFields
    from xpyd_sidecar.contract.ids import Incarnation, join_host_port
    from xpyd_sidecar.contract.membership import Parallel

    fields = FingerprintFields("stands-in", "float32", "float32", 16, "HND", "", "0.32.0")
    incarnation = Incarnation(sha256(given.life.encode()).hexdigest()[:32])
    for rank in range(given.first, given.first + given.count):
        control = join_host_port(given.address[0], 40000 + 100 * (given.address[1] % 100) + rank)
        record.write(given.run_dir, record.EngineRecord(
            record.VERSION, rank, incarnation, control, fields, Parallel(data=given.size), 2048, os.getpid(), "2.5.1"))


def wait_for_the_others(given: Given) -> None:
    """Engines of a life meet at the place that all of them were told; here it is a folder of that name."""
    folder = Path(sys.argv[1]) / f"life-{given.life}-{given.meeting}"
    folder.mkdir(exist_ok=True)
    (folder / str(given.first)).touch()
    end = time.monotonic() + TOGETHER_S
    while sum(1 for _ in folder.iterdir()) * given.count < given.size:
        if time.monotonic() > end:
            raise SystemExit(f"not all ranks of life {given.life} came to {given.meeting}")
        time.sleep(0.02)


def serve(given: Given) -> None:
    ranks = range(given.count)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: object) -> None:
            pass

        def answer(self, body: bytes, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                lines = [f'{name}{{engine="{given.first + rank}"}} 0\n' for rank in ranks
                         for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")]
                self.answer("".join(lines).encode(), "text/plain")
                return
            models = {"object": "list", "data": [{"id": given.model, "object": "model", "max_model_len": 2048}]}
            self.answer(json.dumps(models if self.path == "/v1/models" else {}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            leg = (body.get("kv_transfer_params") or {}).get("role", "alone")
            with open(given.run_dir / "asked", "a") as file:
                file.write(f"{leg} {self.headers.get('X-data-parallel-rank', '-')}\n")
            choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None, "token_ids": [7]}
            self.answer(json.dumps({
                "id": "cmpl-1", "object": "text_completion", "created": 1, "model": given.model, "choices": [choice],
                "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}).encode())

    server = ThreadingHTTPServer(given.address, Handler)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("(APIServer pid=1) INFO:     Application startup complete.", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    found = Given(sys.argv[4:])
    write_records(found)
    wait_for_the_others(found)
    serve(found)
