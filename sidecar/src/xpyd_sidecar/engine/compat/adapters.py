"""LoRA adapters in vLLM's API server, of every version known here: what the server answers to, and by which request the
engine knows each (``entrypoints.openai.models.serving``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client import REGISTRY, Gauge
from vllm.lora.request import LoRARequest

from xpyd_sidecar.contract.adapters import MOST_RECENT

RUNNING = "vllm:lora_requests_info"
"""A series of vLLM's for each set of adapters that ever ran together, kept for ever."""


class AdapterRefused(Exception):
    """The engine cannot load an adapter; the message is its own."""


class RecentUse(dict[str, LoRARequest]):
    """vLLM's adapters by name; remembers which were asked for last. The server looks a name up once for each request."""

    def __init__(self, found: Mapping[str, LoRARequest], most: int) -> None:
        super().__init__(found)
        self._most = most
        self.recent: OrderedDict[str, None] = OrderedDict()

    def __getitem__(self, name: str) -> LoRARequest:
        self.recent[name] = None
        self.recent.move_to_end(name)
        if len(self.recent) > self._most:
            self.recent.popitem(last=False)
        return super().__getitem__(name)


class AdapterModels:
    """The adapters of one API server.

    vLLM's own call to load refuses a name that is there, or loads in place, which changes the weights under requests that
    run. Here a name gets a new request with a number of its own, and requests that run keep theirs.
    """

    def __init__(self, models: Any, config: Any) -> None:
        """``models``: vLLM's ``OpenAIServingModels``; ``config``: the engine's."""
        self._models = models
        self.slots = int(config.lora_config.max_loras) if config.lora_config is not None else 0
        self._uses = RecentUse(models.lora_requests, min(max(1, self.slots), MOST_RECENT))
        models.lora_requests = self._uses

    def recent(self) -> tuple[str, ...]:
        """Names that were asked for last, the latest last, as many as there are slots; without what was unloaded."""
        return tuple(name for name in self._uses.recent if name in self._uses)

    def paths(self) -> dict[str, str]:
        """Name → path of all that are loaded."""
        return {name: str(request.lora_path) for name, request in self._uses.items()}

    async def load(self, name: str, path: str) -> None:
        """Load from ``path``; from then on the name means that.

        Raises:
            AdapterRefused: the engine cannot; nothing has changed.
        """
        models = self._models
        if not self.slots:
            raise AdapterRefused("the engine takes no adapters: --enable-lora is missing")
        if models.is_base_model(name):
            raise AdapterRefused("the model itself has this name")
        async with models.lora_resolver_lock[name]:
            request = LoRARequest(name, models.lora_id_counter.inc(1), path)
            try:
                await models.engine_client.add_lora(request)
            except Exception as error:  # of any kind: it comes from a worker
                raise AdapterRefused(str(error) or type(error).__name__) from error
            self._uses[name] = request

    def repath(self, name: str, path: str) -> None:
        """The same files by another path; nothing where the name is unknown."""
        if (request := self._uses.get(name)) is not None:
            self._uses[name] = msgspec.structs.replace(request, lora_path=path)

    def unload(self, name: str) -> None:
        """Answer to the name no longer; nothing where it is unknown. What the engine has of it makes room when needed."""
        self._uses.pop(name, None)

    def forget_series(self) -> None:
        """Drop the series of sets of adapters that do not run now: with many adapters they would fill memory, and an answer
        of ``/metrics`` would take longer and longer. What runs has its series again a step later.
        """
        found = REGISTRY._names_to_collectors.get(RUNNING)
        if isinstance(found, Gauge):
            found.clear()
