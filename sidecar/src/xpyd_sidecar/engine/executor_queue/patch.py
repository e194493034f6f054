"""The broadcast queue in its places: vLLM makes its queues by the name ``MessageQueue``, in two modules."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Final

from xpyd_sidecar.engine import compat as vllm_compat
from xpyd_sidecar.engine.executor_queue import compat
from xpyd_sidecar.engine.executor_queue.compat import MultiprocExecutor, multiproc_executor, shm_broadcast
from xpyd_sidecar.engine.executor_queue.queue import ExecutorWriter
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings

logger = logging.getLogger(__name__)

_STOCK: Final = MultiprocExecutor._init_executor


def install(settings: QueueSettings) -> None:
    """Have this process, and those that it forks, make broadcast queues.

    Raises:
        ConfigError: this vLLM is not the one that this was written for.
    """
    if shm_broadcast.MessageQueue is ExecutorWriter:
        return
    compat.check_sources()
    ExecutorWriter.settings = settings
    shm_broadcast.MessageQueue = multiproc_executor.MessageQueue = ExecutorWriter
    MultiprocExecutor._init_executor = _init_executor


def _init_executor(self: Any) -> None:
    vllm_compat.log_like_vllm("xpyd_sidecar")  # not before: vLLM sets its own logs up after it has loaded plugins
    _STOCK(self)
    queue = self.rpc_broadcast_mq
    if isinstance(queue, ExecutorWriter):
        this = weakref.ref(self)
        queue.watch(lambda name, reason: end_engine(this(), name, reason))
        logger.info("xpyd: calls to %d workers go through the broadcast queue, %d of them on this host", self.world_size,
                    self.local_world_size)


def end_engine(executor: Any, name: str, reason: str) -> None:
    """End the engine, as vLLM's own thread does when a worker of this host has died; that one is told of no others."""
    if executor is None or executor.is_failed or getattr(executor, "shutting_down", False):
        return
    logger.error("xpyd: worker %s is lost: %s; the engine ends", name, reason)
    executor.is_failed = True
    for answers in executor.response_mqs:
        answers.shutdown()
    callback, executor.failure_callback = executor.failure_callback, None
    if callback is not None:
        callback()
