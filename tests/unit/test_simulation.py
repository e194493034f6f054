"""The simulated fleet: nothing is lost, time adds up, and the planner does on cuts of real traces what it did before."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_operator.errors import XpydError
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation import foresight, statics, study
from xpyd_operator.simulation.controllers import Hpa, ScheduleController, Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.families import sinusoid
from xpyd_operator.simulation.hardware import PRESETS, preset
from xpyd_operator.simulation.instance import DECODE, SimulatedInstance
from xpyd_operator.simulation.rules import PATIENT
from xpyd_operator.simulation.trace import Arrival, Trace, cut, read, scale_trace
from xpyd_operator.simulation.world import World

MODEL = EngineModel(prefill_rate=10_000, step_base=0.01, step_per_request=0.001, kv_tokens=50_000, cold_start=60.0)
CUTS = Path(__file__).resolve().parent.parent / "data/traces"
SLO = {"ttft_s": 3.0, "tpot_s": 0.06}


def trace_of(name: str) -> Trace:
    with gzip.open(CUTS / name, "rt") as lines:
        return read(lines, name)


arrivals = st.lists(
    st.builds(Arrival, at=st.floats(0, 300), prompt=st.integers(1, 5000), output=st.integers(1, 200)),
    min_size=1, max_size=60,
).map(sorted)
schedules = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8)


@settings(max_examples=40)
@given(arrivals, schedules)
def test_every_request_is_answered_however_counts_change(trace: Trace, counts: list[tuple[int, int]]) -> None:
    schedule = [(index * 20.0, each) for index, each in enumerate(counts)]
    run = World(trace, MODEL, counts[0], ScheduleController(schedule, 5.0), rules=PATIENT).play()
    assert all(0 < each < math.inf for each in run.ttft)
    assert all(0 <= each < math.inf for each in run.tpot)
    most = max(sum(each) for each in counts)
    assert run.instance_s >= 0
    assert run.added <= 8 * most


def test_one_request_takes_what_the_model_says() -> None:
    run = World([Arrival(0.0, 1000, 11)], MODEL, (1, 1), Static()).play()
    assert run.ttft[0] == pytest.approx(MODEL.prefill_s(1000) + MODEL.handover_s(1000) + MODEL.step_s(1, 1000))
    assert run.tpot[0] == pytest.approx(MODEL.step_s(1, 1000), rel=0.01)


def test_a_batch_slows_down_and_ends_in_order() -> None:
    one = SimulatedInstance(MODEL, DECODE, 0.0, 0)
    for request in range(10):
        one.admit(0.0, request, 100, 10 * (request + 1))
    at = one.next_end()
    assert at == pytest.approx(10 * MODEL.step_s(10, 0), rel=0.01)
    assert one.ends(at)[0] == [0]
    assert one.next_end() - at == pytest.approx(10 * MODEL.step_s(9, 0), rel=0.01)


def test_an_instance_costs_from_its_wish_to_its_end() -> None:
    trace = [Arrival(0.0, 10, 2), Arrival(600.0, 10, 2)]
    run = World(trace, MODEL, (1, 1), ScheduleController([(0.0, (1, 1)), (100.0, (2, 1)), (400.0, (1, 1))], 5.0)).play()
    assert run.instance_s == pytest.approx(1200 + 300, abs=6)


def test_a_switch_needs_no_cold_start() -> None:
    trace = [Arrival(0.0, 10, 2), Arrival(600.0, 10, 2)]
    run = World(trace, MODEL, (1, 3), ScheduleController([(0.0, (1, 3)), (100.0, (3, 1))], 5.0)).play()
    assert (run.switches, run.added, run.removed) == (2, 0, 0)
    ready = next(mark for mark in run.marks if mark.at >= 105)
    assert (ready.ready_prefill, ready.ready_decode) == (3, 1)


def test_the_hpa_follows_its_algorithm() -> None:
    trace = [Arrival(index * 0.01, 4000, 5) for index in range(3000)]
    run = World(trace, MODEL, (1, 1), Hpa((2.0, 1000.0), Bounds((1, 16), (1, 4)))).play()
    ups = [after[0] for _, before, after in run.changes if after[0] > before[0]]
    assert ups[0] == 5  # 4 more, since twice is fewer
    assert run.switches == 0


@pytest.mark.parametrize(("text", "words"), [
    ("", "t: no requests"),
    ("time,prompt,output\n1,2\n", "t:2: 2 columns"),
    ("time,prompt,output\nsoon,2,3\n", "t:2: time is 'soon'; write seconds"),
    ('{"timestamp": 0, "input_length": 3}\n', "t:1: no field 'output_length'"),
    ('{"timestamp": 0, "input_length": -3, "output_length": 3}\n', "t:1: -3 prompt tokens and 3 generated"),
])
def test_a_bad_trace_is_refused_by_line(text: str, words: str) -> None:
    with pytest.raises(XpydError, match=words):
        read(text.splitlines(keepends=True), "t")


def test_traces_are_scaled_and_cut() -> None:
    trace = trace_of("azure_conv.csv.gz")
    assert len(trace) == pytest.approx(len(scale_trace(trace, 2.5, Random(1).random)) / 2.5, rel=0.02)
    piece = cut(trace, 100.0, 50.0)
    assert piece[0].at >= 0
    assert piece[-1].at < 50
    assert sinusoid(Random(1).random, length_s=600) == sinusoid(Random(1).random, length_s=600)


def test_models_are_checked() -> None:
    with pytest.raises(XpydError, match="prefill_rate must be above 0"):
        EngineModel(prefill_rate=0, step_base=0.01, kv_tokens=10)
    with pytest.raises(XpydError, match="no engine model h300; there are h200-8b"):
        preset("h300")
    assert all(model.step_base < 0.06 for model in PRESETS.values())


@pytest.mark.parametrize(("name", "model", "factor", "start", "least", "most_hours"), [
    ("azure_conv.csv.gz", "h200-70b-fp8", 2.0, (4, 2), 0.93, 2.1),
    ("mooncake_conversation.jsonl.gz", "h200-8b", 1.0, (5, 2), 0.90, 2.2),
])
def test_the_planner_keeps_its_level_on_cuts_of_real_traces(
    *, name: str, model: str, factor: float, start: tuple[int, int], least: float, most_hours: float
) -> None:
    trace = scale_trace(trace_of(name), factor, Random(1).random)
    engine = preset(model)
    goals = Goals(**SLO, cold_start_s=engine.cold_start)
    run, controller = study.play_planner(trace, engine, goals, Bounds((1, 16), (1, 12)), start)
    assert run.attainment(3.0, 0.06) >= least
    assert run.hours <= most_hours
    assert all(each.sentence for _, each in controller.decisions)
    again, _ = study.play_planner(trace, engine, goals, Bounds((1, 16), (1, 12)), start)
    assert again.ttft == run.ttft


@pytest.mark.test_all
def test_on_a_swing_the_planner_beats_every_static_choice_of_no_more_hours() -> None:
    trace = sinusoid(Random(1).random, length_s=3600.0, period_s=3600.0, rate=6.0)
    engine = preset("h200-32b")
    goals = Goals(**SLO, cold_start_s=engine.cold_start)
    bounds = Bounds((1, 12), (1, 10))
    run, _ = study.play_planner(trace, engine, goals, bounds, (7, 3))
    found = statics.point("planner", run, goals)
    statics_ = statics.Statics(trace, engine, goals, bounds)
    total = int(found.hours / (run.ends_at / 3600))
    rivals = [statics_.point_of((p, total - p)) for p in range(total // 2 - 1, total // 2 + 4)]
    assert found.attained > max(each.attained for each in rivals)
    assert found.changes_per_h <= 30


@pytest.mark.test_all
def test_perfect_foresight_serves_a_step_that_nobody_could_see_coming() -> None:
    trace = [Arrival(index * 0.25, 4000, 20) for index in range(1200)]
    trace += [Arrival(300 + index * 0.05, 4000, 20) for index in range(6000)]
    both = foresight.tables(trace, MODEL, 1.0, 0.06, ((1, 12), (1, 3)))
    replayed = foresight.replay(trace, MODEL, foresight.schedule(both, MODEL, 1.0, Bounds((1, 12), (1, 3))))
    assert replayed.attainment(1.0, 0.06) > 0.97
    assert replayed.hours < 12 * 600 / 3600


LINKED = msgspec.structs.replace(MODEL, kv_bytes=100_000.0, link=1e9)
"""A prompt of 4,000 tokens takes a link 0.4 s, as long as its prefill."""


def test_a_link_that_is_free_adds_nothing_and_one_that_is_slower_than_prefill_adds_the_rest() -> None:
    trace = [Arrival(0.0, 4000, 10)]
    free = World(trace, MODEL, (1, 1), Static()).play()
    assert World(trace, LINKED, (1, 1), Static()).play().ttft == pytest.approx(free.ttft)
    slow = msgspec.structs.replace(LINKED, link=0.25e9)
    assert World(trace, slow, (1, 1), Static()).play().ttft[0] == pytest.approx(1.6 + MODEL.step_s(1, 4000), abs=0.01)


def test_several_prefills_use_up_the_link_into_one_decode() -> None:
    trace = [Arrival(index * 0.1, 4000, 10) for index in range(600)]
    free, one, four = (
        World(trace, model, counts, Static()).play().attainment(3.0, 0.06)
        for model, counts in ((MODEL, (5, 1)), (LINKED, (5, 1)), (LINKED, (5, 4)))
    )
    assert free == four == 1.0
    assert one < 0.1


def test_the_link_out_of_a_prefill_is_used_up_too() -> None:
    slow = msgspec.structs.replace(LINKED, link=0.5e9)
    trace = [Arrival(index * 0.5, 4000, 10) for index in range(100)]
    assert World(trace, slow, (1, 8), Static()).play().attainment(3.0, 0.06) < 0.3
    assert World(trace, slow, (2, 8), Static()).play().attainment(3.0, 0.06) == 1.0


def test_every_request_is_answered_over_links_however_counts_change() -> None:
    trace = [Arrival(index * 0.2, 4000, 30) for index in range(600)]
    schedule = [(at * 20.0, counts) for at, counts in enumerate([(2, 2), (1, 3), (3, 1), (1, 1), (2, 2)])]
    run = World(trace, LINKED, (2, 2), ScheduleController(schedule, 5.0), rules=PATIENT).play()
    assert all(0 < each < math.inf for each in run.ttft)
    assert all(each < math.inf for each in run.tpot)


def test_decode_alone_computes_its_prompts_and_waits_for_no_kv() -> None:
    run = World([Arrival(0.0, 4000, 10)], LINKED, (0, 1), Static()).play()
    assert run.ttft[0] == pytest.approx(MODEL.prefill_s(4000))
    assert run.link_peak == 0
