"""How each router is started before the same scripted engines: ours as shipped, the others at their cheapest.

    xpyd            shipped defaults with a client key: metrics, access log, heartbeats, failover ``continue``
    xpyd_error      the same with failover ``error``
    xpyd_before     another version of ours, likewise, where an environment is named that has one (``--before``)
    nginx           pass-through of the client's request to decode alone, one worker, no access log
    vllm_router     its prefill/decode mode (``--vllm-pd-disaggregation``): prefill first, then decode
    sglang_router   its prefill/decode mode (``--pd-disaggregation``): both legs at once

The others get no key to check, log errors alone, pick by turns and do not retry.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from processes import Group, free_port

from xpyd_sidecar.contract import keys

MODEL = "tiny"
CLIENT_KEY = secrets.token_hex(16)
READY_S = 60.0
SERVICE = "bench"


class Engines(NamedTuple):
    """Ports of the scripted engines."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


class Contender:
    """One router, running."""

    def __init__(self, name: str, port: int, group: Group) -> None:
        self.name = name
        self.port = port
        self.group = group

    @property
    def pid(self) -> int:
        """Of the first process; others are its children."""
        return self.group.pid


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _wait_ready(group: Group, port: int, path: str) -> None:
    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"{_url(port)}{path}", timeout=2) as answer:  # noqa: S310 - our own address
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    group.wait_until(ready, READY_S, f"answers on {path}")


def nginx(engines: Engines, folder: Path) -> Contender:
    """The system's nginx."""
    port = free_port()
    servers = "\n".join(f"    server 127.0.0.1:{each};" for each in engines.decode)
    (folder / "nginx.conf").write_text(f"""
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log stderr error;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  tcp_nodelay on;
  keepalive_requests 1000000;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  upstream decode {{
{servers}
    keepalive 1024;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://decode;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      client_body_buffer_size 64k;
    }}
  }}
}}
""")
    group = Group(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], log=folder / "nginx.log")
    _wait_ready(group, port, "/health")
    return Contender("nginx", port, group)


def _rust(name: str, command: Sequence[str], engines: Engines, folder: Path, *, bootstrap: Sequence[str] = ()) -> Contender:
    port, metrics = free_port(), free_port()
    argv = [*command, "--host", "127.0.0.1", "--port", str(port)]
    for each in engines.prefill:
        argv += ["--prefill", _url(each), *bootstrap]
    for each in engines.decode:
        argv += ["--decode", _url(each)]
    argv += ["--policy", "round_robin", "--log-level", "error", "--disable-retries", "--prometheus-port", str(metrics),
             "--max-concurrent-requests", "32768"]
    group = Group(argv, log=folder / f"{name}.log")
    _wait_ready(group, port, "/readiness")
    return Contender(name, port, group)


def vllm_router(engines: Engines, folder: Path, binaries: Path) -> Contender:
    """vllm-router from the packages of ``requirements/bench.txt``."""
    return _rust("vllm_router", [str(binaries / "vllm-router"), "--vllm-pd-disaggregation"], engines, folder)


def sglang_router(engines: Engines, folder: Path, binaries: Path) -> Contender:
    """sglang-router, likewise."""
    command = [str(binaries / "python"), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    return _rust("sglang_router", command, engines, folder, bootstrap=["8998"])


def xpyd(name: str, folder: Path, settings: Mapping[str, object],
         python: str = sys.executable) -> tuple[Contender, int, keys.ServiceKey]:
    """Our router, its members port and the service's key; it serves once somebody beats for the engines. ``python``: of the
    environment that it is installed in.
    """
    key = keys.mint()
    home = folder / name
    home.mkdir()
    (home / "key").write_text(key.hex())
    (home / "clients").write_text(CLIENT_KEY + "\n")
    port, members = free_port(), free_port()
    config = {"service": SERVICE, "instance": name, "key_file": str(home / "key"), "run_dir": str(home),
              "router": {"host": "127.0.0.1", "port": port, "members_port": members, "admin_port": free_port(),
                         "model": MODEL,
                         "api_key_file": str(home / "clients"), **settings}}
    (home / "config.json").write_text(json.dumps(config))
    group = Group([python, "-m", "xpyd_sidecar", "--config", str(home / "config.json")], log=home / "log")
    _wait_ready(group, port, "/health")
    return Contender(name, port, group), members, key


def versions(binaries: Path) -> dict[str, str]:
    """What is compared."""
    said = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    ask = "import importlib.metadata as m;print(m.version('vllm-router'), m.version('sglang-router'))"
    found = subprocess.run([str(binaries / "python"), "-c", ask], capture_output=True, text=True, check=True)
    listed = found.stdout.split()
    return {"nginx": said.strip().rpartition("/")[2], "vllm_router": listed[0], "sglang_router": listed[1],
            "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d", time.gmtime())}
