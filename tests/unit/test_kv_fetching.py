"""Fetching, rule by rule: what is fetched when, what is free when, and what prefill hears."""

from __future__ import annotations

import numpy as np
import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv import fetching
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, BufferPlace
from xpyd_sidecar.kv.fetch_steps import (
    BlocksArrived,
    Fetch,
    FetchPlan,
    LeftBuffer,
    Place,
    SayFrame,
    Step,
    TryError,
    WrongSum,
)
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Ask, Busy, Manifest, ManifestTaken, Sums
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.ring import Ring

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
ID = KEY, 0
OTHER = Key(TransferId("b" * 32), Attempt(1), 1)
ARRAYS = (ArrayLayout(2, 512, 1), ArrayLayout(2, 512, 1))
PLAN = FetchPlan(ARRAYS, {0: ArrayPart(0, 0, 2, 0), 1: ArrayPart(1, 0, 2, 0)}, 1, b"prompt", 8)
AHEAD = PLAN._replace(ahead=True)
NONE = FetchPlan(ARRAYS, {}, 2)
BLOCKS = (TableSpan(0, (7, 8, 9, 10)),)
WHOLE = Manifest(0, 0, 2, 0, 4, 0)
"""8 KiB: two arrays of four blocks of 1 KiB."""
RIGHT = np.arange(16, dtype=np.uint64)
SUMS = Sums(0, RIGHT.tobytes())


def direct(*, cover: bool = True, piece: int = 1 << 20, window: int = 1 << 20, buffer: int = 0) -> Fetching:
    return Fetching(Ring(0), Buffer(Buddy(buffer), Buddy(0), ttl_s=10), piece=piece, window=window, cover=cover)


def ringed(size: int = 64 << 10, *, cover: bool = True, buffer: int = 0, entries: int = 4096) -> Fetching:
    return Fetching(Ring(size), Buffer(Buddy(buffer), Buddy(0), ttl_s=10, most=entries), piece=1 << 20, window=1 << 20,
                    cover=cover)


def fetches(steps: list[Step]) -> list[Fetch]:
    return [step for step in steps if isinstance(step, Fetch)]


def begun(machine: Fetching, key: Key = KEY, link: int = 1, tables: tuple[TableSpan, ...] | None = BLOCKS,
          plan: FetchPlan = PLAN) -> None:
    assert machine.begin((key, 0), link, plan, 0.0) == [SayFrame(link, key, Ask(1))]
    if tables is not None:
        assert machine.allot((key, 0), tables) == []


ALL = BlocksArrived(KEY, 0, ((0, 0, 4), (1, 0, 4)), 8192)


def test_a_manifest_is_fetched_into_its_blocks_and_taken_with_its_sums() -> None:
    machine = direct()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    assert (fetch.link, fetch.key, fetch.manifest, fetch.at) == (1, KEY, 0, None)
    assert machine.on_fetched(fetch.number, RIGHT) == [], "what its sums are is not known"
    assert machine.on_sums(1, ID, SUMS) == [SayFrame(1, KEY, ManifestTaken(0)), ALL]
    assert [*machine.flights()] == []


def test_what_goes_through_the_ring_is_taken_when_it_is_there_and_arrives_when_it_is_placed() -> None:
    machine = ringed()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    assert fetch.at is not None
    machine.on_sums(1, ID, SUMS)
    assert machine.on_fetched(fetch.number) == [Place(fetch.number, KEY, 0, fetch.batch, fetch.at),
                                                SayFrame(1, KEY, ManifestTaken(0))]
    assert machine.ring.used_bytes == 8192
    assert machine.on_placed(fetch.number, RIGHT) == [ALL]
    assert machine.ring.used_bytes == 0


def test_without_sums_nothing_waits_for_them() -> None:
    machine = direct(cover=False)
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    assert machine.on_fetched(fetch.number) == [SayFrame(1, KEY, ManifestTaken(0)), ALL]


@pytest.mark.parametrize("first", ["sums", "bytes"])
def test_a_wrong_sum_is_told_and_nothing_arrives(first: str) -> None:
    machine = direct()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    wrong = RIGHT.copy()
    wrong[3] += np.uint64(1)
    steps = machine.on_sums(1, ID, SUMS) if first == "sums" else machine.on_fetched(fetch.number, wrong)
    steps += machine.on_fetched(fetch.number, wrong) if first == "sums" else machine.on_sums(1, ID, SUMS)
    assert WrongSum(1, KEY) in steps
    assert not [step for step in steps if isinstance(step, BlocksArrived)]


def test_nothing_is_fetched_before_there_are_blocks() -> None:
    machine = ringed()
    begun(machine, tables=None)
    assert machine.on_manifest(1, ID, WHOLE) == []
    assert machine.on_press(1, ID, 0, 0.1) == [SayFrame(1, KEY, Busy(0, 0.1))]
    assert len(fetches(machine.allot(ID, BLOCKS))) == 1
    assert machine.allot(ID, BLOCKS) == []
    assert machine.on_press(1, ID, 0, 0.1) == [], "it is on its way"


@pytest.mark.parametrize("tables", [(TableSpan(4, (1, 2)),), (TableSpan(0, ()),)])
def test_what_is_not_wanted_is_taken_at_once(tables: tuple[TableSpan, ...]) -> None:
    machine = direct()
    begun(machine, tables=tables)
    assert machine.on_manifest(1, ID, WHOLE) == [SayFrame(1, KEY, ManifestTaken(0))]


def test_what_turns_out_not_to_be_wanted_when_there_are_blocks_is_taken_then() -> None:
    machine = direct()
    begun(machine, tables=None)
    machine.on_manifest(1, ID, WHOLE)
    assert machine.allot(ID, (TableSpan(4, (1,)),)) == [SayFrame(1, KEY, ManifestTaken(0))]


def test_one_that_wants_nothing_says_so_once() -> None:
    machine = direct()
    assert machine.begin(ID, 1, NONE, 0.0) == [SayFrame(1, KEY, Ask(2, nothing=True))]
    assert machine.on_manifest(1, ID, WHOLE) == [SayFrame(1, KEY, ManifestTaken(0))]


def test_only_the_blocks_that_lack_are_fetched() -> None:
    machine = direct()
    begun(machine, tables=(TableSpan(2, (7, 8)),))
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    assert [(piece.packed.first, piece.packed.blocks) for piece in fetch.batch] == [(2, 2), (2, 2)]
    machine.on_sums(1, ID, SUMS)
    arrived = machine.on_fetched(fetch.number, np.array([4, 5, 6, 7, 12, 13, 14, 15], np.uint64))[-1]
    assert arrived == BlocksArrived(KEY, 0, ((0, 2, 2), (1, 2, 2)), 4096)


def test_what_is_told_of_a_try_that_is_over_is_not_wanted() -> None:
    machine = direct()
    begun(machine)
    machine.cancel(ID)
    assert machine.on_manifest(1, ID, WHOLE) == [SayFrame(1, KEY, ManifestTaken(0))]
    assert machine.on_sums(1, ID, SUMS) == []
    assert not machine.busy(1)


def test_a_range_is_not_free_before_its_fetch_is_answered() -> None:
    machine = ringed()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    assert machine.cancel(ID) == []
    assert machine.ring.used_bytes == 8192
    assert machine.on_fetched(fetch.number) == []
    assert machine.ring.used_bytes == 0


def test_a_range_is_not_free_before_it_is_placed_though_its_try_is_over() -> None:
    machine = ringed()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_fetched(fetch.number)
    machine.cancel(ID)
    assert machine.ring.used_bytes == 8192
    assert machine.on_placed(fetch.number, RIGHT) == []
    assert machine.ring.used_bytes == 0


def test_sessions_have_an_eighth_of_the_ring_each_and_take_turns() -> None:
    machine = ringed(128 << 10)
    for key, link in ((KEY, 1), (OTHER, 2)):
        begun(machine, key, link)
    steps: list[Step] = []
    for key, link in ((KEY, 1), (OTHER, 2)):
        for number in range(4):
            steps += machine.on_manifest(link, (key, 0), Manifest(number, 0, 2, 0, 4, 8192 * number))
    began = fetches(steps)
    assert [fetch.link for fetch in began] == [1, 1, 2, 2], "16 KiB each"
    (after,) = fetches(machine.on_fetch_failed(began[0].number))
    assert (after.link, after.manifest) == (1, 2)


def test_what_goes_into_blocks_is_bounded_by_the_window() -> None:
    machine = direct(window=10 << 10)
    begun(machine)
    steps = [step
             for number in range(3) for step in machine.on_manifest(1, ID, Manifest(number, 0, 2, 0, 4, 8192 * number))]
    (fetch,) = fetches(steps)
    (after,) = fetches(machine.on_fetched(fetch.number, RIGHT))
    assert after.manifest == 1


def test_a_manifest_of_many_bytes_is_fetched_in_several_pieces_and_taken_once() -> None:
    machine = direct(piece=2048)
    begun(machine)
    parts = fetches(machine.on_manifest(1, ID, WHOLE))
    assert len(parts) == 4
    machine.on_sums(1, ID, SUMS)
    said = [step for nth, part in enumerate(parts)
            for step in machine.on_fetched(part.number, RIGHT[4 * nth:4 * nth + 4]) if isinstance(step, SayFrame)]
    assert said == [SayFrame(1, KEY, ManifestTaken(0))]


def test_after_a_session_the_next_one_goes_on_with_what_was_not_taken() -> None:
    machine = ringed()
    begun(machine)
    second = Manifest(1, 0, 2, 0, 4, 8192)
    (one,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_sums(1, ID, SUMS)
    machine.on_fetched(one.number)
    assert fetches(machine.on_manifest(1, ID, second)) == [], "beyond its eighth"
    (two,) = fetches(machine.on_placed(one.number, RIGHT))
    assert machine.on_session_lost(1) == [ID]
    begun(machine, link=2)
    assert machine.on_manifest(2, ID, WHOLE) == [SayFrame(2, KEY, ManifestTaken(0))], "its TAKEN was lost"
    (again,) = fetches(machine.on_manifest(2, ID, second))
    assert machine.ring.stuck_bytes == 8192
    assert machine.on_fetched(two.number) == [], "of the session before: it stands for nothing"
    assert machine.ring.stuck_bytes == 0
    machine.on_sums(2, ID, Sums(1, RIGHT.tobytes()))
    machine.on_fetched(again.number)
    assert machine.on_placed(again.number, RIGHT)[0] == ALL


@pytest.mark.parametrize("ring", [0, 64 << 10])
@pytest.mark.parametrize("placed", ["before", "later"])
def test_what_is_here_of_a_manifest_whose_session_has_ended_is_not_fetched_once_more(ring: int, placed: str) -> None:
    """It could be written after the load has ended well, and nobody would look at its sums."""
    machine = Fetching(Ring(ring), Buffer(Buddy(0), Buddy(0), ttl_s=10), piece=4096, window=1 << 20, cover=True)
    begun(machine)
    lost, here = fetches(machine.on_manifest(1, ID, WHOLE))
    right = np.split(RIGHT, 2)
    machine.on_fetched(here.number, right[1])
    if ring and placed == "before":
        machine.on_placed(here.number, right[1])
    machine.on_session_lost(1)
    machine.on_fetch_failed(lost.number)
    assert machine.begin(ID, 2, PLAN, 1.0) == [SayFrame(2, KEY, Ask(1))]
    (again,) = fetches(machine.on_manifest(2, ID, WHOLE))
    assert again.batch == lost.batch
    machine.on_fetched(again.number, right[0])
    if ring:
        machine.on_placed(again.number, right[0])
    steps = machine.on_sums(2, ID, SUMS)
    if ring and placed == "later":
        steps += machine.on_placed(here.number, right[1])
    assert SayFrame(2, KEY, ManifestTaken(0)) in steps
    assert sorted(one.blocks for one in steps if isinstance(one, BlocksArrived)) == [((0, 0, 4),), ((1, 0, 4),)]
    assert [*machine.flights()] == []


def test_a_manifest_that_is_here_whole_is_taken_in_the_next_session_with_its_sums() -> None:
    machine = direct()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_fetched(fetch.number, RIGHT)
    machine.on_session_lost(1)
    machine.begin(ID, 2, PLAN, 1.0)
    assert machine.on_manifest(2, ID, WHOLE) == []
    assert machine.on_sums(2, ID, SUMS) == [SayFrame(2, KEY, ManifestTaken(0)), ALL]


def test_what_was_placed_when_its_session_ended_still_arrives() -> None:
    machine = ringed()
    begun(machine)
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_sums(1, ID, SUMS)
    machine.on_fetched(fetch.number)
    machine.on_session_lost(1)
    assert machine.on_placed(fetch.number, RIGHT) == [ALL]


def test_a_session_says_nothing_of_a_try_that_another_one_has() -> None:
    machine = direct()
    begun(machine)
    machine.on_session_lost(1)
    begun(machine, link=2)
    assert machine.on_manifest(1, ID, WHOLE) == [SayFrame(1, KEY, ManifestTaken(0))]
    assert machine.on_sums(1, ID, SUMS) == []
    assert machine.busy(2)
    assert not machine.busy(1)


def test_manifests_are_told_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MANIFESTS_MAX", 64)
    machine = direct()
    begun(machine, tables=(TableSpan(9, (1,)),))
    machine.on_manifest(1, ID, WHOLE)
    with pytest.raises(TryError, match="twice"):
        machine.on_manifest(1, ID, WHOLE)
    for number in range(1, 64):
        machine.on_manifest(1, ID, Manifest(number, 0, 1, 0, 1, 0))
    with pytest.raises(TryError, match="more than"):
        machine.on_manifest(1, ID, Manifest(64, 0, 1, 0, 1, 0))


@pytest.mark.parametrize("sums", [Sums(1, RIGHT.tobytes()), Sums(0, RIGHT.tobytes()[8:]), Sums(0, b"")])
def test_sums_that_there_cannot_be_are_refused(sums: Sums) -> None:
    machine = direct()
    begun(machine)
    machine.on_manifest(1, ID, WHOLE)
    with pytest.raises(TryError, match="sums of manifest"):
        machine.on_sums(1, ID, sums)


def test_a_manifest_of_what_there_is_not_is_refused() -> None:
    machine = direct()
    begun(machine)
    with pytest.raises(TryError, match="arrays"):
        machine.on_manifest(1, ID, Manifest(0, 1, 2, 0, 4, 0))


# --- before there are blocks ---


@pytest.mark.parametrize("why", ["ahead", "pressed"])
def test_what_is_fetched_ahead_is_taken_from_the_buffer_when_there_are_blocks(why: str) -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD if why == "ahead" else PLAN)
    steps = machine.on_manifest(1, ID, WHOLE)
    if why == "pressed":
        assert steps == []
        steps = machine.on_press(1, ID, 0, 0.1)
    one, other = fetches(steps)
    assert isinstance(one.at, BufferPlace)
    assert machine.ring.used_bytes == 0
    machine.on_sums(1, ID, SUMS)
    assert machine.on_fetched(one.number) == []
    assert machine.on_fetched(other.number) == [SayFrame(1, KEY, ManifestTaken(0))]
    places = [step for step in machine.allot(ID, BLOCKS) if isinstance(step, Place)]
    assert [step.batch for step in places] == [one.batch, other.batch]
    assert machine.on_placed(places[0].number, RIGHT[:8]) == [BlocksArrived(KEY, 0, ((0, 0, 4),), 4096)]
    assert machine.on_placed(places[1].number, RIGHT[8:]) == [BlocksArrived(KEY, 0, ((1, 0, 4),), 4096)]
    assert machine.buffer.bytes_in_use == (0, 0)


def test_a_full_buffer_is_busy_and_not_asked_where_prefill_has_room() -> None:
    machine = ringed(buffer=4096)
    begun(machine, tables=None, plan=AHEAD)
    assert machine.on_manifest(1, ID, WHOLE) == []
    assert machine.on_press(1, ID, 0, 0.1) == [SayFrame(1, KEY, Busy(0, 0.1))]
    assert machine.buffer.bytes_in_use == (0, 0)


def test_what_was_pressed_and_leaves_the_buffer_before_it_has_come_is_busy() -> None:
    """Prefill would take it for pressed for ever."""
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None)
    assert machine.on_manifest(1, ID, WHOLE) == []
    one, other = fetches(machine.on_press(1, ID, 0, 0.1))
    assert machine.reset() == [SayFrame(1, KEY, Busy(0, 0.1))]
    for fetch in (one, other):
        assert machine.on_fetched(fetch.number) == []
    assert machine.buffer.bytes_in_use == (0, 0)


def test_blocks_that_come_while_something_is_fetched_ahead_get_it() -> None:
    machine = direct(buffer=64 << 10, window=5000)
    begun(machine, tables=None, plan=AHEAD)
    (one,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_sums(1, ID, SUMS)
    assert machine.allot(ID, BLOCKS) == []
    place, after = machine.on_fetched(one.number)
    assert place == Place(one.number, KEY, 0, one.batch, one.at)  # type: ignore[arg-type]
    assert isinstance(after, Fetch)
    assert after.at is None, "right into its blocks"
    assert machine.on_placed(one.number, RIGHT[:8]) == [BlocksArrived(KEY, 0, ((0, 0, 4),), 4096)]
    assert machine.on_fetched(after.number, RIGHT[8:]) == [SayFrame(1, KEY, ManifestTaken(0)),
                                                           BlocksArrived(KEY, 0, ((1, 0, 4),), 4096)]
    assert machine.buffer.bytes_in_use == (0, 0)


def test_a_new_session_goes_on_with_what_is_in_the_buffer() -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD)
    one, other = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_fetched(one.number)
    machine.on_session_lost(1)
    begun(machine, link=2, tables=None, plan=AHEAD)
    (again,) = fetches(machine.on_manifest(2, ID, WHOLE))
    assert again.batch == other.batch
    assert machine.on_fetched(other.number) == []
    machine.on_sums(2, ID, SUMS)
    assert machine.on_fetched(again.number) == [SayFrame(2, KEY, ManifestTaken(0))]
    assert len(machine.allot(ID, BLOCKS)) == 2


def test_a_whole_prompt_of_another_try_serves_this_one() -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD)
    for fetch in fetches(machine.on_manifest(1, ID, WHOLE)):
        machine.on_fetched(fetch.number)
    machine.on_sums(1, ID, SUMS)
    machine.on_session_lost(1)
    machine.cancel(ID, forget=False)
    newer = KEY._replace(generation=2)
    begun(machine, newer, 2, tables=None, plan=AHEAD)
    places = [step for step in machine.allot((newer, 0), BLOCKS) if isinstance(step, Place)]
    assert len(places) == 2
    wrong = RIGHT[:8] + np.uint64(1)
    assert machine.on_placed(places[0].number, wrong) == [WrongSum(2, newer)], "it has its own sums"
    assert machine.on_placed(places[1].number, RIGHT[8:])[0] == BlocksArrived(newer, 0, ((1, 0, 4),), 4096)


@pytest.mark.parametrize("sums", [True, False])
def test_of_another_try_nothing_is_used_whose_sums_are_not_known(*, sums: bool) -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD)
    for fetch in fetches(machine.on_manifest(1, ID, WHOLE)):
        machine.on_fetched(fetch.number)
    if sums:
        machine.on_sums(1, ID, SUMS)
    machine.cancel(ID, forget=False)
    newer = KEY._replace(generation=2)
    begun(machine, newer, 2, tables=None)
    assert bool(machine.allot((newer, 0), BLOCKS)) == sums


def test_what_no_request_claims_in_time_leaves_the_buffer() -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD)
    one, other = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_fetched(one.number)
    assert machine.tick(9.0) == []
    assert machine.tick(10.0) == [ID]
    machine.on_fetched(other.number)
    assert machine.buffer.bytes_in_use == (0, 0)


@pytest.mark.parametrize("why", ["another try", "reset"])
def test_of_what_was_taken_and_has_left_the_buffer_it_is_said_that_it_cannot_be_whole(why: str) -> None:
    machine = ringed(buffer=64 << 10, entries=1)
    begun(machine, tables=None, plan=AHEAD)
    for fetch in fetches(machine.on_manifest(1, ID, WHOLE)):
        machine.on_fetched(fetch.number)
    assert machine.on_sums(1, ID, SUMS) == [SayFrame(1, KEY, ManifestTaken(0))]
    if why == "reset":
        assert machine.reset() == [LeftBuffer(KEY, 0)]
    else:
        assert machine.begin((OTHER, 0), 1, PLAN, 1.0) == [SayFrame(1, OTHER, Ask(1)), LeftBuffer(KEY, 0)]
    assert machine.buffer.bytes_in_use == (0, 0)


def test_what_was_not_taken_and_has_left_the_buffer_is_fetched_when_there_are_blocks() -> None:
    machine = ringed(buffer=64 << 10, entries=1)
    begun(machine, tables=None, plan=AHEAD)
    one, other = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_fetched(one.number)
    assert machine.begin((OTHER, 0), 1, PLAN, 1.0) == [SayFrame(1, OTHER, Ask(1))]
    assert machine.on_fetched(other.number) == []
    assert machine.buffer.bytes_in_use == (0, 0)
    assert machine.on_press(1, ID, 0, 0.1) == [SayFrame(1, KEY, Busy(0, 0.1))], "it has no entry any more"
    (again,) = fetches(machine.allot(ID, BLOCKS))
    machine.on_sums(1, ID, SUMS)
    assert SayFrame(1, KEY, ManifestTaken(0)) in machine.on_fetched(again.number)
    assert machine.on_placed(again.number, RIGHT) == [ALL]


def test_a_request_that_has_ended_leaves_nothing_in_the_buffer_of_a_source_that_is_lost() -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD)
    for fetch in fetches(machine.on_manifest(1, ID, WHOLE)):
        machine.on_fetched(fetch.number)
    machine.cancel(ID, forget=False)
    assert machine.buffer.bytes_in_use != (0, 0)
    machine.on_request_ended(OTHER)
    assert machine.buffer.bytes_in_use != (0, 0)
    machine.on_request_ended(KEY)
    assert machine.buffer.bytes_in_use == (0, 0)


def test_a_place_that_has_left_the_buffer_is_never_taken_for_blocks() -> None:
    machine = direct(buffer=64 << 10, window=5000)
    begun(machine, tables=None, plan=AHEAD)
    (one,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.reset()
    assert machine.on_fetched(one.number) == []
    assert machine.buffer.bytes_in_use == (0, 0)
    assert len(fetches(machine.allot(ID, BLOCKS))) == 1, "it is fetched again, for the blocks"


def test_what_was_to_be_fetched_ahead_in_a_session_that_ended_is_in_the_next() -> None:
    machine = direct(buffer=64 << 10, window=5000)
    begun(machine, tables=None, plan=AHEAD)
    (one,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_session_lost(1)
    assert machine.on_fetch_failed(one.number) == []
    assert machine.buffer.bytes_in_use == (0, 0)
    begun(machine, link=2, tables=None, plan=AHEAD)
    assert len(fetches(machine.on_manifest(2, ID, WHOLE))) == 1


def test_prefill_hears_of_tries_that_wait_for_blocks_and_of_fetches_that_take_long() -> None:
    machine = direct()
    begun(machine, tables=None)
    begun(machine, OTHER, link=2)
    machine.begin((KEY._replace(generation=7), 0), 1, NONE, 0.0)
    assert machine.goes_on() == {(1, KEY)}, "of a try with blocks nothing is being fetched, and of one nothing is wanted"
    machine.allot(ID, BLOCKS)
    assert machine.goes_on() == set()
    (fetch,) = fetches(machine.on_manifest(1, ID, WHOLE))
    assert machine.goes_on() == {(1, KEY)}
    machine.on_fetched(fetch.number, RIGHT)
    assert machine.goes_on() == set()


def test_what_was_to_be_fetched_ahead_and_has_no_block_of_the_load_is_not_fetched() -> None:
    machine = direct(buffer=64 << 10, window=1)
    begun(machine, tables=None, plan=AHEAD)
    (one,) = fetches(machine.on_manifest(1, ID, WHOLE))
    machine.on_sums(1, ID, SUMS)
    assert machine.allot(ID, (TableSpan(4, (11,)),)) == []
    assert machine.on_fetched(one.number) == [SayFrame(1, KEY, ManifestTaken(0))]
    assert machine.buffer.bytes_in_use == (0, 0)


def test_what_another_try_has_brought_is_not_used_where_other_heads_are_taken() -> None:
    machine = ringed(buffer=64 << 10)
    begun(machine, tables=None, plan=AHEAD)
    for fetch in fetches(machine.on_manifest(1, ID, WHOLE)):
        machine.on_fetched(fetch.number)
    machine.on_sums(1, ID, SUMS)
    machine.cancel(ID, forget=False)
    newer = KEY._replace(generation=2)
    half = PLAN._replace(parts={0: ArrayPart(0, 0, 1, 0), 1: ArrayPart(1, 0, 1, 0)})
    begun(machine, newer, 2, tables=None, plan=half)
    assert machine.allot((newer, 0), BLOCKS) == []
