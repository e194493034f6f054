"""Both sides of the connector (``connector_sides``) with models of several KV cache groups, and vLLM's own block managers.

    p, d = GroupedEngine("p", folder, MODELS["windows"]), GroupedEngine("d", folder, MODELS["windows"])
    job = Job(p, d, prompt=70)            a prompt of 70 tokens: 69 are handed over
    job.prefill(chunk=20)                 vLLM allocates, a kernel writes each token's KV, and free blocks are ruined
    job.load()                            decode's load, into the blocks that decode's manager gives it
    job.wrong()                           what token 69 would read, and is not there: (layer, token)
    GroupedEngine(…, tensor=2)            of two ranks, each with a head of its own

Layers of all groups lie over each other in one memory, as vLLM has them: a block belongs to one group at a time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from connector_sides import BLOCK, Engine, decode_leg, prefill_leg, until
from copies import Clock
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

WINDOW, BLOCKS, CONTEXT = 40, 160, 512
HEADS: Final = 2
PAGE: Final = HEADS * BLOCK * 4 * 4
"""Bytes of a block: 2 heads, 4 values of 4 bytes for each token."""
USED: Final = 300
"""Of a page, by a state."""
GARBAGE: Final = -7.0
MODELS: Final = {"windows": ("window", "window", "window", "all"), "oss": ("window", "all"), "states": ("state", "all"),
                 "every kind": ("all", "state", "window")}
"""Layers by reach; each is a group of its own."""


def described(reaches: tuple[str, ...], tensor: int = 1) -> KVCacheConfig:
    """What vLLM says of a model with one layer of each reach, on one of so many ranks."""
    attention: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS // tensor, "head_size": 2,
                                 "dtype": torch.float32, "page_size_padded": PAGE // tensor}
    specs: dict[str, KVCacheSpec] = {
        "all": FullAttentionSpec(**attention), "window": SlidingWindowSpec(**attention, sliding_window=WINDOW),
        "state": MambaSpec(block_size=CONTEXT, shapes=((USED // 4 // tensor,),), dtypes=(torch.float32,),
                           page_size_padded=PAGE // tensor)}
    groups = [KVCacheGroupSpec([f"layer{at}"], specs[reach]) for at, reach in enumerate(reaches)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def written(prompt: int, layer: int, token: int, heads: range = range(HEADS)) -> torch.Tensor:
    """What a kernel writes for a token: a row for each head."""
    return (prompt * 4096 + layer * 1024 + token + 1 + torch.tensor(heads) / HEADS).unsqueeze(1).expand(-1, 4)


def state_after(prompt: int, layer: int, tokens: int) -> int:
    """What a state is after so many tokens."""
    return (prompt * 31 + layer * 7 + tokens) % 126 + 1


class GroupedEngine(Engine):
    """With a manager of vLLM's that says which blocks are whose."""

    def __init__(self, name: str, folder: Path, reaches: tuple[str, ...], clock: Clock | None = None,
                 **options: Any) -> None:
        self.reaches = reaches
        self.tensor = int(options.get("tensor", 1))
        config = described(reaches, self.tensor)
        self.manager = KVCacheManager(config, CONTEXT, CONTEXT, BLOCK, enable_caching=False)
        heads = {f"layer{at}": HEADS for at, reach in enumerate(reaches) if reach != "state"}
        super().__init__(name, folder, clock, blocks=BLOCKS, described=config, make_caches=self._caches, heads=heads,
                         **options)

    def _caches(self) -> dict[str, torch.Tensor]:
        return self.memory(self.reaches, self.tensor)

    def heads(self, rank: int) -> range:
        """Which heads a rank has."""
        each = HEADS // self.tensor
        return range(rank * each, (rank + 1) * each)

    @staticmethod
    def memory(reaches: Iterable[str], tensor: int = 1) -> dict[str, torch.Tensor]:
        """Layers of these reaches, all over each other, on one of so many ranks."""
        page, used = PAGE // tensor, USED // 4 // tensor * 4
        memory = torch.zeros(BLOCKS, page, dtype=torch.uint8)
        attention = memory.view(torch.float32).view(BLOCKS, HEADS // tensor, BLOCK, 4)
        state = memory.view(torch.int8).as_strided((BLOCKS, 1, 1, used), (page, used, used, 1))
        return {f"layer{at}": state if reach == "state" else attention for at, reach in enumerate(reaches)}

    def tables_of(self, request: Any) -> tuple[list[int], ...]:
        """Its blocks now, by group."""
        tables: tuple[list[int], ...] = self.manager.get_block_ids(request.request_id)
        return tables

    def compute(self, request: Any, prompt: int, tokens: range) -> None:
        """Kernels write a chunk's KV, layer by layer: a state is written over in place."""
        tables = self.tables_of(request)
        for rank, (caches, device) in enumerate(zip(self.caches, self.devices, strict=True)):
            for layer, (reach, table) in enumerate(zip(self.reaches, tables, strict=True)):
                cache = caches[f"layer{layer}"]
                if reach == "state":
                    device.compute(0.0, partial(cache[table[0]].fill_, state_after(prompt, layer, tokens.stop)))
                    continue
                for token in tokens:
                    row = cache[table[token // BLOCK]][:, token % BLOCK]
                    device.compute(0.0, partial(row.copy_, written(prompt, layer, token, self.heads(rank))))

    def ruin_free_blocks(self, tables: tuple[list[int], ...]) -> None:
        """Blocks that have been given back are somebody else's at once."""
        for caches, device in zip(self.caches, self.devices, strict=True):
            memory = next(one for one in caches.values() if one.dtype is torch.float32)
            for block in {block for table in tables for block in table if block}:
                device.compute(0.0, partial(memory[block].fill_, GARBAGE))


class Job:
    """One request over both engines. ``attempt``s of prefill may follow each other."""

    numbers = 0

    def __init__(self, p: GroupedEngine, d: GroupedEngine, *, prompt: int) -> None:
        Job.numbers += 1
        self.number = Job.numbers
        self.p, self.d, self.prompt = p, d, prompt
        self.transfer = uuid.uuid4().hex
        self.ours = self._request(decode_leg(self.transfer, wait_s=60.0), 16)
        self.theirs = self._request(prefill_leg(self.transfer, d), 1)
        self.tokens = prompt - 1
        self._held: set[int] = set()
        d.scheduler.new_request(self.ours)

    def _request(self, leg: dict[str, Any], answer: int) -> Request:
        ids = [self.number + 2] * self.prompt
        sampling = SamplingParams(max_tokens=answer, extra_args={"kv_transfer_params": leg})
        return Request(f"cmpl-{uuid.uuid4().hex}", ids, sampling, None)

    def prefill(self, chunk: int, *, most: int | None = None) -> None:
        """Compute the prompt in chunks, all of it or up to so many tokens; again: go on."""
        if not self.theirs.num_computed_tokens:
            self.p.scheduler.new_request(self.theirs)
        asked = self.theirs.num_prompt_tokens
        while self.theirs.num_computed_tokens < min(asked, most or asked):
            done = self.theirs.num_computed_tokens
            count = min(chunk, asked - done)
            assert self.p.manager.allocate_slots(self.theirs, count) is not None
            tables = self.p.tables_of(self.theirs)
            if not done:
                self.p.scheduler.on_allocated(self.theirs, tables, 0)
            self.p.ruin_free_blocks(self._given_back(tables))
            self.p.compute(self.theirs, self.number, range(done, done + count))
            run = (self.theirs, tuple(list(one) for one in tables), done, count)
            self.p.step(new=(run,) if not done else (), cached=(run,) if done else ())
            self.theirs.num_computed_tokens += count

    def _given_back(self, tables: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Blocks that have left a window since the step before, and that nobody has taken: they may be anybody's."""
        held = {block for table in tables for block in table}
        out = [block for block in self._held - held if self.p.manager.block_pool.blocks[block].ref_cnt == 0]
        self._held = held
        return (out,)

    def end_prefill(self) -> bool:
        """Its request ends. Whether its blocks are kept for copies that are not made yet."""
        held = self.p.scheduler.on_request_ended(self.theirs)
        if not held:
            self.give_back()
        return held

    def give_back(self) -> None:
        """Its blocks are free, and somebody else writes into them."""
        tables = self.p.tables_of(self.theirs)
        self.p.manager.free(self.theirs)
        self.p.ruin_free_blocks(tables)

    def ask(self) -> None:
        """Decode has heard of it and has blocks for it."""
        until(lambda: self.d.scheduler.match_tokens(self.ours, 0) == (self.tokens, True), self.p, self.d)
        blocks = self.d.manager.allocate_slots(self.ours, 0, num_external_computed_tokens=self.tokens,
                                               delay_cache_blocks=True)
        assert blocks is not None
        self.d.scheduler.on_allocated(self.ours, self.d.tables_of(self.ours), self.tokens)

    def wait(self) -> bool:
        """Until the load is over. Whether all has come."""
        until(lambda: self.ours.request_id in self.d.recved, self.p, self.d)
        return self.ours.request_id not in self.d.failed

    def load(self) -> None:
        """All of it comes."""
        self.ask()
        assert self.wait()

    def wrong(self) -> list[tuple[int, int]]:
        """What decode's next token reads and is not what prefill has written: (layer, token), of states (layer, tokens)."""
        found = []
        self.ours.num_computed_tokens = self.tokens
        assert self.d.manager.allocate_slots(self.ours, 1) is not None
        tables = self.d.tables_of(self.ours)
        for rank, layer in product(range(self.d.tensor), range(len(tables))):
            cache, reach, table = self.d.caches[rank][f"layer{layer}"], self.d.reaches[layer], tables[layer]
            if reach == "state":
                if not bool((cache[table[0]] == state_after(self.number, layer, self.tokens)).all()):
                    found.append((layer, self.tokens))
                continue
            first = max(0, self.tokens - WINDOW + 1) if reach == "window" else 0
            for token in range(first, self.tokens):
                block = table[token // BLOCK]
                right = written(self.number, layer, token, self.d.heads(rank))
                if not block or not bool((cache[block][:, token % BLOCK] == right).all()):
                    found.append((layer, token))
        return found

    def leave(self) -> None:
        """Both have answered, and all blocks are free."""
        self.d.scheduler.on_request_ended(self.ours)
        self.d.manager.free(self.ours)
