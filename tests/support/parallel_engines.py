"""Engines of two tensor-parallel ranks, with the arguments and the environment that the operator renders.

vLLM refuses Ray on CPUs, so an engine with Ray gets a platform of the tests (``ray_on_cpu``).
"""

from __future__ import annotations

from pathlib import Path

from engines import Engine
from render_service import service

from xpyd_operator.local import procs
from xpyd_operator.render.engine import executor_env
from xpyd_sidecar.contract import launch, legs
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import KvOptions

PATIENCE_S = 120.0
"""Workers that poll at full speed share two cores: an engine may be silent for longer than the usual 5 s."""
MARK = "test/parallel"
ARGS = ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "34", "--max-num-batched-tokens", "512")
PLATFORM = Path(__file__).parent / "ray_on_cpu"


def parallel_engine(executor: str, folder: Path, scratch: Path, queue: str = "vllm") -> Engine:
    """Not started. ``scratch`` is a folder whose path is short: Ray puts sockets there. ``queue``: as ``engine.queue``."""
    options = KvOptions(claim_s=8.0, peer_timeout_s=PATIENCE_S, load_timeout_s=PATIENCE_S)
    name = executor if queue == "vllm" else f"{executor}-{queue}"
    return Engine(name, folder, args=(*ARGS, "--distributed-executor-backend", executor),
                  on_load_failure="fail", options=options, forked=executor != "ray",
                  env=_environment(executor, scratch) | {launch.ENV_QUEUE: queue})


def _environment(executor: str, folder: Path) -> dict[str, str]:
    env = executor_env(service(prefill={"parallelism": {"executor": executor}}), Role.PREFILL, str(folder))
    if executor == "ray":
        env |= {"PYTHONPATH": str(PLATFORM), "RAY_OVERRIDE_RESOURCES": '{"HPU": 2}'}
    return env | {"VLLM_HOST_IP": "127.0.0.1", procs.MARKER: MARK}


def ask(engine: Engine, prompt: list[int], n: int, leg: legs.Leg | None = None) -> list[int]:
    """The ids of ``n`` greedy tokens."""
    more = {"kv_transfer_params": legs.encode(leg)} if leg else {}
    tokens: list[int] = engine.complete(prompt, n, timeout_s=PATIENCE_S, **more)["token_ids"]
    return tokens


def of_session(leader: int) -> dict[int, str]:
    """Living processes of a session, by id, with their names."""
    return {stat.pid: _name(stat.pid) for stat in procs.everyone() if stat.session == leader}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    except OSError:
        return ""
