"""Data-parallel step sync inside vLLM, as a plugin (group ``vllm.general_plugins``). The rules are ``xpyd_sidecar.dp``.

    register   what vLLM calls in each of its processes; nothing of this unless ``XPYD_DP_SYNC`` is set
    settings   the environment, checked once
    compat     what is used of vLLM, the sources it was written for, and what it cannot be combined with
    patch      the methods of vLLM's engine core that give way to the rules
    steps      one rank: the rules, its link and its engine core
    meeting    how ranks find each other and agree that they run the same rules
    links      what all links share; ``rpc`` a coordinator over ZMQ, ``shm`` one line per rank in shared memory, ``spread``
               the coordinator of ranks on several hosts, whose grants go through the broadcast queue
    counters   what is counted, for ``/metrics``

vLLM loads it by the entry point in the package's metadata, which lies beside the package wherever it is put on a path.
"""

from __future__ import annotations

import logging

from xpyd_sidecar.errors import ConfigError

logger = logging.getLogger(__name__)


def register() -> None:
    """Have what ends an engine kept (``threads.termination_log``), its stacks written when somebody asks for them
    (``threads.stacks``), and memory of devices left for the connector
    (``device_room``); put the broadcast queue under the executor where that is asked for (``engine.executor_queue``);
    install the rules if ``XPYD_DP_SYNC`` asks for them.

    With ``auto`` a vLLM that the rules were not written for keeps its own way, and the log says why. So it is for all ranks
    of an engine: they have one image.

    Raises:
        ConfigError: a setting is wrong, or ``rpc`` or ``shm`` is asked for and this vLLM is another one.
    """
    from xpyd_sidecar.threads import stacks, termination_log  # noqa: PLC0415 (vLLM calls this in every process)

    termination_log.listen()
    stacks.listen()
    _leave_room()
    from xpyd_sidecar.engine import executor_queue  # noqa: PLC0415 (likewise)

    executor_queue.register()
    from xpyd_sidecar.engine.dp_plugin import settings  # noqa: PLC0415 (likewise)

    wanted = settings.read()
    if wanted is None:
        return
    try:
        from xpyd_sidecar.engine.dp_plugin import patch  # noqa: PLC0415 (imports vLLM's engine core)

        patch.prepare(wanted)
    except ConfigError as error:
        if wanted.mode != "auto":
            raise
        logger.warning("xpyd: no step sync, data-parallel ranks go by vLLM's waves: %s", error)


def _leave_room() -> None:
    from vllm.platforms import current_platform  # noqa: PLC0415 (likewise)

    if current_platform.is_cuda_alike():
        from xpyd_sidecar.engine.compat.device_room import leave  # noqa: PLC0415 (likewise)
        from xpyd_sidecar.engine.worker import device_room  # noqa: PLC0415 (imports torch)

        leave(device_room.device_bytes)
