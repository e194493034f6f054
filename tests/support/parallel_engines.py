"""Engines of two tensor-parallel ranks, their workers in processes, as the operator has them, or in actors of a Ray.

vLLM refuses Ray on CPUs, so an engine with Ray gets a platform of the tests (``ray_on_cpu``).
"""

from __future__ import annotations

from pathlib import Path

from engines import Engine

from xpyd_operator.local import procs
from xpyd_sidecar.contract import launch, legs
from xpyd_sidecar.contract.launch import KvOptions

PATIENCE_S = 120.0
"""Workers that poll at full speed share two cores: an engine may be silent for longer than the usual 5 s."""
MARK = "test/parallel"
ARGS = ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "34", "--max-num-batched-tokens", "512")
RAY_ENV = {
    "RAY_ADDRESS": "local",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(128 << 20),
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
}
"""A Ray of its own for an engine, which nobody else reaches or joins: ``local`` starts one instead of joining whichever the
host has, and the variable with the odd name has it listen on the loopback address. vLLM's newer executor sends steps
through shared memory, so a small object store is enough.
"""
PLATFORM = Path(__file__).parent / "ray_on_cpu"


def parallel_engine(executor: str, folder: Path, scratch: Path, queue: str = "vllm") -> Engine:
    """Not started. ``scratch`` is a folder whose path is short: Ray puts sockets there. ``queue``: as in ``XPYD_QUEUE``."""
    options = KvOptions(claim_s=8.0, peer_timeout_s=PATIENCE_S, load_timeout_s=PATIENCE_S)
    name = executor if queue == "vllm" else f"{executor}-{queue}"
    return Engine(name, folder, args=(*ARGS, "--distributed-executor-backend", executor),
                  on_load_failure="fail", options=options, forked=executor != "ray",
                  env=_environment(executor, scratch) | {launch.ENV_QUEUE: queue})


def _environment(executor: str, folder: Path) -> dict[str, str]:
    env: dict[str, str] = {}
    if executor == "ray":
        env = RAY_ENV | {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(PLATFORM), "RAY_OVERRIDE_RESOURCES": '{"HPU": 2}'}
    return env | {"VLLM_HOST_IP": "127.0.0.1", procs.MARKER: MARK}


def ask(engine: Engine, prompt: list[int], n: int, leg: legs.Leg | None = None) -> list[int]:
    """The ids of ``n`` greedy tokens."""
    more = {"kv_transfer_params": legs.encode(leg)} if leg else {}
    tokens: list[int] = engine.complete(prompt, n, timeout_s=PATIENCE_S, **more)["token_ids"]
    return tokens


def of_session(leader: int) -> dict[int, str]:
    """Living processes of a session, by id, with their names."""
    return {stat.pid: _name(stat.pid) for stat in procs.all_processes() if stat.session == leader}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    except OSError:
        return ""
