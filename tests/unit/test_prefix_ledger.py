"""Which prefixes an engine says to hold: laws over a cache that is played."""

from __future__ import annotations

from random import Random

import pytest

from xpyd_sidecar.contract.prefix_cuts import WHOLE, PromptCut
from xpyd_sidecar.engine.scheduler.prefix_ledger import PrefixLedger, can_compare
from xpyd_sidecar.kv.reach import CacheGroup, Reach

BLOCK = 16
ALL = {0: CacheGroup(Reach("all", BLOCK), BLOCK)}
WINDOW = ALL | {3: CacheGroup(Reach("window", BLOCK, 40), BLOCK)}


def block_key(block: bytes, group: int) -> bytes:
    return b"%b/%d" % (block, group)


def hashes(name: str, count: int) -> list[bytes]:
    return [b"%b%d" % (name.encode(), at) for at in range(count)]


class PlayedCache:
    """Keys of an engine's cached blocks, over groups."""

    def __init__(self, *groups: int) -> None:
        self.groups = groups or (0,)
        self.blocks: dict[bytes, None] = {}

    def fill(self, those: list[bytes]) -> None:
        self.blocks.update((block_key(one, group), None) for one in those for group in self.groups)

    def evict(self, those: list[bytes], *groups: int) -> None:
        for one in those:
            for group in groups or self.groups:
                self.blocks.pop(block_key(one, group), None)


def cut(tokens: int, whole: int, key: int) -> PromptCut:
    """At so many tokens, and a margin, of a prompt of ``whole``."""
    return PromptCut(min(WHOLE, -int(-tokens / 0.979 * WHOLE // whole)), key)


def test_a_prefix_is_held_from_its_block_on_until_that_goes() -> None:
    ledger, cache = PrefixLedger(ALL, BLOCK, block_key), PlayedCache()
    prompt = hashes("a", 10)
    ledger.add("r", [cut(32, 160, 1), cut(96, 160, 2)], 160, prompt)
    assert ledger.compare(cache.blocks.keys()) == (frozenset(), frozenset()), "it waits"
    cache.fill(prompt[:2])
    assert ledger.compare(cache.blocks.keys()) == ({1}, frozenset())
    cache.fill(prompt)
    assert ledger.compare(cache.blocks.keys()) == ({1, 2}, frozenset())
    cache.evict(prompt[5:])
    assert ledger.compare(cache.blocks.keys()) == ({1}, {2})
    cache.fill(prompt)
    assert ledger.compare(cache.blocks.keys()) == ({1, 2}, frozenset()), "it is there again"


def test_what_never_came_is_absent_once_its_request_has_ended() -> None:
    ledger, cache = PrefixLedger(ALL, BLOCK, block_key), PlayedCache()
    ledger.add("r", [cut(32, 160, 1)], 160, hashes("a", 10))
    assert ledger.compare(cache.blocks.keys()).absent == frozenset()
    ledger.end("r")
    assert ledger.compare(cache.blocks.keys()).absent == {1}
    ledger.add("s", [cut(32, 160, 1)], 160, hashes("a", 10))
    assert ledger.compare(cache.blocks.keys()).absent == frozenset(), "it may come now"
    ledger.end("nobody")


def test_what_is_in_the_cache_already_is_held_at_once() -> None:
    ledger, cache = PrefixLedger(ALL, BLOCK, block_key), PlayedCache()
    prompt = hashes("a", 10)
    cache.fill(prompt)
    ledger.add("r", [cut(32, 160, 1)], 160, prompt)
    assert ledger.compare(cache.blocks.keys()).held == {1}
    ledger.add("s", [cut(32, 160, 2)], 160, prompt)
    assert ledger.compare(cache.blocks.keys()).held == {1, 2}, "another name for the same block"


def test_a_window_must_be_there_from_its_beginning() -> None:
    ledger, cache = PrefixLedger(WINDOW, BLOCK, block_key), PlayedCache(0, 3)
    prompt = hashes("a", 10)
    cache.fill(prompt)
    ledger.add("r", [cut(96, 160, 1)], 160, prompt)
    assert ledger.compare(cache.blocks.keys()).held == {1}
    cache.evict(prompt[:3], 3)
    assert ledger.compare(cache.blocks.keys()).held == {1}, "blocks before the window are not needed"
    cache.evict(prompt[3:4], 3)
    assert ledger.compare(cache.blocks.keys()).absent == {1}


def test_models_with_states_and_blocks_of_other_sizes_are_not_judged() -> None:
    assert can_compare(WINDOW.values(), BLOCK)
    assert not can_compare(ALL.values(), 2 * BLOCK)
    assert not can_compare([*ALL.values(), CacheGroup(Reach("state", 0), BLOCK)], BLOCK)


@pytest.mark.parametrize("seed", range(20))
def test_after_any_events_it_says_what_is_there_and_stays_small(seed: int) -> None:
    random, most = Random(seed), 40
    ledger, cache = PrefixLedger(ALL, BLOCK, block_key, most), PlayedCache()
    prompts = {str(at): hashes(str(at), random.randint(1, 12)) for at in range(12)}
    needs: dict[int, bytes] = {}
    running: list[str] = []
    for turn in range(400):
        match random.randrange(4):
            case 0:
                name, prompt = random.choice([*prompts.items()])
                tokens = len(prompt) * BLOCK + random.randrange(BLOCK)
                shares = sorted(random.sample(range(1, WHOLE + 1), 4))
                cuts = [PromptCut(share, hash((name, share, tokens)) & (2**64 - 1)) for share in shares]
                for share, key in cuts:
                    if (full := min(int(tokens * share * 0.98) // (WHOLE * BLOCK), len(prompt))) > 0:
                        needs[key] = prompt[full - 1]
                ledger.add(f"r{turn}", cuts, tokens, prompt)
                running.append(f"r{turn}")
            case 1 if running:
                ledger.end(running.pop(random.randrange(len(running))))
            case 2:
                cache.fill(random.choice([*prompts.values()]))
            case 3:
                prompt = random.choice([*prompts.values()])
                cache.evict(prompt[random.randrange(len(prompt)):])
        held, absent = ledger.compare(cache.blocks.keys())
        assert len(ledger) <= most
        assert not held & absent
        assert len(held | absent) <= most
        there = {key for key, block in needs.items() if block_key(block, 0) in cache.blocks}
        assert held <= there
        assert not absent & there
    for name in running:
        ledger.end(name)
    held, absent = ledger.compare(cache.blocks.keys())
    assert len(held | absent) == len(ledger), "of what has ended it says all"
    assert ledger._blocks.keys() >= ledger._there
    assert not ledger._waiting
