"""Hosts with vLLM's own executor and its worker processes; only what a worker does with a call is the test's.

Each host is a process, and its workers are forked by the executor. So it runs with the Python sources of any
version, without a model. Hosts of one engine are all on this machine; another host's workers count as elsewhere.

    with hosts(1, 2, settings) as (host,):                     one host with two workers
        host.ask("call", "echo", 7)                            → [(0, 7), (1, 7)]
    with hosts(2, 1, settings) as (leader, follower): …        two hosts with one worker each
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.config
from networks import Network
from processes import free_port
from torch import distributed
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.executor import multiproc_executor

from xpyd_sidecar.broadcast import remote, wire
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.engine.executor_queue import patch
from xpyd_sidecar.engine.executor_queue.queue import ExecutorWriter
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings

SERVICE_KEY = ServiceKey(bytes(range(32)))
LIFE = "ab" * 16
KEY = keys.of_life(SERVICE_KEY, LIFE)
HERE = "127.0.0.1"
SETTINGS = QueueSettings(KEY, HERE, LIFE)
"""Of members of one life."""
SILENCE_S = remote.SILENCE_MS / 1000
START_S = 400.0
"""The first one waits for an import of vLLM."""
CLEAN = mp.get_context("forkserver")
"""Forks from a process in which nothing runs: in one that had threads of OpenMP, vLLM 0.33 would wait for them for ever."""
CLEAN.set_forkserver_preload([__name__])


class HandWorker:
    """In the place of vLLM's wrapper of a worker."""

    def __init__(self, rpc_rank: int, global_rank: int) -> None:
        self.rank = global_rank

    def init_worker(self, all_kwargs: list[dict[str, Any]]) -> None:
        (self.config,) = [one["vllm_config"] for one in all_kwargs if one]

    def init_device(self) -> None:
        parallel = self.config.parallel_config
        if parallel.nnodes_within_dp > 1:
            meeting = f"tcp://{parallel.master_addr}:{self.config.port}"
            distributed.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=parallel.world_size)
            group: Any = GroupCoordinator.__new__(GroupCoordinator)
            group.cpu_group, group.ranks = distributed.group.WORLD, list(range(parallel.world_size))
            multiproc_executor.get_inner_dp_world_group = lambda: group
            parallel_state.in_the_same_node_as = lambda pg, source_rank=0: [rank == source_rank for rank in group.ranks]
            self.group_queue = shm_broadcast.MessageQueue.create_from_process_group(group.cpu_group, 1 << 22, 6)

    def load_model(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    def spread(self, value: Any) -> Any:
        """What rank 0 tells the others of its group."""
        return self.group_queue.broadcast_object(value if self.rank == 0 else None)

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    def bytes(self, count: int) -> bytes:
        return bytes(count)

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float, mark: str = "") -> int:
        """``mark``: begins the name of a file that says that this rank does so."""
        if mark:
            Path(f"{mark}-{self.rank}").touch()
        time.sleep(seconds)
        return self.rank

    def fail(self) -> None:
        raise ValueError(f"worker {self.rank} cannot")


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def config(node: int, nodes: int, each: int, port: int, leader: str) -> Any:
    """As much of vLLM's as the executor reads."""
    world = nodes * each
    parallel = SimpleNamespace(
        world_size=world, local_world_size=each, nnodes_within_dp=nodes, node_rank=node, node_rank_within_dp=node,
        master_addr=leader, tensor_parallel_size=world, pipeline_parallel_size=1, prefill_context_parallel_size=1,
        data_parallel_size_local=1, data_parallel_rank_local=0, _api_process_count=1, enable_shm_tensor_arena=False,
        numa_bind=False, assigned_physical_gpu_ids=None, enable_expert_parallel=False, enable_fault_tolerance=False)
    watchdog = getattr(vllm.config, "WatchdogConfig", lambda: None)()
    return SimpleNamespace(
        parallel_config=parallel, scheduler_config=SimpleNamespace(async_scheduling=False), model_config=None,
        cache_config=None, lora_config=None, load_config=None, device_config=None, speculative_config=None,
        observability_config=None, kv_transfer_config=None, logging_config=None, watchdog_config=watchdog, port=port)


class Running:
    """The executor of a host, in its process."""

    def __init__(self, node: int, nodes: int, each: int, port: int, leader: str) -> None:
        multiproc_executor.WorkerWrapperBase = HandWorker
        kind = type(multiproc_executor.current_platform)
        kind.update_block_size_for_backend = classmethod(lambda cls, config: None)
        self.failed_at = 0.0
        self.executor = multiproc_executor.MultiprocExecutor(config(node, nodes, each, port, leader))
        self.executor.register_failure_callback(self._failed)

    def _failed(self) -> None:
        self.failed_at = time.monotonic()

    def call(self, method: str, *args: Any) -> Any:
        return self.executor.collective_rpc(method, args=args)

    def one(self, rank: int, method: str, *args: Any) -> Any:
        return self.executor.collective_rpc(method, args=args, unique_reply_rank=rank)

    def many(self, count: int) -> list[Any]:
        """Calls that are not waited for, and then all their answers."""
        asked = [self.executor.collective_rpc("echo", args=(number,), unique_reply_rank=0, non_block=True)
                 for number in range(count)]
        return [one.result()[1] for one in asked]

    def timed(self, count: int, seconds: float) -> list[float]:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            self.executor.collective_rpc("sleep", args=(seconds,))
            took.append(time.perf_counter() - began)
        return took

    def total(self, count: int) -> Any:
        return self.call("total", torch.ones(count, dtype=torch.float32))

    def workers(self) -> list[int]:
        return [one.proc.pid for one in self.executor.workers]

    def status(self) -> dict[str, Any]:
        queue = self.executor.rpc_broadcast_mq
        ours = isinstance(queue, ExecutorWriter)
        remotes = queue._writer._remotes if ours else None
        return {"failed_at": self.failed_at, "failed": self.executor.is_failed, "silent": queue.silent if ours else (),
                "seen": tuple(remotes._seen) if remotes is not None else (),
                "alive": [one.proc.is_alive() for one in self.executor.workers]}

    def endpoints(self) -> list[str]:
        """Where members from elsewhere connect."""
        queues = [self.executor.rpc_broadcast_mq, *self.executor.response_mqs]
        known = [wire.read_handle(one.export_handle().raw) for one in queues]
        return [address for one in known for address in (one.endpoint, one.second) if address]

    def stop(self) -> None:
        self.executor.shutdown()


def serve(told: Connection, silence_s: float, settings: QueueSettings | None, network: Network | None,
          *where: Any) -> None:
    """The process of a host."""
    os.setsid()
    remote.SILENCE_MS = int(1000 * silence_s)  # type: ignore[misc]
    os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_HOST_IP=HERE,
                      OMP_NUM_THREADS="1")
    if network is not None:
        network.enter()
        os.environ.update(VLLM_HOST_IP=network.address, GLOO_SOCKET_IFNAME="eth0")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    if settings is not None:
        patch.install(settings)
    running = Running(*where)
    told.send(("", "ready"))
    while True:
        method, args = told.recv()
        try:
            told.send(("", getattr(running, method)(*args)))
        except Exception as error:  # noqa: BLE001  # for the test to see
            told.send((f"{type(error).__name__}: {error}", None))


def forks() -> None:
    """Start what hosts are forked from. It imports this module once, for which CPython gives it no path (3.11); without,
    every host would import vLLM for itself.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Host:
    """A host, seen from the test."""

    def __init__(self, *args: Any) -> None:
        self._told, theirs = CLEAN.Pipe()
        self.process = CLEAN.Process(target=serve, args=(theirs, *args))
        self.process.start()
        theirs.close()

    def hear(self, seconds: float) -> Any:
        if not self._told.poll(seconds):
            raise TimeoutError(f"the host says nothing for {seconds} s")
        problem, answer = self._told.recv()
        if problem:
            raise RuntimeError(problem)
        return answer

    def begin(self, method: str, *args: Any) -> None:
        self._told.send((method, args))

    def ask(self, method: str, *args: Any, seconds: float = 120.0) -> Any:
        self.begin(method, *args)
        return self.hear(seconds)

    def kill(self) -> None:
        """The host's own process, which its workers see."""
        self.process.kill()
        self.process.join(10)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it leads no session yet
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.kill()
        self._told.close()


@contextlib.contextmanager
def hosts(nodes: int, each: int, settings: QueueSettings | None, networks: Sequence[Network] = (), *,
          silence_s: float = SILENCE_S) -> Iterator[list[Host]]:
    """Hosts of one engine, the leader first; their sessions end with the block.

    ``networks``: of each, else all are in that of the test. ``silence_s``: after which one is gone.
    """
    forks()
    port, leader = free_port(), networks[0].address if networks else HERE
    made = []
    for node in range(nodes):
        network, own = networks[node] if networks else None, settings
        if settings is not None and network is not None:
            own = settings._replace(host=network.address)
        made.append(Host(silence_s, own, network, node, nodes, each, port, leader))
    try:
        for host in made:
            assert host.hear(START_S) == "ready"
        yield made
    finally:
        for host in made:
            host.end()
