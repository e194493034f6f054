"""Decisions: within bounds, explained, calm under a steady load, quick under a step."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_operator.plan.planner.decide import BACK, Decision, Memory, decide
from xpyd_operator.plan.planner.figures import Bounds, Figures, Goals, RoleFigures

GOALS = Goals(ttft_s=3.0, tpot_s=0.06, interval_s=30.0, scale_down_s=300.0, cold_start_s=120.0)
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
    assert told[-1].sentence == "3P2D stays: no request has ended yet"


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


def test_fewer_instances_only_after_the_delay() -> None:
    memory, counts, _ = run(Memory(), (6, 3), [(25.0, 2000, 100)] * 30)
    _, _, told = run(memory, counts, [(5.0, 2000, 100)] * 30)
    first = next(index for index, each in enumerate(told) if each.removed)
    assert first * GOALS.interval_s >= GOALS.scale_down_s - GOALS.interval_s


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
