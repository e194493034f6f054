"""A vLLM plugin for tests: what a CPU build lacks for experts spread over data-parallel ranks, and a look at their steps.

vLLM exchanges tokens between the ranks with two collectives that its CPU communicator does not have; here they are made of
those that it has. With ``XPYD_TEST_STEPS=<folder>`` each rank also writes ``rank-<n>.steps``, a line per forward:

    <monotonic ns> real|dummy <number of the forward, from 1> <tokens>

and takes requests from ``inject-<rank>.json`` in that folder (``{"prompt": [ids], "max_tokens": n}``), which come to this
rank as if from nowhere: no front end knows of them. Once there, the file becomes ``inject-<rank>.taken``.

    PYTHONPATH=<this folder>      vLLM finds it by its entry point
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("XPYD_TEST_STEPS")
POLL_S = 0.01
PATIENCE_S = 600.0
"""For vLLM's coordinator to start; vLLM itself gives it 120 s, in which a busy machine may not even have imported vLLM."""


def plugin() -> None:
    """What vLLM calls in each process."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if "all_gatherv" in CpuCommunicator.__dict__:
        return
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    _be_patient()
    if FOLDER:
        _observe(Path(FOLDER))


def _be_patient() -> None:
    from vllm.v1.engine.coordinator import DPCoordinator

    stock = DPCoordinator._wait_for_zmq_addrs

    def patient(self: Any, pipe: Any) -> Any:
        multiprocessing.connection.wait([pipe, self.proc.sentinel], timeout=PATIENCE_S)
        return stock(self, pipe)

    DPCoordinator._wait_for_zmq_addrs = patient


def _gather(self: Any, part: Any, sizes: list[int] | None) -> Any:
    import torch

    sizes = sizes or [part.shape[0]] * self.world_size
    padded = part.new_zeros((max(sizes), *part.shape[1:]))
    padded[:part.shape[0]] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([one[:size] for one, size in zip(parts, sizes, strict=True)])


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    assert dim == 0
    return [_gather(self, one, sizes) for one in input_] if isinstance(input_, list) else _gather(self, input_, sizes)


def _reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    import torch

    assert dim == 0
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
    first = sum(sizes[:self.rank_in_group])
    return total[first:first + sizes[self.rank_in_group]].contiguous()


def _observe(folder: Path) -> None:
    from vllm.v1.engine.core import DPEngineCoreProc
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # the one that vLLM takes on CPUs

    execute_model, execute_dummy_batch = MultiprocExecutor.execute_model, MultiprocExecutor.execute_dummy_batch
    begun = [0]

    def note(executor: Any, kind: str, tokens: int) -> None:
        begun[0] += 1
        with (folder / f"rank-{executor.parallel_config.data_parallel_rank}.steps").open("a") as file:
            file.write(f"{time.monotonic_ns()} {kind} {begun[0]} {tokens}\n")

    def observed_model(self: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        if plan.total_num_scheduled_tokens > 0:
            note(self, "real", plan.total_num_scheduled_tokens)
        return execute_model(self, plan, *args, **kwargs)

    def observed_dummy(self: Any) -> None:
        note(self, "dummy", 0)
        execute_dummy_batch(self)

    MultiprocExecutor.execute_model, MultiprocExecutor.execute_dummy_batch = observed_model, observed_dummy
    sockets = DPEngineCoreProc.process_input_sockets

    def with_injection(self: Any, *args: Any, **kwargs: Any) -> None:
        threading.Thread(target=_inject, args=(self, folder), daemon=True).start()
        sockets(self, *args, **kwargs)

    DPEngineCoreProc.process_input_sockets = with_injection


def _inject(core: Any, folder: Path) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType

    path = folder / f"inject-{core.dp_rank}.json"
    count = 0
    while True:
        time.sleep(POLL_S)
        if not path.exists():
            continue
        asked = json.loads(path.read_text())
        count += 1
        params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True, temperature=0)
        request = EngineCoreRequest(
            request_id=f"injected-{count}", prompt_token_ids=asked["prompt"], mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None)
        core.input_queue.put_nowait((EngineCoreRequestType.ADD, core.preprocess_add_request(request)))
        path.rename(path.with_suffix(".taken"))
