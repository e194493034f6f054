"""What the simulated world has besides queues: prefix caches, plain engines, refusals, starts that vary and fail, groups of
pods, devices as the cost, and pools that are not alike."""

from __future__ import annotations

import math

import msgspec
import pytest

from xpyd_operator.errors import XpydError
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation import frontier
from xpyd_operator.simulation.controllers import ControlLaw, LoadThreshold, ScheduleController, Static
from xpyd_operator.simulation.engine import EngineModel, Pools
from xpyd_operator.simulation.outcome import Run
from xpyd_operator.simulation.prefix import BLOCK, PrefixCache
from xpyd_operator.simulation.rules import PATIENT, RouterRules
from xpyd_operator.simulation.statics import Point, Statics, hull
from xpyd_operator.simulation.trace import Arrival, Trace, scale_trace
from xpyd_operator.simulation.world import World

MODEL = EngineModel(prefill_rate=10_000, step_base=0.01, step_per_request=0.001, kv_tokens=50_000, cold_start=60.0)
GOALS = Goals(ttft_s=3.0, tpot_s=0.06, cold_start_s=60.0)


def with_(**figures: float) -> EngineModel:
    return msgspec.structs.replace(MODEL, **figures)


def steady(count: int, gap_s: float, prompt: int = 4000, output: int = 20) -> Trace:
    return [Arrival(index * gap_s, prompt, output) for index in range(count)]


def play(trace: Trace, engines: EngineModel | Pools, counts: tuple[int, int], **more: object) -> Run:
    return World(trace, engines, counts, Static(), **more).play()  # type: ignore[arg-type]


# ---- prefix caches


def test_a_cache_keeps_the_beginnings_that_were_used_last_and_never_all_of_a_prompt() -> None:
    cache = PrefixCache(4 * BLOCK)
    cache.insert((1, 2, 3))
    assert cache.match((1, 2, 9), 3 * BLOCK) == 2 * BLOCK
    assert cache.match((1, 2, 3), 3 * BLOCK) == 3 * BLOCK - 1
    cache.insert((7, 8))
    assert cache.match((1, 2, 3), 3 * BLOCK) == 2 * BLOCK  # the last block of the older one has gone
    cache.insert(tuple(range(100, 120)))
    assert len(cache) == 4
    assert cache.match(tuple(range(100, 120)), 20 * BLOCK) == 4 * BLOCK


def test_what_the_cache_has_is_neither_computed_nor_sent() -> None:
    model = with_(kv_bytes=1000.0, link=1e9)
    hashes = tuple(range(8))
    trace = [Arrival(0.0, 8 * BLOCK, 5, hashes), Arrival(10.0, 8 * BLOCK, 5, hashes)]
    run = play(trace, model, (1, 1))
    assert run.ttft[0] == pytest.approx(model.prefill_s(8 * BLOCK) + model.handover + model.step_s(1, 8 * BLOCK))
    one_token = model.prefill_start + 1 / 10_000
    assert run.ttft[1] == pytest.approx(one_token + model.handover + model.step_s(1, 8 * BLOCK), rel=0.01)
    assert run.cached_tokens == 8 * BLOCK - 1
    assert run.link_peak * 10.0 == pytest.approx(1000.0 * (8 * BLOCK + 1))


def test_a_conversation_goes_where_its_beginning_is() -> None:
    trace = []
    for turn in range(6):
        for session in range(4):
            hashes = tuple(session * 1000 + block for block in range(4 + turn))
            trace.append(Arrival(turn * 20.0 + session * 0.2, len(hashes) * BLOCK, 5, hashes))
    run = play(trace, MODEL, (4, 1))
    asked = sum(each.prompt for each in trace)
    assert run.cached_tokens / asked > 0.6


def test_without_hashes_nothing_is_shared() -> None:
    assert play(steady(50, 0.5), MODEL, (2, 1)).cached_tokens == 0


def test_copies_of_a_request_are_others_prompts() -> None:
    trace = [Arrival(0.0, BLOCK, 5, (1,))]
    twice = scale_trace(trace, 2.0, lambda: 0.5)
    assert len({each.hashes for each in twice}) == 2


# ---- plain engines, and decode without prefill


def test_a_plain_engine_computes_prompts_in_chunks_beside_its_batch() -> None:
    model = with_(chunk=1000, prefill_start=0.0)
    alone = play([Arrival(0.0, 10, 200)], model, (0, 1))
    disturbed = play([Arrival(0.0, 10, 200), Arrival(0.5, 5000, 2)], model, (0, 1))
    # The chunks take a token of each step for the batch, so a little more than five of them.
    assert disturbed.ttft[1] == pytest.approx(model.prefill_s(5000), rel=0.05)
    # Six steps of 100 ms in place of 11 ms, among two hundred.
    assert disturbed.tpot[0] == pytest.approx(alone.tpot[0] + 5 * (0.101 - 0.011) / 199, rel=0.05)


def test_smaller_chunks_disturb_a_batch_less_at_a_time() -> None:
    trace = sorted([*steady(40, 1.0, prompt=8000, output=2), *(Arrival(index * 0.25, 50, 100) for index in range(160))])
    slow = with_(kv_tokens=200_000)
    found = {chunk: play(trace, msgspec.structs.replace(slow, chunk=chunk), (0, 1)) for chunk in (512, 8192)}
    answers = [index for index, each in enumerate(trace) if each.output == 100]
    worst = {chunk: max(run.tpot[index] for index in answers) for chunk, run in found.items()}
    assert worst[512] < worst[8192]


def test_prompts_share_a_chunk_and_answers_of_one_token_end_with_it() -> None:
    run = play([Arrival(0.0, 500, 1) for _ in range(4)], with_(prefill_start=0.0), (0, 1))
    assert run.ttft[0] == pytest.approx(0.05)  # the first one is not kept waiting
    assert run.ttft[1:] == pytest.approx([0.2] * 3)
    assert run.tpot == [0.0] * 4


def test_a_prompt_waits_until_kv_has_room_for_it() -> None:
    trace = [Arrival(0.0, 40_000, 300), Arrival(0.1, 40_000, 5)]
    run = play(trace, MODEL, (0, 1), rules=PATIENT)
    assert run.ttft[1] > run.ttft[0] + 300 * MODEL.step_s(1, 0) - 0.2


def test_work_is_spread_over_plain_engines() -> None:
    trace = steady(300, 0.2)
    assert play(trace, MODEL, (0, 4)).attainment(1.0, 0.06) > 0.99
    assert play(trace, MODEL, (0, 2)).attainment(1.0, 0.06) < 0.5


def test_short_prompts_skip_prefill_where_the_service_says_so() -> None:
    trace = [Arrival(0.0, 100, 5), Arrival(1.0, 4000, 5)]
    run = play(trace, with_(kv_bytes=1.0, link=1e9), (1, 1), rules=RouterRules(skip_below=1000))
    assert run.ttft[0] == pytest.approx(MODEL.prefill_s(100))
    assert run.link_peak * trace[-1].at == pytest.approx(4000)


def test_without_prefill_requests_are_refused_where_the_service_says_so() -> None:
    run = play(steady(5, 1.0), MODEL, (0, 1), rules=RouterRules(onto_decode=False))
    assert run.refused == 5
    assert run.attainment(math.inf, math.inf) == 1.0
    assert run.ttft == [math.inf] * 5


# ---- refusals


def test_who_waits_too_long_is_refused_so_an_overload_does_not_make_everybody_late() -> None:
    trace = steady(600, 0.2)  # twice of what one instance reads
    patient = play(trace, MODEL, (1, 2), rules=PATIENT)
    run = play(trace, MODEL, (1, 2), rules=RouterRules(queue_timeout_s=2.0))
    assert run.refused > 200
    assert patient.refused == 0
    assert max(ttft for ttft in run.ttft if ttft < math.inf) < 2.0 + 2.0 + 1.0
    assert run.attainment(5.0, 1.0) > 0.4
    assert patient.attainment(5.0, 1.0) < 0.1


def test_a_full_queue_refuses_who_comes_next() -> None:
    run = play(steady(100, 0.001), MODEL, (1, 1), rules=RouterRules(queue_size=10))
    assert 75 <= run.refused <= 86
    assert run.ttft[0] < math.inf
    assert run.ttft[-1] == math.inf
    none = play(steady(3, 10.0), MODEL, (1, 1), rules=RouterRules(queue_size=0))
    assert none.refused == 0  # an instance has room, so nobody waits


# ---- starts, groups, devices


def started_after(model: EngineModel, seed: int = 1) -> tuple[float, Run]:
    trace = steady(150, 10.0, prompt=10, output=2)
    run = World(trace, model, (1, 1), ScheduleController([(0.0, (1, 1)), (10.0, (2, 1))], 5.0), seed=seed).play()
    return next(mark.at for mark in run.marks if mark.ready_prefill == 2) - 10.0, run


def test_starts_take_their_time_which_varies_by_seed() -> None:
    assert started_after(MODEL)[0] == pytest.approx(60, abs=10)
    times = {started_after(with_(cold_spread=0.5), seed)[0] for seed in range(8)}
    assert len(times) > 3
    assert min(times) >= 28
    assert max(times) <= 102
    assert started_after(with_(cold_spread=0.5), 3)[0] == started_after(with_(cold_spread=0.5), 3)[0]


def test_a_start_that_fails_begins_anew_and_is_paid_for() -> None:
    found = [started_after(with_(cold_failures=0.5), seed) for seed in range(8)]
    assert {run.failed_starts for _, run in found} >= {0, 1}
    for after, run in found:
        assert after == pytest.approx(60 * (1 + run.failed_starts), abs=10)


def test_a_group_is_as_late_as_its_last_pod_and_fails_with_any() -> None:
    one, eight = (
        [started_after(with_(cold_spread=0.5, pods=pods), seed)[0] for seed in range(12)] for pods in (1, 8)
    )
    assert sum(eight) / 12 > sum(one) / 12 + 10
    failed = [sum(started_after(with_(cold_failures=0.1, pods=pods), seed)[1].failed_starts for seed in range(12))
              for pods in (1, 8)]
    assert failed[1] > failed[0]


def test_what_is_paid_for_are_devices() -> None:
    trace = [Arrival(0.0, 10, 2), Arrival(3600.0, 10, 2)]
    run = play(trace, Pools(with_(gpus=4), with_(gpus=2)), (2, 3))
    assert run.hours == pytest.approx(2 * 4 + 3 * 2)
    assert run.instance_s == pytest.approx(5 * 3600)


def test_pools_that_are_not_alike_do_not_switch_roles() -> None:
    trace = steady(600, 1.0, prompt=10, output=2)
    schedule = [(0.0, (1, 3)), (100.0, (3, 1))]
    alike = World(trace, MODEL, (1, 3), ScheduleController(schedule, 5.0)).play()
    other = World(trace, Pools(MODEL, with_(gpus=2)), (1, 3), ScheduleController(schedule, 5.0)).play()
    assert (alike.switches, alike.added, alike.removed) == (2, 0, 0)
    assert (other.switches, other.added, other.removed) == (0, 2, 2)
    assert next(mark.at for mark in other.marks if mark.ready_prefill == 3) == pytest.approx(160, abs=10)


def test_each_side_has_its_own_model() -> None:
    slow = with_(step_base=0.05)
    assert play([Arrival(0.0, 10, 50)], Pools(MODEL, slow), (1, 1)).tpot[0] == pytest.approx(0.051, rel=0.02)
    assert play([Arrival(0.0, 10, 50)], Pools(slow, MODEL), (1, 1)).tpot[0] == pytest.approx(0.011, rel=0.02)


@pytest.mark.parametrize(("figures", "words"), [
    ({"cold_spread": 1.5}, "cold_spread must be at most 1"), ({"cold_failures": 0.95}, "cold_failures must be at most 0.9"),
    ({"gpus": 0}, "gpus must be above 0"), ({"chunk": 0}, "chunk must be above 0"),
])
def test_models_that_cannot_be_are_refused(figures: dict[str, float], words: str) -> None:
    with pytest.raises(XpydError, match=words):
        with_(**figures)


# ---- rivals and choices


@pytest.mark.parametrize("rival", [
    ControlLaw(0.7, GOALS, Bounds((1, 6), (1, 6))), LoadThreshold(0.5, 20.0, GOALS, Bounds((1, 6), (1, 6), total=8)),
])
def test_rivals_follow_a_load_up_and_down_within_their_bounds(rival: ControlLaw | LoadThreshold) -> None:
    trace = [*steady(200, 0.8), *(each._replace(at=each.at + 200) for each in steady(3000, 0.2))]
    trace += [each._replace(at=each.at + 820) for each in steady(300, 3.0)]
    run = World(trace, MODEL, (1, 1), rival).play()
    counts = [mark.prefill for mark in run.marks]
    assert max(counts) >= 2
    assert counts[-1] < max(counts)
    assert all(1 <= mark.prefill <= 6 and 1 <= mark.decode <= 6 for mark in run.marks)


def point(hours: float, attained: float) -> Point:
    return Point(f"{hours:g}", hours, attained, 0.0, 0.0, 0.0, 0)


def test_static_choices_are_compared_by_the_hull_of_their_mixes() -> None:
    points = [point(2.0, 0.4), point(4.0, 0.8), point(5.0, 0.7)]
    mixed = hull(points, 3.0)
    assert mixed is not None
    assert mixed.attained == pytest.approx(0.6)
    assert "2 and 4 for 50%" in mixed.choice
    best = hull(points, 5.0)
    assert best is not None
    assert best.choice == "4"
    assert hull(points, 1.0) is None


def test_the_frontier_says_what_the_same_devices_do_otherwise_and_what_one_dead_instance_does() -> None:
    model = with_(kv_bytes=1000.0, link=1e9)
    statics = Statics(steady(400, 0.25), model, GOALS, Bounds((1, 5), (1, 3)))
    statics.sweep()
    rows = frontier.rows(statics)
    assert [row.attained for row in rows] == sorted(row.attained for row in rows)
    assert [row.gpus for row in rows] == sorted(row.gpus for row in rows)
    for row in rows:
        prefill, decode = (int(each) for each in row.choice.rstrip("D").split("P"))
        assert row.plain == f"{prefill + decode} plain"
        if decode == 1:
            assert row.without_decode == 0.0
        assert row.link == pytest.approx(4000 * 1000 / 0.25 / decode, rel=0.3)
        if prefill > 1:
            assert row.without_prefill <= row.attained


def test_choices_of_unequal_instances_are_counted_in_devices() -> None:
    statics = Statics(steady(100, 0.5), Pools(with_(gpus=4), with_(gpus=2)), GOALS, Bounds((1, 3), (1, 4)))
    assert statics.splits(8) == [(1, 2)]
    assert statics.splits(12) == [(1, 4), (2, 2)]
    assert statics.splits(7) == []
    chosen = statics.sweep()
    assert statics.point_of(chosen).hours == pytest.approx(statics.gpus(chosen) * 99 * 0.5 / 3600, rel=0.01)
