"""How many tokens of a prompt are handed over, where a request may be cut before its end and where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xpyd_sidecar.engine.scheduler.handed_blocks import HandedBlocks
from xpyd_sidecar.kv.reach import CacheGroup, Reach

ATTENTION = CacheGroup(Reach("all", 16), 16)
STATE = CacheGroup(Reach("state", 16), 16)
CUT = {0: ATTENTION, 1: STATE}


def request(prompt: int = 101, *items: tuple[int, int], reads: bool = True) -> Any:
    """``items``: first position and length of images."""
    features = [SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length)) for offset, length in items]
    return SimpleNamespace(num_prompt_tokens=prompt, mm_features=features,
                           get_skip_reading_prefix_cache=lambda: not reads)


@pytest.mark.parametrize(("items", "tokens"), [
    ((), 100), (((0, 100),), 100), (((0, 101),), 0), (((90, 10),), 100), (((90, 11),), 0), (((10, 20), (99, 2)), 0)],
    ids=["text", "up to the cut", "over it", "late, up to it", "late, over it", "the last one over it"])
def test_an_image_that_the_cut_would_go_through_is_computed_where_the_answer_is(
        items: tuple[tuple[int, int], ...], tokens: int) -> None:
    assert HandedBlocks(CUT, 1).tokens(request(101, *items)) == tokens


def test_where_nothing_is_cut_images_do_not_count() -> None:
    assert HandedBlocks({0: ATTENTION}, 1).tokens(request(101, (90, 11))) == 100


def test_a_request_that_computes_all_of_its_prompt_is_handed_nothing_where_it_would_be_cut() -> None:
    assert HandedBlocks(CUT, 1).tokens(request(reads=False)) == 0
    assert HandedBlocks({0: ATTENTION}, 1).tokens(request(reads=False)) == 100
