"""A store of whole blocks in host memory, by their hashes: the sibling of our connector inside vLLM's MultiConnector, on
CPUs, where vLLM's own offloading does not start.

    {"kv_connector": "HostStore", "kv_connector_module_path": "host_store", "kv_role": "kv_both",
     "kv_connector_extra_config": {"late": true}}

One group of full attention. ``late``: loads run beside the engine's steps (``finished_recving``), and blocks of a request
that has ended are copied two steps later, until when they must stay as they are (``finished_sending``); else all is done
within a step. Nothing is evicted; what finds no room is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

MOST: Final = 4096
"""Blocks."""
LATE_STEPS: Final = 2
Block = tuple[Any, int]
"""Its hash, and where it is in the cache."""


class StoreLoad(NamedTuple):
    """Blocks to fill for a request."""

    request: str
    blocks: tuple[Block, ...]


@dataclass
class StoreOrders(KVConnectorMetadata):
    """Scheduler side to worker."""

    loads: list[StoreLoad] = field(default_factory=list)
    saves: list[Block] = field(default_factory=list)
    last: dict[str, list[Block]] = field(default_factory=dict)
    """Of requests that have ended."""


class HostStore(KVConnectorBase_V1, SupportsHMA):
    """Either side."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.prepare(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size, late=bool(extra.get("late")))

    def prepare(self, block_size: int, *, late: bool) -> None:
        """What does not come from vLLM's configuration; tests without an engine call this alone."""
        self._size = block_size
        self._late = late
        self._orders = StoreOrders()
        self._known: set[Any] = set()
        self._requests: dict[str, Any] = {}
        self._had: dict[str, int] = {}
        self._saved: dict[str, list[Block]] = {}
        self._leaving: dict[str, list[Block]] = {}
        """Of requests that have ended: blocks that are yet to be copied."""
        self._kv: dict[str, torch.Tensor] = {}
        self._data: dict[Any, dict[str, torch.Tensor]] = {}
        self._loaded: set[str] = set()
        self._ending: dict[str, tuple[int, list[Block]]] = {}
        self.served = 0
        """Tokens that came from here."""

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All whole blocks that are known, but for the last token of the prompt."""
        at = num_computed_tokens // self._size
        while at < len(request.block_hashes) and request.block_hashes[at] in self._known \
                and (at + 1) * self._size < request.num_tokens:
            at += 1
        self._had[request.request_id] = num_computed_tokens
        tokens = max(0, at * self._size - num_computed_tokens)
        return tokens, self._late and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there; some of them are to be filled from here, or none."""
        name = request.request_id
        self._requests[name] = request
        if num_external_tokens:
            first, (ids, *_) = self._had[name] // self._size, blocks.get_block_ids()
            last = first + num_external_tokens // self._size
            pairs = tuple((request.block_hashes[at], ids[at]) for at in range(first, last))
            self._orders.loads.append(StoreLoad(name, pairs))
            self.served += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> StoreOrders:
        """Save what becomes whole in this step; where that is late, when its request has ended."""
        orders, self._orders = self._orders, StoreOrders()
        cached = scheduler_output.scheduled_cached_reqs
        done = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, computed in done.items():
            ids = scheduler_output.kv_connector_block_state.get_block_ids(name)[0]
            hashes = self._requests[name].block_hashes
            whole = (computed + scheduler_output.num_scheduled_tokens[name]) // self._size
            for block in list(zip(hashes, ids, strict=False))[:whole]:
                if block[0] in self._known or len(self._known) >= MOST:
                    continue
                if not self._late:
                    self._known.add(block[0])
                    orders.saves.append(block)
                elif block not in self._saved.setdefault(name, []):
                    self._saved[name].append(block)
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are still needed."""
        self._requests.pop(request.request_id, None)
        saved = self._saved.pop(request.request_id, None)
        if saved is None:
            return False, None
        self._orders.last[request.request_id] = self._leaving[request.request_id] = saved
        return True, None

    def update_connector_output(self, connector_output: Any) -> None:
        """Whose blocks have been copied."""
        for name in connector_output.finished_sending or ():
            self._known |= {key for key, _ in self._leaving.pop(name, ())}

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]
                                    ) -> tuple[bool, dict[str, Any] | None]:
        """The same."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step on."""
        return bool(self._leaving or self._orders.loads)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache, by layer."""
        self._kv = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill what is asked for."""
        orders = self._bound()
        for load in orders.loads:
            for key, block in load.blocks:
                for layer, cache in self._kv.items():
                    cache[block] = self._data[key][layer]
            if self._late:
                self._loaded.add(load.request)
        for name, blocks in orders.last.items():
            self._ending[name] = (LATE_STEPS, blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Not by layer."""

    def wait_for_save(self) -> None:
        """Keep what has become whole."""
        self._keep(self._bound().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Whose blocks have been copied, and whose are filled."""
        sent = set()
        for name, (steps, blocks) in list(self._ending.items()):
            self._ending[name] = (steps - 1, blocks)
            if not steps:
                del self._ending[name]
                self._keep(blocks)
                sent.add(name)
        loaded, self._loaded = self._loaded, set()
        return sent, loaded

    def _keep(self, blocks: Iterable[Block]) -> None:
        for key, block in blocks:
            self._data[key] = {layer: cache[block].clone() for layer, cache in self._kv.items()}

    def _bound(self) -> StoreOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StoreOrders)
        return orders
