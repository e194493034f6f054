"""Real vLLM engines on CPU for component tests.

    with Engine("e0", folder=tmp_path) as engine:          kv_both, with the connector, the random tiny model
        engine.wait_ready()
        engine.complete([5, 6, 7], max_tokens=4)           → choices[0] with token_ids
        engine.metric("vllm:num_requests_running")

``connector=False`` starts a plain engine. ``with`` starts at once and does not wait, so that two engines start side by
side; one costs 30 to 70 s on two cores. Run folder, key file and log lie in ``folder``.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from fork_server import ForkServer
from make_model import cache_root, ensure_model
from processes import Group, ProcessFailed, free_port
from prometheus_client.parser import text_string_to_metric_families

from xpyd_sidecar.contract import keys, launch, metrics, record
from xpyd_sidecar.contract.launch import KvOptions

FOUND = dict(os.environ)
"""The environment as the test run found it. vLLM changes it (LD_PRELOAD) where a test makes its configuration in this
process, and an engine with another one could not be forked."""
MODEL_NAME = "tiny"
READY_DEADLINE_S = 400.0
HTTP_TIMEOUT_S = 240.0
BASE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins every engine of a machine to the same core
    "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "compiled"),  # what one engine has compiled no other compiles again
}
IDLE_SERIES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", metrics.SENDS_OPEN,
               metrics.RECEIVES_OPEN)
BASE_ARGS = ("--enforce-eager", "--max-model-len", "2048", "--dtype", "float32")


class HttpError(Exception):
    """An engine or router answered with an error status."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url}: {status} {body[:2000]}")
        self.status = status
        self.body = body


def get(url: str, timeout_s: float = HTTP_TIMEOUT_S, headers: Mapping[str, str] | None = None) -> str:
    """GET; the body. Raises HttpError on an error status and OSError where nobody answers."""
    return _open(urllib.request.Request(url, headers=dict(headers or {})), timeout_s)


def post(url: str, body: Mapping[str, Any], timeout_s: float = HTTP_TIMEOUT_S,
         headers: Mapping[str, str] | None = None) -> Any:
    """POST of JSON; the JSON answer. Raises as ``get`` does."""
    request = urllib.request.Request(url, json.dumps(body).encode(),
                                     {"Content-Type": "application/json", **(headers or {})})
    return json.loads(_open(request, timeout_s))


def _open(request: urllib.request.Request, timeout_s: float) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        raise HttpError(request.full_url, error.code, error.read().decode(errors="replace")) from None


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a GET gives a status below 400."""
    try:
        get(url, timeout_s)
    except (OSError, HttpError):
        return False
    return True


def samples(text: str, name: str, labels: Mapping[str, str]) -> list[float]:
    """Values of every sample called ``name`` that carries ``labels``."""
    return [sample.value for family in text_string_to_metric_families(text) for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()]


def held(base_url: str) -> dict[str, float]:
    """What an engine still holds, by series; empty when nothing runs, waits, moves or is in use."""
    text = get(f"{base_url}/metrics")
    return {name: value for name in IDLE_SERIES if (value := sum(samples(text, name, {})))}


def metric(base_url: str, name: str, **labels: str) -> float:
    """Sum of an engine's samples called ``name`` with ``labels``; 0 where there is none yet."""
    return sum(samples(get(f"{base_url}/metrics"), name, labels))


def complete(base_url: str, prompt: Sequence[int] | str, max_tokens: int = 16, model: str = MODEL_NAME,
             timeout_s: float = HTTP_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
    """A greedy completion of exactly ``max_tokens`` tokens; ``choices[0]``, with ``token_ids``."""
    body = {"model": model, "prompt": list(prompt) if not isinstance(prompt, str) else prompt, "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    choice: dict[str, Any] = post(f"{base_url}/v1/completions", body, timeout_s)["choices"][0]
    return choice


class Engine:
    """One vLLM server with all its processes."""

    refused: ClassVar[str] = ""
    """Why none may start now: in component tests, those that are not marked ``engines``."""

    def __init__(self, name: str, folder: Path, *, connector: bool = True, model: Path | None = None,
                 key_file: Path | None = None, options: KvOptions | None = None,
                 on_load_failure: Literal["recompute", "fail"] = "recompute", args: Sequence[str] = (),
                 env: Mapping[str, str] | None = None, port: int | None = None, forked: bool = True,
                 beside: Sequence[Mapping[str, Any]] = ()) -> None:
        """``forked``: see ``fork_server``; without, it is started by its command. ``beside``: connectors after ours."""
        self.name = name
        self._forked = forked
        self.folder = folder
        self.connector = connector
        self.run_dir = folder / name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.key_file = key_file or folder / "key"
        if key_file is None:
            keys.write(self.key_file, keys.mint())
        self.command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry",
                         "--model", str(model or ensure_model()), "--served-model-name", MODEL_NAME,
                         "--host", "127.0.0.1", "--port", str(self.port), *BASE_ARGS]
        if connector:
            config = launch.kv_transfer_config(options or KvOptions(), on_load_failure, beside)
            self.command += ["--kv-transfer-config", json.dumps(config)]
        self.command += args
        self.env = {**FOUND, **BASE_ENV, launch.ENV_RUN_DIR: str(self.run_dir),
                     launch.ENV_KEY_FILE: str(self.key_file), launch.ENV_INSTANCE: name, launch.ENV_HOST: "127.0.0.1",
                     **(env or {})}
        self._group: Group | None = None

    def start(self) -> Self:
        """Start the process; does not wait."""
        assert not self.refused, self.refused
        assert self._group is None or self._group.returncode() is not None, f"{self.name} runs already"
        forks = ForkServer.shared()
        self._group = Group(self.command, log=self.log, env=self.env, name=f"engine {self.name}",
                            forks=forks if self._forked and forks.can(self.command, self.env) else None)
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def group(self) -> Group:
        """The running process group."""
        assert self._group is not None, f"{self.name} has not been started"
        return self._group

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> Self:
        """Wait for GET /health, and for the connector's record. Raises ProcessFailed with the end of the log."""
        self.group.wait_until(lambda: answers(f"{self.url}/health"), deadline_s, "healthy", poll_s=0.3)
        if self.connector:
            self.group.wait_until(lambda: self.record() is not None, 60.0, "known by its engine record")
        return self

    def record(self, dp_rank: int = 0) -> record.EngineRecord | None:
        """What the connector says of this process; None before it says it (a record of an earlier process is skipped)."""
        found = record.read(self.run_dir, dp_rank)
        return found if found is not None and self._group is not None and found.pid in self._group.pids() else None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called ``name`` with ``labels``; 0 where there is none yet."""
        return metric(self.url, name, **labels)

    def complete(self, prompt: Sequence[int] | str, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """Ask this engine directly: without kv_transfer_params its answer is that of a plain engine."""
        return complete(self.url, prompt, max_tokens, **fields)

    def alive(self) -> bool:
        """Whether the API server process lives."""
        return self._group is not None and self._group.returncode() is None

    def tail(self) -> str:
        """The end of the log."""
        return self._group.tail() if self._group is not None else ""

    def kill(self) -> None:
        """kill -9 of the process group."""
        if self._group is not None:
            self._group.kill()

    def stop(self, grace_s: float = 20.0) -> int | None:
        """SIGTERM, then kill; the exit code, None when it had to be killed."""
        return self.group.stop(grace_s)

    def restart(self) -> Self:
        """Kill it and start it again at the same port; does not wait."""
        self.kill()
        return self.start()


__all__ = ["MODEL_NAME", "Engine", "HttpError", "ProcessFailed", "answers", "complete", "get", "held", "post", "samples"]
