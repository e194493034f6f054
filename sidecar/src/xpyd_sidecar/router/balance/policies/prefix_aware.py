"""prefix_aware: where the beginning of the prompt probably is, unless that is too loaded."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from xpyd_sidecar.router.api.prompt import BLOCK_BYTES
from xpyd_sidecar.router.balance.load import Mean, score
from xpyd_sidecar.router.balance.policies import Query, register
from xpyd_sidecar.router.balance.rendezvous import Rendezvous

ALWAYS = 2
"""So many requests are never too many, whatever the mean."""
MATCHED = 0.1
"""Share of the prompt that must be held to count: for less, the hash's balance is worth more than what is saved."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its options."""

    blocks: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Blocks of ``prompt.BLOCK_BYTES`` that are hashed, beyond what all prompts have in common."""
    bound: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.25
    """Most load of an instance, relative to the mean."""


@register("prefix_aware", Options)
class PrefixAware:
    """The trie where it knows something, else the hash.

    1. Those that this router sent the longest prefix of this prompt to (``holdings``), if it is a tenth of it or
       more; the less loaded of equal ones first.
    2. Rendezvous hash of the first blocks, so that several routers send a prefix that each sees for the first time to the
       same instance.

    In both, an instance counts only while its load stays within ``bound`` times the mean: consistent hashing with bounded
    loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The next in order takes what is beyond, so a prefix that everybody
    asks for spreads over as many instances as it needs.
    """

    holds = True

    def __init__(self, _: int, options: Options) -> None:
        self._bytes = options.blocks * BLOCK_BYTES
        self._bound = options.bound
        self._rendezvous = Rendezvous()
        self._mean = Mean()

    def choose(self, query: Query) -> int:
        """Index of the chosen one."""
        candidates, role = query.candidates, query.role
        if len(candidates) == 1:
            return 0
        most = max(ALWAYS, math.ceil(self._bound * self._mean.of(role, candidates)))
        common = 0
        if query.holdings is not None:
            found, common = query.holdings.holders(candidates, query.prefix)
            if len(found) > 1:
                found.sort(key=lambda one: (-one[0], score(candidates[one[1]])))
            enough = MATCHED * len(query.prefix)
            for held, index in found:
                if held >= enough and score(candidates[index]) < most:
                    return index
        key = query.prefix.first_key(common + self._bytes)
        best = -1
        for index in self._rendezvous.order(role, candidates, key):
            if score(candidates[index]) < most:
                return index
            if best < 0:
                best = index
        return best
