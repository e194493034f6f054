"""The calibration recovers a model from outcomes that the model itself made; parts of the benchmark can run apart."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from scripts import load

from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.world import World
from xpyd_operator.traffic.measures import RequestOutcome

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "lab/bench/planner"))
import calibrate

bench = load(Path(calibrate.__file__).with_name("__main__.py"))

MODEL = EngineModel(prefill_start=0.01, prefill_rate=4000, step_base=0.01, step_per_request=0.002, kv_tokens=10**6,
                    handover=0.01)


def outcomes(rate: float, seed: int) -> list[RequestOutcome]:
    trace = calibrate.load(rate, 150, (50, 500), (16, 96), seed)
    run = World(trace, MODEL, (1, 1), Static()).play()
    return [
        RequestOutcome(planned=each.at, started=each.at, prompt_tokens=each.prompt, output_tokens=each.output,
                       first=each.at + ttft, ended=each.at + ttft + tpot * (each.output - 1))
        for each, ttft, tpot in zip(trace, run.ttft, run.tpot, strict=True)
    ]


def test_a_model_is_found_again_in_every_second_of_its_requests() -> None:
    run = outcomes(2.0, 1)
    model = calibrate.fit(run, 2)
    assert model.prefill_rate == pytest.approx(MODEL.prefill_rate, rel=0.1)
    assert model.step_s(3, 0) == pytest.approx(MODEL.step_s(3, 0), rel=0.1)
    found = calibrate.summary([calibrate.compare(run, model, 2)])
    assert found["calibration_error"] < 0.1
    assert found["calibration_error"] == max(found[f"calibration_error_{name}"] for name in calibrate.RELATIVE)


def test_a_hiccup_of_the_machine_moves_the_model_little() -> None:
    run = outcomes(2.0, 1)
    for index in range(0, len(run), 14):
        run[index].first += 0.4
        run[index].ended += 2.0
    model = calibrate.fit(run, 2)
    assert model.prefill_rate == pytest.approx(MODEL.prefill_rate, rel=0.2)
    assert model.step_s(3, 0) == pytest.approx(MODEL.step_s(3, 0), rel=0.15)


def test_a_wrong_model_shows() -> None:
    slow = EngineModel(prefill_rate=1000, step_base=0.03, kv_tokens=10**6)
    found = calibrate.summary([calibrate.compare(outcomes(3.0, 2), slow, 2)])
    assert found["calibration_error"] > 0.5
    assert min(found[f"calibration_error_{name}"] for name in calibrate.RELATIVE) > 0.1


def test_a_run_in_which_no_prefill_was_alone_says_so() -> None:
    crowded = [RequestOutcome(planned=0.0, started=0.0, prompt_tokens=10, output_tokens=5, first=1.0 + index,
                              ended=9.0 + index)
               for index in range(20)]
    with pytest.raises(ValueError, match="0 of 20 prefills were alone"):
        calibrate.fit(crowded)


def test_parts_are_named_and_results_are_merged(tmp_path: Path) -> None:
    assert bench.parts("simulated,calibration") == ["sinusoid", "azure", "mooncake", "calibration"]
    with pytest.raises(argparse.ArgumentTypeError, match="no part moon; there are sinusoid"):
        bench.parts("azure,moon")
    path = tmp_path / "results.json"
    bench.merged({"a": 1, "b": 1}, path)
    bench.merged({"b": 2}, path)
    assert json.loads(path.read_text()) == {"a": 1, "b": 2}
