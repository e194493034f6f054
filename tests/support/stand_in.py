"""A stand-in for ``python`` in tests of the local backend: engines, agents and routers that cost milliseconds.

    make_stand_in(folder) → path of an executable to put in the place of the interpreter

    <it> -m vllm.entrypoints.launchers.api_server.entry --host H --port P …   listens, prints vLLM's phrases, has a child
    <it> -m xpyd_sidecar --config FILE                               an agent (Unix socket), a router (/fleet, admin port)
    <it> anything else                                               the real interpreter

Variables of the environment change what they do: STAND_IN_START_S (seconds until an engine listens), STAND_IN_EXIT (an
engine ends with this code at once), STAND_IN_SHM (an engine keeps a file of that name in /dev/shm mapped), STAND_IN_BUSY
(as long as this file exists, a request runs, and no engine is drained).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

ENGINE = "vllm.entrypoints.launchers.api_server.entry"


def make_stand_in(folder: Path) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -S {Path(__file__)} {sys.executable} \"$@\"\n")
    path.chmod(0o700)
    return str(path)


class Quiet(BaseHTTPRequestHandler):
    def log_request(self, *_: object) -> None:
        pass

    def answer(self, body: object, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class UnixServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


def engine(arguments: list[str]) -> None:
    print(f"(APIServer pid={os.getpid()}) INFO non-default args: {arguments}", flush=True)
    if code := os.environ.get("STAND_IN_EXIT"):
        print("ValueError: told to end", flush=True)
        raise SystemExit(int(code))
    if name := os.environ.get("STAND_IN_SHM"):
        with open(f"/dev/shm/{name}{os.getpid()}", "w+b") as file:
            file.truncate(4096)
            globals()["kept"] = mmap.mmap(file.fileno(), 4096)
    child = subprocess.Popen(["sleep", "1000"])

    def end(*_: object) -> None:
        child.kill()
        os._exit(0)

    time.sleep(float(os.environ.get("STAND_IN_START_S", "0")))

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.answer({})

    host, port = (arguments[arguments.index(option) + 1] for option in ("--host", "--port"))
    server = ThreadingHTTPServer((host, int(port)), Handler)
    signal.signal(signal.SIGTERM, end)
    print("(APIServer pid=1) INFO:     Application startup complete.", flush=True)
    server.serve_forever()


def sidecar(config: dict) -> None:
    run_dir = Path(config["run_dir"])
    beats = run_dir.parent / "beats"
    beats.mkdir(exist_ok=True)
    if config["agent"]:
        agent(config, run_dir, beats)
    else:
        router(config, beats)


def agent(config: dict, run_dir: Path, beats: Path) -> None:
    host, _, port = config["agent"]["engine"].rpartition(":")
    draining = threading.Event()
    told = {"role": config["agent"]["role"], "epoch": config["agent"]["epoch"]}

    def status() -> dict:
        with socket.socket() as probe:
            up = probe.connect_ex((host, int(port))) == 0
        busy = Path(os.environ.get("STAND_IN_BUSY", "/nowhere")).exists()
        state = "draining" if draining.is_set() else "ready" if up else "starting"
        return {
            "state": state, **told, "drained": draining.is_set() and not busy,
            "waits_for": "1 running" if busy and draining.is_set() else "",
            "load": {"running": int(busy)}, "problem": "" if up else "GET /health: refused",
        }

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.answer(status())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if self.path == "/role":
                told.update({key: json.loads(body)[key] for key in told})
                self.answer(status())
                return
            draining.set()
            self.answer(status(), 202)

    mine = beats / f"{config['instance']}.json"
    one_beat = threading.Lock()  # the goodbye keeps it: no beat comes after it

    def beat() -> None:
        while True:
            said = status()
            body = {
                "instance": config["instance"], "role": said["role"], "epoch": said["epoch"], "state": said["state"],
                "incarnation": "",
                "fingerprint": "stands-in", "http": ["{advertise_host}:{advertise_port}".format(**config["agent"])],
                "control": [], "model": "",
                "load": said["load"], "drained": said["drained"], "in_flight": 0, "beat_age_s": 0.0,
            }
            temporary = mine.with_suffix(".tmp")
            with one_beat:
                temporary.write_text(json.dumps(body))
                temporary.replace(mine)
            time.sleep(0.05)

    def goodbye(*_: object) -> None:
        one_beat.acquire()
        mine.unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, goodbye)
    (run_dir / "agent.sock").unlink(missing_ok=True)
    server = UnixServer(str(run_dir / "agent.sock"), Handler)
    threading.Thread(target=beat, daemon=True).start()
    server.serve_forever()


def router(config: dict, beats: Path) -> None:
    class Handler(Quiet):
        def do_GET(self) -> None:
            if self.path == "/sample":  # it is of a time before that
                self.answer({}, 404)
                return
            if not self.headers.get("Authorization", "").startswith("Bearer "):
                self.answer({"error": "no token"}, 401)
                return
            instances = []
            for path in sorted(beats.glob("*.json")):
                with contextlib.suppress(FileNotFoundError):  # its agent has said goodbye since
                    instances.append(json.loads(path.read_text()))
            self.answer({"service": config["service"], "router": config["instance"], "uptime_s": 1.0, "settled": True,
                         "instances": instances, "requests_total": 7, "requests_failed": 0})

    class Clients(Quiet):
        def do_GET(self) -> None:
            self.answer({}, 200 if self.path == "/health" else 404)

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    of = config["router"]
    threading.Thread(target=ThreadingHTTPServer((of["host"], of["port"]), Clients).serve_forever, daemon=True).start()
    ThreadingHTTPServer((of["host"], of["admin_port"]), Handler).serve_forever()


if __name__ == "__main__":
    real, *rest = sys.argv[1:]
    if rest[:2] == ["-m", ENGINE]:
        engine(rest[2:])
    elif rest[:3] == ["-m", "xpyd_sidecar", "--config"]:
        sidecar(json.loads(Path(rest[3]).read_text()))
    else:
        os.execv(real, [real, *rest])
