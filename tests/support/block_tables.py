"""The tables of blocks that vLLM's scheduler keeps of requests, as engines that are stepped by hand give them.

    tables.now(new, cached)        what ``SchedulerOutput.kv_connector_block_state`` is in this step

``new`` and ``cached`` are (request, blocks, …): those of a new request are all that it has, those of a cached one are more
of them. Where a model has several groups, blocks are a tuple with a list for each, and all that there are in both cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

Tables = tuple[list[int], ...]


class BlockTables:
    """Of one engine."""

    def __init__(self) -> None:
        self._of: dict[str, Tables] = {}

    def now(self, new: Iterable[Any], cached: Iterable[Any]) -> SimpleNamespace:
        for request, blocks, *_ in new:
            self._of[request.request_id] = blocks if isinstance(blocks, tuple) else (list(blocks),)
        for request, blocks, *_ in cached:
            if isinstance(blocks, tuple):
                self._of[request.request_id] = blocks
            else:
                self._of[request.request_id][0].extend(blocks)
        return SimpleNamespace(get_block_ids=self._of.__getitem__)
