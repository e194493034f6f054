"""Traces that cannot be meant are refused by their line; families come out as they are described; instances come from data
sheets."""

from __future__ import annotations

import json
import statistics

import pytest

from xpyd_operator.errors import XpydError
from xpyd_operator.simulation import families
from xpyd_operator.simulation.chance import Chance
from xpyd_operator.simulation.families import make_trace
from xpyd_operator.simulation.hardware import GPUS, MODELS, PRESETS, gpu_of, model_of, roofline
from xpyd_operator.simulation.prefix import BLOCK
from xpyd_operator.simulation.trace import Trace, read


def rows(count: int, gap: float) -> list[str]:
    return [f"{index * gap:.6f},1000,50\n" for index in range(count)]


def lines(count: int, gap: float) -> list[str]:
    return [json.dumps({"timestamp": index * gap, "input_length": 1000, "output_length": 50}) for index in range(count)]


def test_a_first_line_that_parses_is_data() -> None:
    assert len(read(rows(3, 1.0), "t")) == 3
    assert len(read(["time,prompt,output\n", *rows(3, 1.0)], "t")) == 3
    assert len(read(["\n", "2023-11-16 18:15:46.680,374,44\n"], "t")) == 1


@pytest.mark.parametrize(("text", "words"), [
    (["soon,2,3\n"], "t:1: time is 'soon'; write seconds, or a time as 2023-11-16 18:17:03"),
    (["nan,2,3\n"], "t:1: time is nan; write seconds"),
    (["1,2,many\n"], "t:1: generated tokens are 'many'; write a whole number"),
    (["1,2,-3\n"], "t:1: 2 prompt tokens and -3 generated: lengths are 0 or more"),
    (['{"timestamp": "noon", "input_length": 1, "output_length": 5}'], "t:1: timestamp is 'noon'; write milliseconds"),
    (['{"timestamp": 1, "input_length": 1, "output_length": null}'], "t:1: output_length are 'None'; write a whole number"),
    (['{"timestamp": 1, "input_length": 1, "output_length": 5, "hash_ids": 7}'], "t:1: hash_ids are 7; write a list"),
    (['{"timestamp": 1, '], "t:1: no JSON object: .* at column 17; each line is one"),
    (["1,2,3\n", "0.5,2,3\n"], "t:2: its time is 0.5 s before that of the request before it; sort the lines"),
    (lines(3600, 1.0), r"t:3600: 3600 requests in 3.6 s: times are taken for ms; say --time-unit s, or --time-unit ms"),
    (lines(200, 1e6 * 3600), "t:200: .* times are taken for ms; say --time-unit us"),
    (rows(3600, 0.001), "t:3600: 3600 requests in 3.6 s: times in CSV are seconds"),
    (rows(200, 1000.0 * 3600), "t:200: .* times are taken for s; say --time-unit ms"),
    (rows(3600, 1000.0), "t:3600: .* times are taken for s; say --time-unit ms"),
    ([json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1]})],
     "t:1: 1 hash_ids for 1000 prompt tokens; blocks have 512 tokens, so 2 are right"),
])
def test_traces_that_cannot_be_meant_are_named_with_their_line(text: list[str], words: str) -> None:
    with pytest.raises(XpydError, match=words):
        read(text, "t")


def test_a_unit_that_is_said_is_believed() -> None:
    assert read(lines(3600, 1.0), "t", "s")[-1].at == 3599
    assert read(lines(3600, 1.0), "t", "ms")[-1].at == pytest.approx(3.599)
    assert read(rows(200, 3.6e6), "t", "ms")[-1].at == pytest.approx(199 * 3600)


def test_hashes_of_a_trace_are_kept() -> None:
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 7]}
    assert read([json.dumps(row)], "t")[0].hashes == (1, 7)


# ---- families


def test_chance_is_even_exponential_and_normal_and_the_same_for_a_seed() -> None:
    one, again, other = Chance(7), Chance(7), Chance(8)
    drawn = [one.random() for _ in range(4000)]
    assert drawn == [again.random() for _ in range(4000)]
    assert drawn != [other.random() for _ in range(4000)]
    assert all(0 <= each < 1 for each in drawn)
    for part in range(10):
        assert sum(part <= 10 * each < part + 1 for each in drawn) == pytest.approx(400, rel=0.2)
    waits, sizes = [one.exponential(3.0) for _ in range(4000)], [one.normal() for _ in range(4000)]
    assert [statistics.mean(waits), statistics.pstdev(waits)] == pytest.approx([3, 3], rel=0.1)
    assert [statistics.mean(sizes), statistics.pstdev(sizes)] == pytest.approx([0, 1], abs=0.06)


def per_s(trace: Trace, begin: float, end: float) -> float:
    return sum(begin <= each.at < end for each in trace) / (end - begin)


@pytest.mark.parametrize("name", families.DEFAULTS)
def test_a_family_is_the_same_with_its_seed_and_another_with_another(name: str) -> None:
    text = f"{name}:hours=0.1"
    assert make_trace(text, 4) == make_trace(text, 4) != make_trace(text, 5)
    trace = make_trace(text, 4)
    assert trace == sorted(trace)
    assert trace[-1].at < 0.1 * 3600
    assert all(each.prompt >= 1 and each.output >= 1 for each in trace)


def test_square_waves_have_the_period_and_the_phase_that_are_asked_for() -> None:
    for minutes in (1, 7, 40):
        trace = make_trace(f"square:period={minutes}m,rate=0.5,hours=2,phase=0,share=0.5", 1)
        half = minutes * 30.0
        low = statistics.mean(per_s(trace, start * half, (start + 1) * half) for start in range(0, int(7200 // half), 2))
        high = statistics.mean(per_s(trace, start * half, (start + 1) * half) for start in range(1, int(7200 // half), 2))
        assert [low, high] == pytest.approx([0.5, 1.5], rel=0.15)
    shifted = make_trace("square:period=40m,rate=0.5,hours=1,phase=0.5", 1)
    assert per_s(shifted, 0, 1200) > 2 * per_s(shifted, 1200, 2400)


def test_periods_of_square_waves_are_drawn_from_one_to_forty_minutes() -> None:
    draw, shape = Chance(1), families.DEFAULTS["square"]
    drawn = sorted(families.period_of(shape, draw) for _ in range(600))
    assert 60 <= drawn[0] < 70
    assert 2000 < drawn[-1] <= 2400
    assert drawn[200] == pytest.approx(205, rel=0.2)


def test_levels_of_families() -> None:
    ramp, step, spike = make_trace("ramp:hours=0.4", 1), make_trace("step:hours=0.4", 1), make_trace("spike:hours=0.5", 1)
    assert per_s(ramp, 0, 120) < 4
    assert per_s(ramp, 600, 720) > 7
    assert per_s(ramp, 730, 1440) == pytest.approx(2.0, rel=0.15)
    assert [per_s(step, 0, 720), per_s(step, 720, 1440)] == pytest.approx([3, 9], rel=0.15)
    assert per_s(spike, 990, 1170) == pytest.approx(16, rel=0.15)
    assert per_s(spike, 0, 980) == pytest.approx(4, rel=0.15)
    quiet = make_trace("quiet:hours=1", 1)
    assert per_s(quiet, 0, 1400) == pytest.approx(7.5, rel=0.1)
    assert per_s(quiet, 1600, 3500) < 0.5
    day = make_trace("diurnal:hours=1,period=1h", 1)
    assert per_s(day, 0, 300) < 2
    assert per_s(day, 1650, 1950) > 8
    mix = make_trace("mix:hours=0.4", 1)
    first, last = ([each for each in mix if (each.at < 720) is early] for early in (True, False))
    assert statistics.mean(each.prompt for each in first) > 4 * statistics.mean(each.prompt for each in last)
    assert statistics.mean(each.output for each in last) > 4 * statistics.mean(each.output for each in first)
    burst = make_trace("onoff:hours=1", 2)
    rates = [per_s(burst, at, at + 60) for at in range(0, 3600, 60)]
    assert min(rates) < 2
    assert max(rates) > 6


def test_agents_prompts_begin_with_what_came_before() -> None:
    trace = make_trace("agents:hours=0.3", 1)
    assert all(len(each.hashes) == -(-each.prompt // BLOCK) for each in trace)
    seen: set[int] = set()
    known = total = 0
    for each in trace:
        known += sum(block in seen for block in each.hashes)
        total += len(each.hashes)
        seen.update(each.hashes)
    assert known / total > 0.7
    assert statistics.mean(each.prompt for each in trace) == pytest.approx(13_000, rel=0.3)


@pytest.mark.parametrize(("text", "words"), [
    ("sqare", "no family sqare; there are flat, agents"), ("square:perod=3m", "no field perod; there are hours"),
    ("square:period=3", "period is '3'; write a duration, as 18m"), ("flat:rate=x", "rate is 'x'; write a number"),
    ("flat:rate=0", "rate must be above 0"), ("square:phase=2", "phase must be 0 to 1"),
    ("flat:rate=9000,hours=100", "more than 5000000 requests"),
])
def test_families_that_there_are_not_are_named(text: str, words: str) -> None:
    with pytest.raises(XpydError, match=words):
        make_trace(text, 1)


# ---- instances from data sheets


def test_presets_are_what_they_were() -> None:
    model = PRESETS["h200-8b"]
    assert model.prefill_rate == pytest.approx(27_138, rel=0.001)
    assert model.step_base == pytest.approx(0.00688, rel=0.001)
    assert model.kv_tokens == 749_376
    assert model.gpus == 1
    assert PRESETS["h200-70b-fp8"].prefill_rate == pytest.approx(6307, rel=0.001)


def test_more_devices_are_faster_but_not_so_many_times() -> None:
    one, four = (roofline("qwen3-32b", "h100", size) for size in (1, 4))
    assert 2 < four.prefill_rate / one.prefill_rate < 4
    assert 1.5 < one.step_base / four.step_base < 4
    assert four.gpus == 4
    assert four.kv_tokens > 4 * one.kv_tokens
    assert roofline("qwen3-32b", "l40s", 4).prefill_rate < 4 * roofline("qwen3-32b-fp8", "l40s", 1).prefill_rate


def test_all_that_fits_has_a_model_and_experts_read_all_and_compute_some() -> None:
    for name in MODELS:
        for gpu in GPUS:
            found = roofline(name, gpu, 32)
            assert found.kv_tokens > 0
            assert found.prefill_rate > 0
    dense, sparse = roofline("qwen3-32b", "h200"), roofline("qwen3-30b-a3b", "h200")
    assert sparse.prefill_rate > 5 * dense.prefill_rate
    assert sparse.step_base > 0.8 * dense.step_base


@pytest.mark.parametrize(("name", "found"), [
    ("Qwen/Qwen3-8B", ("qwen3-8b", False)), ("Qwen/Qwen3-32B-FP8", ("qwen3-32b", True)),
    ("meta-llama/Llama-3.3-70B-Instruct", ("llama-3.3-70b", False)),
    ("meta-llama/Meta-Llama-3.1-8B-Instruct-FP8", ("llama-3.1-8b", True)),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", ("qwen3-30b-a3b", False)),
])
def test_hub_ids_are_recognized(name: str, found: tuple[str, bool]) -> None:
    assert model_of(name) == found


def test_node_labels_are_recognized() -> None:
    names = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", "NVIDIA-H200", "NVIDIA-L40S", "H20")
    assert [gpu_of(name) for name in names] == ["h100", "a100", "h200", "l40s", "h20"]


@pytest.mark.parametrize(("model", "gpu", "tensor", "words"), [
    ("gpt-9", "h200", 1, "no model gpt-9; there are qwen3-0.6b"), ("qwen3-8b", "tpu", 1, "no GPU tpu; there are a100"),
    ("qwen3-8b-fp8", "a100", 1, "a100 computes nothing in fp8"), ("llama-3.3-70b", "h100", 1, "weights of 141 GB .*--tp 2"),
    ("qwen3-8b", "h200", 0, "a tensor-parallel size is 1 to 64"),
])
def test_instances_that_cannot_be_are_named_with_what_would_be_right(
    model: str, gpu: str, tensor: int, words: str
) -> None:
    with pytest.raises(XpydError, match=words):
        roofline(model, gpu, tensor)
