"""Replaces the message queue of vLLM's multi-process executor by xpyd's broadcast queue (``xpyd_sidecar.broadcast``).

    executor ── calls, to every worker ──▶ ring in shared memory on its own host, ZMQ with CURVE to other hosts
             ◀── answers, of each worker ── a queue back from each

vLLM sends pickled calls, between hosts over ZMQ without authentication. Here nothing from another host is unpickled unless
its sender holds the service's key, a lost reader ends the engine, and every wait has an end.

    register   called by xpyd's vLLM plugin (``dp_plugin``) in each process; without ``XPYD_QUEUE=xpyd`` it does nothing
    settings   the environment, checked once
    compat     what is used of vLLM, and hashes of the vLLM sources that this was written for, by version
    pickles    objects as buffers and back
    queue      the two ends of a queue, with the methods of vLLM's ``MessageQueue``
    watch      a thread that watches an executor's workers
    patch      puts the queue in the place of vLLM's
"""

from __future__ import annotations

import logging

from xpyd_sidecar.errors import ConfigError

logger = logging.getLogger(__name__)


def register() -> None:
    """Replace the queue under vLLM's executor in this process where ``XPYD_QUEUE`` is ``xpyd``.

    If the sources of this vLLM are none that the queue was written for, an engine on one host keeps vLLM's queue, and the
    log says why; an engine of several members (pods) does not start, since vLLM's queue has no authentication.

    Raises:
        ConfigError: a setting is wrong, or the sources do not match in an engine of several members.
    """
    from xpyd_sidecar.engine.executor_queue import settings  # noqa: PLC0415 (vLLM calls this in every process)

    wanted = settings.read()
    if wanted is None:
        return
    try:
        from xpyd_sidecar.engine.executor_queue import patch  # noqa: PLC0415 (imports vLLM's executor)

        patch.install(wanted)
    except ConfigError as error:
        if wanted.life:
            raise ConfigError(f"{error}; over several pods vLLM's own queue is open to everybody who reaches it: use an "
                              "engine.image that xpyd knows") from None
        logger.warning("xpyd: vLLM's own queue is under its executor: %s", error)
