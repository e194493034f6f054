"""Groups of layers: all layers once, few, the last one small, and none too small to be worth its launches."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.engine.worker.layer_groups import GROUPS_MOST, last_layers


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80), st.integers(1, 5000))
def test_every_layer_is_in_one_group_and_there_are_few(sizes: list[int], least: int) -> None:
    ends = last_layers(sizes, least)
    assert ends[-1] == len(sizes) - 1
    assert all(one < other for one, other in pairwise(ends))
    assert len(ends) <= GROUPS_MOST
    assert len(ends) == 1 or sum(sizes) >= len(ends) * least


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80), st.integers(1, 5000))
def test_each_group_but_the_first_has_twice_what_the_next_one_has_and_the_last_one_no_layer_too_many(sizes: list[int],
                                                                                                     least: int) -> None:
    ends = last_layers(sizes, least)
    groups = [sizes[before + 1:end + 1] for before, end in pairwise([-1, *ends])]
    for before, group in pairwise(reversed(groups[1:])):
        assert sum(group) >= 2 * sum(before)
    if len(groups) > 1:
        assert sum(groups[-1]) >= least
        assert sum(groups[-1][1:]) < least
        assert sum(groups[0]) >= least


@pytest.mark.parametrize(("tokens", "groups"), [(256, [36]), (1024, [20, 16]), (4096, [8, 16, 8, 4]),
                                                (8192, [6, 16, 8, 4, 2]), (16384, [5, 16, 8, 4, 2, 1])])
def test_an_8b_model_in_groups_of_64_mib(tokens: int, groups: list[int]) -> None:
    ends = last_layers([4096 * tokens] * 36, 64 << 20)
    assert [end - before for before, end in pairwise([-1, *ends])] == groups


@pytest.mark.parametrize(("sizes", "least"), [([], 1), ([1], 0)])
def test_nothing_is_no_group(sizes: list[int], least: int) -> None:
    with pytest.raises(ValueError, match="layers in groups"):
        last_layers(sizes, least)
