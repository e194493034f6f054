"""The part of xpyd in an engine's API server: a middleware of vLLM's (``--middleware``) that passes every request on as it
is, and keeps the server's LoRA adapters as the agent beside it was told (``adapter_loader``).

No route is added, and vLLM's own for loading adapters (``VLLM_ALLOW_RUNTIME_LORA_UPDATING``), which ask for no key, stay
closed: orders come through the run folder, which only the instance's own processes can write to.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from xpyd_sidecar.contract.launch import ENV_RUN_DIR
from xpyd_sidecar.engine.adapter_loader import AdapterLoader
from xpyd_sidecar.engine.compat.adapters import AdapterModels

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class AdapterMiddleware:
    """An ASGI application around another one. It begins with the server, before requests are taken, and ends with it."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._loads: asyncio.Task[None] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        run_dir = os.environ.get(ENV_RUN_DIR)
        if run_dir is None:
            logger.warning("xpyd: %s is not set: adapters stay as the engine began with them", ENV_RUN_DIR)
        else:
            self._begin(Path(run_dir), scope["app"].state)
        try:
            await self._app(scope, receive, send)
        finally:
            if self._loads is not None:
                self._loads.cancel()

    def _begin(self, run_dir: Path, state: Any) -> None:
        loader = AdapterLoader(run_dir, AdapterModels(state.openai_serving_models, state.vllm_config))
        loader.begin()
        self._loads = asyncio.get_running_loop().create_task(loader.run())
        self._loads.add_done_callback(_ended)


def _ended(loads: asyncio.Task[None]) -> None:
    """Nothing awaits it: what it raises would be lost."""
    if not loads.cancelled() and (error := loads.exception()) is not None:
        logger.error("xpyd: adapters are not loaded any more", exc_info=error)
