"""Room for loads: half of the cache, first come first served, nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.kv.load_admission import LoadAdmission


def test_loads_hold_half_of_the_blocks_and_the_next_one_waits_until_one_is_over() -> None:
    room = LoadAdmission(100)
    assert room.may_begin("a", 30)
    room.on_load_begun("a", 30)
    assert room.may_begin("b", 20)
    room.on_load_begun("b", 20)
    assert (room.held_blocks, room.may_begin("c", 1), room.waiting_requests) == (50, False, 1)
    room.on_load_over("b")
    assert room.may_begin("c", 20)
    room.on_load_begun("c", 20)
    assert (room.held_blocks, room.waiting_requests) == (50, 0)


def test_a_load_larger_than_half_begins_when_no_other_one_is_there() -> None:
    room = LoadAdmission(100)
    room.on_load_begun("a", 1)
    assert not room.may_begin("big", 90)
    room.on_load_over("a")
    assert room.may_begin("big", 90)
    room.on_load_begun("big", 90)
    assert not room.may_begin("b", 1)


def test_who_waits_first_is_not_overtaken_by_loads_that_it_would_have_to_wait_for() -> None:
    room = LoadAdmission(100)
    room.on_load_begun("a", 20)
    assert not room.may_begin("first", 40)
    assert not room.may_begin("small", 15), "what is left is kept for the first"
    room.on_load_over("a")
    assert room.may_begin("small", 10), "there is room for both"
    room.on_load_begun("small", 10)
    assert room.may_begin("first", 40)


def test_who_is_not_asked_for_any_more_is_not_waited_for() -> None:
    room = LoadAdmission(100)
    room.on_load_begun("a", 20)
    assert not room.may_begin("first", 40)
    room.on_step()
    assert not room.may_begin("small", 15)
    room.on_step()
    assert room.may_begin("small", 15), "first was asked for in neither of the last two steps"
    room.on_load_begun("small", 15)
    assert not room.may_begin("first", 40), "it is still the first when it comes back"
    assert not room.may_begin("third", 1)
    room.on_request_left("first")
    assert room.may_begin("third", 1)


def test_what_a_request_holds_it_holds_until_its_load_is_over_and_gives_back_once() -> None:
    room = LoadAdmission(100)
    room.on_load_begun("a", 50)
    room.on_request_left("a")
    assert (room.held_blocks, room.may_begin("b", 1)) == (50, False)
    room.on_load_over("a")
    room.on_load_over("a")
    assert room.held_blocks == 0
    assert room.may_begin("b", 1)


def test_without_a_count_of_blocks_nothing_waits() -> None:
    room = LoadAdmission(0)
    room.on_load_begun("a", 10**9)
    assert room.may_begin("b", 10**9)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 60), st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=20))
def test_every_load_gets_its_turn_and_the_bound_holds(blocks: int, loads: list[tuple[int, int]]) -> None:
    """As vLLM asks: every step, in the order of the queue. Loads last for some steps. Laws 1 to 3."""
    room = LoadAdmission(blocks)
    queue = {f"r{n}": size for n, (size, _) in enumerate(loads)}
    lasts = {f"r{n}": steps for n, (_, steps) in enumerate(loads)}
    running: dict[str, int] = {}
    for step in range(10 * len(loads)):
        for name in [name for name, end in running.items() if end <= step]:
            del running[name]
            room.on_load_over(name)
        for name, size in list(queue.items()):
            if room.may_begin(name, size):
                room.on_load_begun(name, size)
                running[name] = step + lasts[name]
                del queue[name]
        room.on_step()
        assert room.held_blocks <= max(blocks // 2, 1) or len(running) == 1
        if not queue and not running:
            assert (room.held_blocks, room.waiting_requests) == (0, 0)
            return
    raise AssertionError(f"{queue} never began")
