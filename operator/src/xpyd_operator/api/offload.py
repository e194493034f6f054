"""``spec.kv.offload``: where prefixes are kept that have no place in an engine's cache any more."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from xpyd_operator.api.base import Part, Preserved, Size
from xpyd_operator.api.quantity import size

_HANDS_OVER: Final = "hands KV from engine to engine, as xpyd's own connector does already; leave it out"
_MEMORY: Final = "write spec.kv.offload.memory, which makes it"
NO_STORES: Final = {
    "XpydConnector": "is there already, before the store; leave it out",
    "MultiConnector": "is made of xpyd's connector and the store; write the store's own connector",
    "OffloadingConnector": _MEMORY,
    "SimpleCPUOffloadConnector": "write spec.kv.offload.disk, which makes it (for memory spec.kv.offload.memory)",
    "NixlConnector": _HANDS_OVER,
    "NixlPullConnector": _HANDS_OVER,
    "NixlPushConnector": _HANDS_OVER,
    "MoRIIOConnector": _HANDS_OVER,
    "MooncakeConnector": f"{_HANDS_OVER} (a store is MooncakeStoreConnector)",
    "HiSparseConnector": "moves parts of a running request's KV, which decode must hand over whole; leave it out",
    "ExampleHiddenStatesConnector": "keeps hidden states, not KV; leave it out",
    "DecodeBenchConnector": "makes KV up, for benchmarks; leave it out",
}
"""Connectors that may be looked for as a store, and what is right instead."""


CLASS_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$"
ClassName = Annotated[str, Meta(min_length=1, max_length=384, pattern=CLASS_PATTERN, extra={"kind": "class"})]


class Store(Part, frozen=True):
    """A store of KV by its connector, such as LMCache or Mooncake; its package must be in `engine.image`."""

    connector: ClassName
    """Name of the connector in vLLM (`LMCacheMPConnector`, `MooncakeStoreConnector` …), or a class that vLLM does not know,
    with its Python module before it (`mine.store.Mine`)."""
    options: Preserved = msgspec.field(default_factory=dict)
    """Handed on unchanged (`kv_connector_extra_config`), e.g. `lmcache.mp.host: tcp://lmcache`. Set it to say where the
    store is.
    """

    @property
    def class_name(self) -> str:
        """The connector's name, without a module before it."""
        return self.connector.rpartition(".")[2]

    @property
    def module(self) -> str | None:
        """The module that it is in, where vLLM does not know the name by itself."""
        return self.connector.rpartition(".")[0] or None


class Offload(Part, frozen=True):
    """Where prefixes are kept that have no place in an engine's cache any more, of both roles. KV that prefill hands over
    comes first; else the first that holds more of a prompt than the cache serves it: memory, disk, store.
    """

    memory: Size | None = None
    """Host memory of one instance, all ranks together, e.g. `64Gi`: vLLM's offloading. It is part of the pod's memory,
    and needs GPUs. Set it where prompts come again after the cache has lost them.
    """
    disk: Size | None = None
    """Disk of one instance, all ranks together, e.g. `500Gi`: a volume of the pod (`emptyDir` named `offload`, which
    `template` may replace), in which the oldest prefixes make room. It needs GPUs. Not with `xpyd up`. Set it where the
    host's memory is too small for that.
    """
    store: Store | None = None
    """A store that instances share."""

    @property
    def memory_bytes(self) -> int:
        """Bytes; 0: none."""
        return 0 if self.memory is None else size(self.memory)

    @property
    def disk_bytes(self) -> int:
        """Bytes; 0: none."""
        return 0 if self.disk is None else size(self.disk)
