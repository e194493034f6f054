"""What moves of a request, over vLLM's groups of blocks: how many tokens, which blocks, where decode puts them, and by what
identity both sides know the prompt.

Groups are numbered by each engine as it likes; their numbers do not leave it (``kv.reach``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xpyd_sidecar.contract import adapters
from xpyd_sidecar.engine import compat
from xpyd_sidecar.kv import identity
from xpyd_sidecar.kv.reach import CacheGroup, TableSpan, handed_tokens


class HandedBlocks:
    """Says of each request of one engine which tokens and blocks are handed over."""

    def __init__(self, groups: Mapping[int, CacheGroup], backoff: int) -> None:
        """``groups``: by vLLM's number, those that are moved. ``backoff``: tokens at the end of a prompt that are not."""
        self.by_number = groups
        self.groups = tuple(groups.values())
        self._backoff = backoff
        self.cuts = backoff > 1 or any(one.reach.over == "state" for one in self.groups)
        """Prefill stops before the tokens that decode computes: there is no way back from a state after them."""
        self.drops = self.cuts or any(one.reach.over != "all" for one in self.groups)
        """Blocks of a request that goes on after its prompt do not all stay until they are copied out."""

    def tokens(self, request: Any) -> int:
        """How many tokens of a prompt prefill hands over and decode takes; both sides say the same of one prompt."""
        tokens = handed_tokens(int(request.num_prompt_tokens), self._backoff)
        if self.cuts and (compat.reads_no_cache(request) or any(
                one.mm_position.offset + one.mm_position.length > tokens for one in request.mm_features or ())):
            return 0  # it cannot be cut there
        return tokens

    def shorten(self, request: Any, tokens: int) -> None:
        """Prefill has taken a request whose first ``tokens`` tokens it hands over: it need not go further than it must."""
        if self.drops:
            compat.answer_once(request)
        if self.cuts:
            compat.cut_prompt(request, tokens)

    def moved_tables(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The tables among vLLM's block tables whose groups are handed over, in the order of ``groups``."""
        return [tables[at] for at in self.by_number]

    def wanted_blocks(self, tokens: int, computed: int) -> list[range]:
        """By group, indices of the blocks of ``tokens`` tokens that are loaded, where ``computed`` tokens are here
        already.
        """
        return [one.reach.wanted_blocks(tokens, computed) for one in self.groups]

    def count_wanted(self, tokens: int, computed: int) -> int:
        """Number of the blocks that ``wanted_blocks`` names, of all groups."""
        return sum(map(len, self.wanted_blocks(tokens, computed)))

    def destinations(self, tables: Sequence[Sequence[int]], tokens: int, computed: int) -> tuple[TableSpan, ...] | None:
        """By group, the block ids that a load fills; None: ``tables`` does not have a block for each."""
        spans = []
        for table, group, wanted in zip(self.moved_tables(tables), self.groups, self.wanted_blocks(tokens, computed),
                                        strict=True):
            ids = group.ids(table, wanted, tokens)
            if ids is None:
                return None
            spans.append(TableSpan(wanted.start, ids))
        return tuple(spans)


def prompt_identity(request: Any) -> bytes:
    """What both sides know its prompt by.

    Raises:
        ValueError: it has no token ids.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("prompts given as embeddings have no token ids to be paired by")
    media = [identity.MediaItem(str(one.identifier), int(one.mm_position.offset), int(one.mm_position.length))
             for one in request.mm_features or ()]
    lora = request.lora_request
    adapter = None if lora is None else (lora.lora_name, adapters.digest_in(lora.lora_path) or lora.lora_path)
    return identity.identity(request.prompt_token_ids, media, adapter, request.cache_salt)
