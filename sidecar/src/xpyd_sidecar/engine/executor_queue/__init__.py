"""The broadcast queue in the place of the one under vLLM's executor of several processes, as a plugin.

    executor ── calls, to every worker ──▶ ring on its host, ZMQ with CURVE elsewhere
             ◀── answers, of each worker ── a queue back from each

vLLM sends pickled calls, over several hosts by ZMQ that asks nobody who they are. Here nothing of another host is unpickled
that did not come from a holder of the service's key, a reader that is lost ends the engine, and every wait has an end.

    register   called with the other plugins; nothing of this unless ``XPYD_QUEUE`` asks for it
    settings   the environment, checked once
    compat     what is used of vLLM, and the sources that it was written for, by version
    pickles    objects as buffers and back
    queue      the ends of a queue, with the methods of vLLM's
    watch      a thread that looks after an executor's workers
    patch      puts them in their places
"""

from __future__ import annotations

import logging

from xpyd_sidecar.errors import ConfigError

logger = logging.getLogger(__name__)


def register() -> None:
    """Take the place of vLLM's queue where ``XPYD_QUEUE`` says so.

    With a vLLM that this was not written for, an engine on one host keeps vLLM's queue, and the log says why. An engine of
    several members does not start.

    Raises:
        ConfigError: a setting is wrong, or this vLLM's queue would be open to others.
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
