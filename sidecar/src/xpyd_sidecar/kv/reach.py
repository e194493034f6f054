"""Which blocks of a prompt's KV move, array by array: how far back an array reaches, and what follows from it.

Prefill hands over the first ``n`` tokens of a prompt of N, and decode computes the rest itself, at least the last token,
since it has to make the first output from it anyway (``handed_tokens``). Decode then goes on with token n, so what is
wanted is what token n reads. An array reaches over

    all      every token before it           full attention, latent attention
    window   the W - 1 tokens before it      sliding windows
    state    no token: one state after n     Mamba2, gated delta net

    blocks of b = 4 tokens, n = 18, W = 6    |----0----|----1----|----2----|----3----|--4-|.
      all                                      wanted    wanted    wanted    wanted    tail
      window, reads tokens 13 .. 17              -         -         -       wanted    tail
      state                                                                            one block, index 0

Asking for all N would be wrong for windows too: the engine lays its windows out for the token after the last one that was
loaded, and computes the last one again, which sees one more token to the left. Where ``(N - W + 1) % b == 0`` the block of
that token is not there any more, and nothing says so (docs/decisions/0040).

Blocks are addressed by their index in the prompt. Which vLLM group an array is in, which block of the cache has an index,
and into how long pieces an engine cuts its states, is that engine's own business (``CacheGroup``).

Laws (``tests/unit/test_kv_reach.py``, and against vLLM's own block managers ``tests/component/test_connector_groups.py``)
1. What is wanted is what token n reads, and decode has a block of its own for all of it.
2. ``final_blocks`` only grows; over any chunks of a prefill each wanted block becomes final once, in the step that
   computes the last token in it, and is in prefill's table in that step. A state is final at n alone.
3. What decode has already in its cache of prefixes is not wanted again; a state always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from xpyd_sidecar.kv.blocks import blocks_of

NULL: Final = 0
"""vLLM's block that stands for one that is not there."""


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """How far back one array of blocks reaches."""

    over: Literal["all", "window", "state"]
    block_tokens: int
    """Of one block; 0 for a state."""
    window: int = 0
    """Tokens that a token sees, itself included; at least 2."""
    extra: int = 0
    """Tokens before the window that are kept besides."""

    def wanted_blocks(self, n: int, have: int = 0) -> range:
        """Indices of the blocks that hold what is read after ``n`` tokens; decode has those of its first ``have``."""
        if self.over == "state":
            return range(1)
        first = max(0, n - self.window + 1 - self.extra) // self.block_tokens if self.over == "window" else 0
        return range(max(first, have // self.block_tokens), blocks_of(n, self.block_tokens))

    def final_blocks(self, computed: int, n: int) -> int:
        """Number of blocks that are final once ``computed`` of ``n`` tokens are; the last one, with its tail, at ``n``."""
        if self.over == "state":
            return int(computed >= n)
        return blocks_of(n, self.block_tokens) if computed >= n else computed // self.block_tokens


EVERYTHING: Final = Reach("all", 1)


class CacheGroup(NamedTuple):
    """One of an engine's groups of layers that share a table of blocks."""

    reach: Reach
    tokens: int
    """By which its table counts: of a block, or, for states, of the piece after which a state is kept."""

    def ids(self, table: Sequence[int], indices: range, n: int) -> tuple[int, ...] | None:
        """Block ids of these indices of ``table``, for ``n`` tokens; None where one of them is not there."""
        at = (n - 1) // self.tokens if self.reach.over == "state" else indices.start
        found = tuple(table[at:at + len(indices)])
        return found if len(found) == len(indices) and NULL not in found else None


class LayerGroup(NamedTuple):
    """Which of its engine's groups a layer is in, and what its blocks are."""

    group: int
    reach: Reach = EVERYTHING
    state: str = ""
    """What its state holds, if it keeps one: kind, types, layout, shapes."""


class TableSpan(NamedTuple):
    """Blocks ``ids`` of the cache hold indices ``first``.. of one group."""

    first: int
    ids: tuple[int, ...]


class ArraySpan(msgspec.Struct, frozen=True, array_like=True):
    """Blocks ``first`` to ``first + count - 1`` of ``arrays`` arrays, from array ``region`` on."""

    region: int
    arrays: int
    first: int
    count: int


def handed_tokens(prompt: int, backoff: int) -> int:
    """Number of tokens of a prompt of ``prompt`` tokens that prefill hands over.

    0: it has nothing to do with this prompt. ``backoff``: tokens at its end that decode computes.
    """
    return max(0, prompt - backoff)


def span_of(spans: Sequence[ArraySpan], region: int, others: tuple[int, int]) -> tuple[int, int]:
    """(first block, count) for an array: those of the span that contains ``region``, else ``others``."""
    for one in spans:
        if one.region <= region < one.region + one.arrays:
            return one.first, one.count
    return others
