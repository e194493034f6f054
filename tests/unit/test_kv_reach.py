"""Which blocks move, by laws that hold for every prompt, window, block size and way to cut a prefill into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.reach import ArraySpan, CacheGroup, Reach, handed_tokens, span_of

BLOCKS = st.sampled_from([1, 2, 3, 16, 128])
LENGTHS = st.integers(1, 700)
REACHES = st.builds(lambda over, block, window, extra: Reach(over, 0 if over == "state" else block, *(
    (window, extra) if over == "window" else ())), st.sampled_from(["all", "window", "state"]), BLOCKS, st.integers(2, 300),
    st.integers(0, 4))


def reads(reach: Reach, token: int) -> range:
    """Tokens before one that its computation reads."""
    return range(max(0, token - reach.window + 1) if reach.over == "window" else 0, token)


def kept(reach: Reach, computed: int, allocated: int) -> list[int]:
    """A table of vLLM's with blocks for ``allocated`` tokens, when a step begins for which ``computed`` are: 0 is null."""
    gone = max(0, computed - (reach.window - 1) - reach.extra) // reach.block_tokens if reach.over == "window" else 0
    return [0 if at < gone else at + 1 for at in range(-(-allocated // reach.block_tokens))]


@given(REACHES, LENGTHS)
def test_what_is_wanted_is_what_the_next_token_reads_and_decode_has_blocks_for_it(reach: Reach, n: int) -> None:
    wanted = reach.wanted_blocks(n)
    assert len(wanted) > 0
    if reach.over == "state":
        assert wanted == range(1)
        return
    read = {token // reach.block_tokens for token in reads(reach, n)}
    assert read <= set(wanted)
    if not reach.extra and read:
        assert set(wanted) == read
    assert CacheGroup(reach, reach.block_tokens).ids(kept(reach, n, n + 1), wanted, n) == tuple(at + 1 for at in wanted)


@given(REACHES, LENGTHS, st.data())
def test_over_any_chunks_each_wanted_block_is_final_once_in_its_step_and_there(reach: Reach, n: int, data: st.DataObject
                                                                              ) -> None:
    hit = data.draw(st.integers(0, n - 1)) // max(1, reach.block_tokens) * reach.block_tokens
    computed, sent, pushed = hit, reach.wanted_blocks(n).start, []
    while computed < n:
        before, computed = computed, min(n + 1, computed + data.draw(st.integers(1, 200)))
        upto = reach.final_blocks(computed, n)
        indices = range(sent, max(sent, upto))
        if reach.over != "state":
            table = kept(reach, before, computed)
            assert CacheGroup(reach, reach.block_tokens).ids(table, indices, n) == tuple(at + 1 for at in indices)
            assert all((at + 1) * reach.block_tokens <= computed or computed >= n for at in indices)
        pushed += indices
        sent = indices.stop
    assert pushed == list(reach.wanted_blocks(n))


@given(REACHES, LENGTHS, st.data())
def test_what_decode_has_is_not_wanted_again_but_a_state_always_is(reach: Reach, n: int, data: st.DataObject) -> None:
    have = data.draw(st.integers(0, (n - 1) // max(1, reach.block_tokens))) * reach.block_tokens
    wanted = reach.wanted_blocks(n, have)
    if reach.over == "state":
        assert wanted == range(1)
    else:
        assert list(wanted) == [at for at in reach.wanted_blocks(n) if at >= have // reach.block_tokens]
        assert len(wanted) > 0


@given(st.integers(2, 400), BLOCKS, LENGTHS)
def test_a_window_layer_moves_its_window_and_no_more_whatever_the_prompt(window: int, block: int, n: int) -> None:
    most = -(-(window - 1) // block) + 1
    assert len(Reach("window", block, window).wanted_blocks(n)) <= most


def test_a_window_of_one_block_moves_two_blocks_of_a_long_prompt() -> None:
    assert Reach("window", 128, 128).wanted_blocks(1499) == range(10, 12)


@pytest.mark.parametrize(("window", "block"), [(200, 128), (128, 128), (6, 4)])
def test_at_the_edge_where_asking_for_the_whole_prompt_misses_a_block(window: int, block: int) -> None:
    """``(N - W + 1) % b == 0``: laid out for token N, decode lacks the first block that token N - 1 reads."""
    for prompt in range(window + block, window + 6 * block):
        reach = Reach("window", block, window)
        lacks = kept(reach, prompt, prompt)[reads(reach, prompt - 1).start // block] == 0
        assert lacks == ((prompt - window + 1) % block == 0)
        assert 0 not in [kept(reach, prompt - 1, prompt)[at] for at in reach.wanted_blocks(prompt - 1)]


def test_the_tail_is_final_only_with_the_last_chunk() -> None:
    reach = Reach("all", 128)
    assert [reach.final_blocks(computed, 300) for computed in (0, 127, 128, 200, 299, 300)] == [0, 0, 1, 1, 2, 3]
    assert [reach.final_blocks(computed, 256) for computed in (255, 256)] == [1, 2]
    assert [Reach("state", 0).final_blocks(computed, 256) for computed in (128, 255, 256)] == [0, 0, 1]


def test_a_state_is_where_its_engine_keeps_it() -> None:
    state = Reach("state", 0)
    assert CacheGroup(state, 128).ids([0, 0, 9, 5], state.wanted_blocks(256), 256) is None
    assert CacheGroup(state, 128).ids([0, 7, 9, 5], state.wanted_blocks(256), 256) == (7,)
    assert CacheGroup(state, 2048).ids([3, 8, 9], state.wanted_blocks(256), 256) == (3,)  # scratch blocks follow


def test_a_block_that_is_not_there_is_said() -> None:
    group = CacheGroup(Reach("all", 16), 16)
    assert group.ids([4, 0, 6], range(3), 40) is None
    assert group.ids([4, 5], range(3), 40) is None
    assert group.ids([4, 5, 6], range(1, 1), 40) == ()


def test_a_prompt_of_one_token_has_nothing_to_hand_over() -> None:
    assert [handed_tokens(tokens, 1) for tokens in (1, 2, 300)] == [0, 1, 299]
    assert handed_tokens(3, 4) == 0


def test_the_span_of_an_array() -> None:
    spans = (ArraySpan(2, 3, 10, 2), ArraySpan(7, 1, 0, 1))
    assert [span_of(spans, region, (0, 12)) for region in (1, 2, 4, 5, 7)] == [(0, 12), (10, 2), (10, 2), (0, 12), (0, 1)]
