"""A vLLM plugin for tests: engine cores and workers are forked, though vLLM spawns them on CPUs.

A spawned process imports vLLM anew, which takes 7 processor seconds; a server has two of them. Here the server imports once
what they need, and forks. What such a process would not have if it were spawned, it leaves: see ``leave_sockets``.

    PYTHONPATH=<this folder>      vLLM finds it by its entry point
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
import sys
from typing import Any

NEEDED = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
          "vllm.v1.worker.cpu_model_runner", "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.llama",
          "xpyd_sidecar.engine.connector")


def plugin() -> None:
    """What vLLM calls in the server."""
    for name in NEEDED:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.get_mp_context = _fork_context  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=leave_sockets)


def _fork_context() -> Any:
    return multiprocessing.get_context("fork")


def leave_sockets() -> None:
    """In a forked process: it has no sockets of who made it, as one that is spawned has none.

    With them a port would stay open after its server has been killed, and a peer would not be told that it has gone. Their
    numbers stay taken, since objects that are inherited may still close them. Pairs without names are pipes of
    ``multiprocessing``, which it is meant to have.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as one:
                    if one.family != socket.AF_UNIX or one.getsockname() or one.getpeername():
                        os.dup2(nothing, number)
    os.close(nothing)
