"""Decisions: within bounds, explained, calm under a steady load, quick under a step."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_operator.plan.planner import worth
from xpyd_operator.plan.planner.decide import BACK, Decision, Memory, decide
from xpyd_operator.plan.planner.figures import Bounds, Figures, Goals, RoleFigures

GOALS = Goals(ttft_s=3.0, tpot_s=0.06, interval_s=30.0, cold_start_s=120.0)
PATIENCE_S = GOALS.late_cost / 3 * GOALS.cold_start_s
BOUNDS = Bounds(prefill=(1, 8), decode=(1, 8), total=12)
Pair = tuple[int, int]


def load(rate: float, prompt: int, output: int, counts: Pair, *, queued: int = 0, over_s: float = 30.0) -> Figures:
    """A window of an ideal fleet: 10,000 prompt tokens a second, steps of 10 ms + 0.5 ms a request."""
    arrivals = round(rate * over_s)
    busy = min(counts[0], rate * prompt / 10_000)
    running = rate * output * 0.02
    batch = running / counts[1]
    step = 0.01 + 0.0005 * batch
    return Figures(
        over_s=over_s, arrivals=arrivals, arrived_tokens=float(arrivals * prompt), ended=arrivals,
        prompt_tokens=arrivals * prompt, prompt_squares=2.0 * arrivals * prompt * prompt, output_tokens=arrivals * output,
        queued=queued, ttft_p95=1.0, tpot_p95=step, tpot_mean=step,
        prefill=RoleFigures(ready=counts[0], busy=busy, running=busy),
        decode=RoleFigures(ready=counts[1], busy=counts[1], running=rate * output * step, kv_usage=0.002 * batch),
    )


def run(memory: Memory, counts: Pair, rates: list[tuple[float, int, int]]) -> tuple[Memory, Pair, list[Decision]]:
    """Intervals one after the other; what is decided is there at once."""
    told = []
    for rate, prompt, output in rates:
        memory, found = decide(memory, load(rate, prompt, output, counts), counts, GOALS, BOUNDS)
        counts = (found.prefill, found.decode)
        told.append(found)
    return memory, counts, told


small = st.floats(0, 1e4, allow_nan=False)
roles = st.builds(RoleFigures, ready=st.integers(0, 50), busy=small, running=small, kv_usage=st.floats(0, 1))
any_figures = st.builds(
    Figures, over_s=st.floats(1, 600), arrivals=st.integers(0, 10**5), arrived_tokens=st.floats(0, 1e9),
    ended=st.integers(0, 10**5), prompt_tokens=st.integers(0, 10**9), prompt_squares=st.floats(0, 1e15),
    output_tokens=st.integers(0, 10**8), queued=st.integers(0, 10**5), handover_s=small, ttft_p95=small, tpot_p95=small,
    tpot_mean=small, prefill=roles, decode=roles,
)


@settings(max_examples=60)
@given(st.lists(any_figures, min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 4))
def test_whatever_is_observed_counts_stay_within_their_bounds_and_say_why(seen: list[Figures], p: int, d: int) -> None:
    memory, counts = Memory(), (p, d)
    for figures in seen:
        memory, found = decide(memory, figures, counts, GOALS, BOUNDS)
        assert 1 <= found.prefill <= 8
        assert 1 <= found.decode <= 8
        assert found.prefill + found.decode <= 12
        assert found.changes == ((found.prefill, found.decode) != counts)
        assert f"{found.prefill}P{found.decode}D" in found.sentence
        counts = (found.prefill, found.decode)


def test_without_requests_nothing_changes() -> None:
    _, counts, told = run(Memory(), (3, 2), [(0.0, 0, 0)] * 40)
    assert counts == (3, 2)
    assert told[-1].sentence.startswith("3P2D stays: no request has ended yet")


def from_zero(counts: Pair, told: list[Figures]) -> tuple[Pair, list[Decision]]:
    """With nobody in prefill allowed."""
    memory, found = Memory(), []
    for figures in told:
        memory, one = decide(memory, figures, counts, GOALS, Bounds(prefill=(0, 8), decode=(1, 8)))
        counts = (one.prefill, one.decode)
        found.append(one)
    return counts, found


def test_a_role_without_instances_is_given_one_when_requests_come() -> None:
    alone = msgspec.structs.replace(load(4.0, 2000, 200, (1, 1)), prefill=RoleFigures(), handover_s=0.0)
    counts, told = from_zero((0, 1), [load(0.0, 0, 0, (1, 1)), alone])
    assert [each.prefill for each in told] == [0, 1]
    assert "needs 1P" in told[-1].sentence
    assert counts[0] == 1


def test_what_is_not_known_of_one_role_leaves_the_other_to_its_load() -> None:
    alone = msgspec.structs.replace(load(10.0, 2000, 1500, (1, 1)), prefill=RoleFigures(ready=1))
    counts, told = from_zero((1, 1), [alone] * 8)
    assert counts[0] == 1, "no prefill instance had work, so nobody knows what one can do"
    assert counts[1] > 1
    assert "at an unknown rate per instance" in told[-1].sentence
    assert "needs ?P" in told[-1].sentence


def test_a_steady_load_settles_and_stays() -> None:
    memory, counts, _ = run(Memory(), (4, 4), [(10.0, 2000, 200)] * 40)
    _, after, told = run(memory, counts, [(10.0, 2000, 200)] * 60)
    assert after == counts
    assert not any(each.changes for each in told)


def test_a_step_of_the_load_is_answered_in_the_first_interval_that_shows_it() -> None:
    memory, counts, _ = run(Memory(), (3, 2), [(10.0, 2000, 100)] * 30)
    _, after, told = run(memory, counts, [(30.0, 2000, 100)])
    assert told[0].added >= 2
    assert after[0] > counts[0]
    assert "30.0 requests/s of 2000 prompt" in told[0].sentence


def test_fewer_instances_only_after_the_patience_and_in_parts() -> None:
    memory, counts, _ = run(Memory(), (8, 3), [(50.0, 2000, 100)] * 30)
    _, _, told = run(memory, counts, [(5.0, 2000, 100)] * 60)
    removals = [index for index, each in enumerate(told) if each.removed]
    assert removals[0] * GOALS.interval_s >= PATIENCE_S - GOALS.interval_s
    assert len(removals) > 2
    before = counts[0]
    for index in removals:
        assert before - told[index].prefill <= max(1, before // 2)
        before = told[index].prefill
    assert min(after - first for first, after in pairwise(removals)) >= worth.PAUSE


def test_a_removal_that_was_needed_again_makes_the_next_one_wait_twice_as_long_and_the_sentence_says_so() -> None:
    memory, counts, _ = run(Memory(), (6, 2), [(25.0, 2000, 100)] * 30)
    memory, counts, told = run(memory, counts, [(5.0, 2000, 100)] * 30)
    assert counts[0] < 6
    memory, counts, told = run(memory, counts, [(30.0, 2000, 100)] * 12)
    assert told[-1].prefill >= 6
    assert "prefill was short after a removal (regret 1, 6 min ago): fewer after 13 min" in told[-1].sentence
    _, _, told = run(memory, counts, [(5.0, 2000, 100)] * 60)
    first = next(index for index, each in enumerate(told) if each.prefill < memory.needs[-1][0])
    assert first * GOALS.interval_s >= 2 * PATIENCE_S - GOALS.interval_s


def test_a_rise_that_came_often_is_kept_in_hand_and_the_sentence_says_so() -> None:
    wave = ([(5.0, 2000, 100)] * 10 + [(25.0, 2000, 100)] * 10) * 6
    memory, counts, _ = run(Memory(), (6, 2), wave)
    _, after, told = run(memory, counts, [(5.0, 2000, 100)] * 25)
    assert after[0] >= 5, "longer than the patience"
    assert "in hand, as the load may rise again" in told[-1].sentence


def test_a_spike_is_named_with_the_floor_that_would_have_saved_it_and_its_price() -> None:
    memory, counts, _ = run(Memory(), (2, 1), [(5.0, 2000, 100)] * 60)
    late = msgspec.structs.replace(load(40.0, 2000, 100, counts, queued=900), ttft_p95=20.0)
    memory, found = decide(memory, late, counts, GOALS, BOUNDS)
    floor = found.sentence.split("min: ")[1]
    assert floor.startswith("8 for prefill would have had 1200 requests of the last hour in time, for ")
    hours = float(floor.split("for ")[2].split(" ")[0])
    assert 0 < hours <= 8
    calm = load(5.0, 2000, 100, counts)
    for _ in range(121):
        memory, found = decide(memory, calm, counts, GOALS, BOUNDS)
    assert "min: " not in found.sentence, "an hour later"


def test_while_prefill_is_behind_decode_is_not_taken_for_idle() -> None:
    memory, counts, _ = run(Memory(), (4, 4), [(15.0, 2000, 800)] * 30)
    behind = msgspec.structs.replace(
        load(15.0, 2000, 800, counts, queued=2000), output_tokens=4000, ended=5, prompt_tokens=10_000,
        decode=RoleFigures(ready=counts[1], busy=1.0, running=4.0, kv_usage=0.01))
    needed = memory.demand.level[1]
    for _ in range(5):
        memory, _ = decide(memory, behind, counts, GOALS, BOUNDS)
    assert memory.demand.level[1] > 0.8 * needed


def test_an_instance_that_starts_is_not_lent_to_the_other_role() -> None:
    memory, _, _ = run(Memory(), (2, 5), [(8.0, 1000, 600)] * 3)
    starting = msgspec.structs.replace(
        load(8.0, 2500, 100, (2, 5)), decode=RoleFigures(ready=1, busy=1, running=8, kv_usage=0.1))
    for _ in range(8):
        memory, found = decide(memory, starting, (2, 5), GOALS, BOUNDS)
        assert found.switched == 0


def test_a_role_that_is_short_takes_an_instance_of_one_that_can_spare_it() -> None:
    memory, counts = Memory(), (2, 5)
    memory, counts, _ = run(memory, counts, [(8.0, 1000, 600)] * 3)
    counts = (2, 5)
    _, after, told = run(memory, counts, [(8.0, 2500, 100)] * 8)
    assert any(each.switched > 0 for each in told)
    assert next(each for each in told if each.switched).added == 0
    assert after[0] > 2


def test_decode_that_is_short_takes_an_instance_of_prefill() -> None:
    memory, _, _ = run(Memory(), (6, 3), [(8.0, 2500, 100)] * 3)
    _, after, told = run(memory, (6, 3), [(8.0, 1000, 2000)] * 8)
    first = next(each for each in told if each.switched)
    assert first.switched < 0 == first.added
    assert first.decode - 3 == 6 - first.prefill == -first.switched
    assert after[1] > 3


def test_a_backlog_that_outlasts_a_cold_start_counts_as_demand_and_one_that_does_not_is_left_to_drain() -> None:
    memory, counts, _ = run(Memory(), (3, 2), [(10.0, 2000, 100)] * 30)
    _, calm = decide(memory, load(10.0, 2000, 100, counts), counts, GOALS, BOUNDS)
    _, soon = decide(memory, load(10.0, 2000, 100, counts, queued=600), counts, GOALS, BOUNDS)
    _, late = decide(memory, load(10.0, 2000, 100, counts, queued=3000), counts, GOALS, BOUNDS)
    assert late.prefill > soon.prefill == calm.prefill
    assert "3000 waiting" in late.sentence


def test_switches_do_not_flap() -> None:
    swing = [(8.0, 2500, 100) if index % 4 < 2 else (8.0, 500, 700) for index in range(80)]
    _, _, told = run(Memory(), (3, 3), swing)
    turns = [index for index, each in enumerate(told) if each.switched]
    signs = [told[index].switched > 0 for index in turns]
    for at, (before, after) in enumerate(pairwise(signs)):
        if before != after:
            assert turns[at + 1] - turns[at] >= BACK


def test_memory_survives_encoding() -> None:
    memory, _, _ = run(Memory(), (3, 2), [(10.0, 2000, 100)] * 5)
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory


def test_a_role_that_may_have_nobody_is_given_nobody() -> None:
    alone = msgspec.structs.replace(load(4.0, 2000, 200, (1, 1)), prefill=RoleFigures())
    _, found = decide(Memory(), alone, (0, 1), GOALS, Bounds(prefill=(0, 0), decode=(1, 8)))
    assert found.prefill == 0
    assert "needs ?P" in found.sentence
